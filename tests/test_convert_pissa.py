"""A converted adapter is, on the original base, the model that was trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import contents, state
from transformers import AutoModelForCausalLM

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.convert_pissa import convert_pissa
from tools.postprocess.verify import verify


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "adapter_config.json").read_text())


def set_config(path: Path, **values: Any) -> None:
    (path / "adapter_config.json").write_text(json.dumps(config_of(path) | values))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_the_converted_adapter_is_the_trained_model_on_the_original_base(init: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, init)
    before = contents(run.init)
    convert_pissa(run.adapter, init=run.init)
    assert torch.allclose(adapters.logits_on(tiny, run.adapter), run.logits, atol=1e-6)
    assert contents(run.init) == before


OPTIONS = {
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 4}},
    "rslora and patterns": {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.q_proj": 3}},
    "dora": {"use_dora": True},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "all linear": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_lora_gives_the_trained_minus_the_initial_product(name: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, **OPTIONS[name])
    convert_pissa(run.adapter, init=run.init)
    assert torch.allclose(adapters.logits_on(tiny, run.adapter), run.logits, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
@pytest.mark.parametrize("rank", [4, 16])
def test_a_base_in_16_bits_has_initial_factors_of_16_bits(
    dtype: torch.dtype, init: str, rank: int, tiny: Path, tmp_path: Path
) -> None:
    """PEFT rounds them to the dtype of the base and stores them as float32."""

    def narrow(path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    run = adapters.train(tiny, tmp_path, init, model=narrow, r=rank)
    assert {tensor.dtype for tensor in load_file(run.init / "adapter_model.safetensors").values()} == {torch.float32}
    assert convert_pissa(run.adapter, init=run.init).changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_factors_are_concatenated_and_negated_bit_for_bit(dtype: torch.dtype, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    for folder in (run.init, run.adapter):
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    now, then = (load_file(folder / "adapter_model.safetensors") for folder in (run.adapter, run.init))
    convert_pissa(run.adapter, init=run.init)
    for name, tensor in load_file(run.adapter / "adapter_model.safetensors").items():
        pair = (now[name], then[name]) if "lora_A" in name else (now[name], -then[name])
        assert torch.equal(tensor, torch.cat(pair, dim=0 if "lora_A" in name else 1))


def test_pi_01_the_result_belongs_on_the_original_base(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    report = convert_pissa(run.adapter, init=run.init, output=tmp_path / "lora")
    assert report.details["base"] == config_of(tmp_path / "lora")["base_model_name_or_path"] == str(tiny)
    assert str(tiny) in report.summary
    assert (adapters.logits_on(tiny, tmp_path / "lora") - run.logits).abs().max() < 1e-6
    passed = verify(tmp_path / "lora", logits=run.adapter, base=tiny, reference_base=run.residual)
    assert passed.details["logits"]["largest difference"] < 1e-6
    with pytest.raises(CheckpointError, match=r"logits differ from .* by up to .*, more than 0.001"):
        verify(tmp_path / "lora", logits=run.adapter, base=run.residual, reference_base=run.residual)


def test_pi_01_a_residual_base_is_never_written_down_as_the_original(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    shutil.move(run.init, run.residual / "pissa_init")
    set_config(run.adapter, base_model_name_or_path=str(run.residual))
    with pytest.raises(CheckpointError, match="so is the residual base; name the original base with --base"):
        convert_pissa(run.adapter, init=run.residual / "pissa_init")
    convert_pissa(run.adapter, init=run.residual / "pissa_init", base=str(tiny))
    assert config_of(run.adapter)["base_model_name_or_path"] == str(tiny)


def test_a_base_is_named_by_its_whole_path(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = adapters.train(tiny, tmp_path)
    monkeypatch.chdir(tiny.parent)
    convert_pissa(run.adapter, init=run.init, base=tiny.name)
    assert config_of(run.adapter)["base_model_name_or_path"] == str(tiny)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_pi_02_rank_and_alpha_double_and_the_report_says_why(init: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, init)
    report = convert_pissa(run.adapter, init=run.init, output=tmp_path / "lora")
    config = config_of(tmp_path / "lora")
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 16, True)
    shapes = {tuple(t.shape) for t in load_file(tmp_path / "lora" / "adapter_model.safetensors").values()}
    assert shapes == {(8, 32), (32, 8), (16, 8)}
    assert report.details["rank"] == "4 -> 8, for [A; A0] and [B, -B0]"


def test_pi_02_a_config_that_disagrees_with_its_tensors_is_refused(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    convert_pissa(run.adapter, init=run.init)
    set_config(run.adapter, r=3)
    shutil.copytree(run.init, tmp_path / "other")
    tensors = {name: t + 1 for name, t in load_file(run.init / "adapter_model.safetensors").items()}
    save_file(tensors, tmp_path / "other" / "adapter_model.safetensors")
    before = state(run.adapter)
    with pytest.raises(CheckpointError, match=r"has rank 8, adapter_config.json says 3"):
        convert_pissa(run.adapter, init=tmp_path / "other")
    assert state(run.adapter) == before


def test_pi_03_rslora_keeps_its_scale(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, use_rslora=True, lora_alpha=8)
    convert_pissa(run.adapter, init=run.init)
    config = config_of(run.adapter)
    assert config["r"] == 8
    assert config["use_rslora"] is True
    assert config["lora_alpha"] == pytest.approx(11.3137, abs=1e-4)
    assert torch.allclose(adapters.logits_on(tiny, run.adapter), run.logits, atol=1e-6)


def test_pi_03_patterns_double_without_rslora(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 4})
    convert_pissa(run.adapter, init=run.init)
    assert config_of(run.adapter)["rank_pattern"] == {"v_proj": 4}
    assert config_of(run.adapter)["alpha_pattern"] == {"v_proj": 8}


def test_a_converted_adapter_is_recognised_by_its_tensors(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    convert_pissa(run.adapter, init=run.init)
    shutil.rmtree(run.adapter / ".burnish")
    set_config(run.adapter, init_lora_weights="pissa")  # what a backup says about itself cannot be trusted
    before = state(run.adapter)
    assert not convert_pissa(run.adapter, init=run.init).changed
    assert state(run.adapter) == before


@pytest.mark.parametrize("place", ["beside", "in the run", "above finished"])
def test_the_initial_adapter_is_found_where_trainers_leave_it(place: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path / "made")
    where = {"beside": "run", "in the run": "run/checkpoint-3", "above finished": "run/finished/checkpoint-3"}[place]
    shutil.copytree(run.adapter, tmp_path / where)
    shutil.copytree(run.init, tmp_path / "run" / "pissa_init")
    convert_pissa(tmp_path / where)
    assert torch.allclose(adapters.logits_on(tiny, tmp_path / where), run.logits, atol=1e-6)


def test_plain_lora_is_nothing_to_do_even_beside_an_initial_adapter(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    set_config(run.adapter, init_lora_weights=True)
    assert convert_pissa(run.adapter).summary == "plain LoRA (init_lora_weights is true); nothing to do"


def test_training_state_is_not_doubled_in_place(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    (run.adapter / "optimizer.pt").write_bytes(b"state")
    with pytest.raises(CheckpointError, match=r"still holds an optimizer, .*choose an --output"):
        convert_pissa(run.adapter, init=run.init)
    report = convert_pissa(run.adapter, init=run.init, output=tmp_path / "lora")
    assert report.details["left_out"] == ["optimizer.pt"]
    assert not (tmp_path / "lora" / "optimizer.pt").exists()


def _no_init(run: adapters.Trained) -> tuple[Path, Path | None]:
    shutil.rmtree(run.init)
    return run.adapter, None


def _other_rank(run: adapters.Trained) -> tuple[Path, Path | None]:
    other = adapters.train(run.base, run.adapter.parent / "other", r=2)
    return run.adapter, other.init


def _other_scale(run: adapters.Trained) -> tuple[Path, Path | None]:
    set_config(run.init, lora_alpha=99)
    return run.adapter, run.init


def _other_modules(run: adapters.Trained) -> tuple[Path, Path | None]:
    other = adapters.train(run.base, run.adapter.parent / "other", target_modules=["k_proj"])
    return run.adapter, other.init


def _empty(run: adapters.Trained) -> tuple[Path, Path | None]:
    save_file({}, run.adapter / "adapter_model.safetensors")
    return run.adapter, run.init


def _ungathered(run: adapters.Trained) -> tuple[Path, Path | None]:
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    save_file({name: torch.ones(0) for name in tensors}, run.adapter / "adapter_model.safetensors")
    return run.adapter, run.init


def _unknown_tensor(run: adapters.Trained) -> tuple[Path, Path | None]:
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    save_file(
        tensors | {"layers.0.q.vera_lora_lambda": torch.ones(2), "a.lora_x": torch.ones(2)},
        run.adapter / "adapter_model.safetensors",
    )
    return run.adapter, run.init


def _not_lora(run: adapters.Trained) -> tuple[Path, Path | None]:
    set_config(run.adapter, peft_type="VERA")
    return run.adapter, run.init


def _odd_value(**values: Any) -> Callable[[adapters.Trained], tuple[Path, Path | None]]:
    def spoil(run: adapters.Trained) -> tuple[Path, Path | None]:
        set_config(run.adapter, **values)
        return run.adapter, run.init

    return spoil


REFUSED = {
    "rank as text": (_odd_value(r="4"), r"adapter_config.json: r is '4', not a number"),
    "no alpha": (_odd_value(lora_alpha=None), r"lora_alpha is None, not a number"),
    "patterns as a list": (_odd_value(rank_pattern=["q_proj"]), r"rank_pattern is \['q_proj'\], not a map"),
    "targets as a number": (_odd_value(target_modules=5), r"target_modules is 5, not a list of names"),
    "base as a list": (_odd_value(base_model_name_or_path=["a"]), r"base_model_name_or_path is \['a'\], not a name"),
    "itself as init": (lambda run: (run.adapter, run.adapter), r"is the trained adapter itself"),
    "no initial adapter": (_no_init, r"the adapter as it was before training is not here; name it with --init"),
    "a full model": (lambda run: (run.base, run.init), r"a full model: adapter_config.json is not there"),
    "a full model as init": (lambda run: (run.adapter, run.base), r"no adapter: adapter_config.json"),
    "no such init": (lambda run: (run.adapter, run.base / "nowhere"), r"nowhere: not found"),
    "another rank": (_other_rank, r"rank 2 at .*lora_A.weight, but .* has rank 4; is it the initial adapter"),
    "another scale": (_other_scale, r"lora_alpha is 99, in .* 8; is it the initial adapter of this run"),
    "other modules": (_other_modules, r"has no base_model.model.*q_proj.lora_A.weight"),
    "no tensors": (_empty, r"holds no lora_A and lora_B at all|has no base_model"),
    "un-gathered": (_ungathered, r"has 0 elements: looks like an un-gathered ZeRO-3 parameter"),
    "an unknown tensor": (_unknown_tensor, r"a.lora_x is not a part of LoRA that is known here"),
    "another method": (_not_lora, r"peft_type is VERA; only LoRA is known here"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(why: str, tiny: Path, tmp_path: Path) -> None:
    spoil, message = REFUSED[why]
    run = adapters.train(tiny, tmp_path, "pissa")
    set_config(run.adapter, init_lora_weights="pissa")
    adapter, init = spoil(run)
    before = state(adapter)
    with pytest.raises(CheckpointError, match=message):
        convert_pissa(adapter, init=init)
    assert state(adapter) == before


@pytest.mark.parametrize(
    "said", [{"tie_word_embeddings": True}, {}, {"text_config": {"tie_word_embeddings": True}}], ids=str
)
def test_a_tied_lm_head_target_is_refused(said: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    """Also where the file leaves it to the default of transformers, which is to tie."""
    run = adapters.train(tiny, tmp_path, target_modules=["q_proj", "lm_head"])
    base = Path(shutil.copytree(tiny, tmp_path / "tied"))
    config = json.loads((base / "config.json").read_text())
    del config["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(config | said))
    set_config(run.adapter, base_model_name_or_path=str(base))
    with pytest.raises(CheckpointError, match="targets lm_head, which is tied to the embedding"):
        convert_pissa(run.adapter, init=run.init)
