"""Less rank is the nearest change there is, a folded scale the same model, any factors what algebra says."""

import json
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from snapshots import contents
from transformers import MixtralConfig, MixtralForCausalLM

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.convert_pissa import convert_pissa

PATTERNS = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5, "layers.1.self_attn.q_proj": 3}}


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """What a converted adapter adds to each linear module, by its own files."""
    config, tensors = adapters.config_of(folder), load_file(folder / "adapter_model.safetensors")
    found = {}
    for name in (n.removesuffix(".lora_A.weight") for n in tensors if n.endswith(".lora_A.weight")):
        r = next((v for k, v in config["rank_pattern"].items() if name.endswith(k)), config["r"])
        alpha = next((v for k, v in config["alpha_pattern"].items() if name.endswith(k)), config["lora_alpha"])
        scale = alpha / (r**0.5 if config["use_rslora"] else r)
        b, a = (tensors[f"{name}.lora_{factor}.weight"].double() for factor in "BA")
        assert a.shape[0] == b.shape[1] == r
        found[name] = scale * b @ a
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rslora and patterns": {"use_rslora": True, **PATTERNS},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_folded_scale_is_the_same_model_for_readers_of_alpha_over_r(option: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, **OPTIONS[option])
    convert_pissa(run.adapter, init=run.init, fold_scaling=True)
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-5
    config = adapters.config_of(run.adapter)
    assert not config["use_rslora"]
    assert config["lora_alpha"] == config["r"]
    assert config["alpha_pattern"] == config["rank_pattern"]
    assert not convert_pissa(run.adapter, init=run.init, fold_scaling=True).changed


@pytest.mark.parametrize("option", OPTIONS)
def test_enough_rank_loses_nothing(option: str, tiny: Path, tmp_path: Path) -> None:
    """A module of little rank has a change of little rank, whatever rank its factors have."""
    run = adapters.train(tiny, tmp_path, **OPTIONS[option])
    report = convert_pissa(run.adapter, init=run.init, max_rank=7)
    assert set(report.details["relative error"]) > {"overall"}
    assert float(report.details["relative error"]["overall"]) < 0.2
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1.0


def test_less_rank_is_the_truncated_svd_of_the_change(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, **PATTERNS)
    convert_pissa(run.adapter, init=run.init, output=tmp_path / "whole")
    report = convert_pissa(run.adapter, init=run.init, output=tmp_path / "less", max_rank=3)
    left_out = whole = 0.0
    for (name, full), less in zip(deltas(tmp_path / "whole").items(), deltas(tmp_path / "less").values(), strict=True):
        u, s, v = torch.linalg.svd(full, full_matrices=False)
        torch.testing.assert_close(less, u[:, :3] @ s[:3].diag() @ v[:3], atol=1e-6, rtol=1e-5)
        error = (s[3:] ** 2).sum().sqrt() / s.norm()
        assert float(report.details["relative error"][name.removeprefix("base_model.model.")]) == pytest.approx(
            float(error), rel=1e-2, abs=1e-6
        )
        left_out, whole = left_out + float((s[3:] ** 2).sum()), whole + float((s**2).sum())
    overall = float(report.details["relative error"]["overall"])
    assert overall == pytest.approx((left_out / whole) ** 0.5, rel=1e-2)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"rank 3 costs a relative error of .*, more than 1e-06"):
        convert_pissa(run.adapter, init=run.init, output=tmp_path / "refused", max_rank=3, max_error=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    with pytest.raises(CheckpointError, match=r"--max-error is the price of --max-rank"):
        convert_pissa(run.adapter, init=run.init, max_error=0.1)


def test_back_to_the_rank_of_training_is_never_converted_twice(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    convert_pissa(run.adapter, init=run.init, max_rank=4)
    again = convert_pissa(run.adapter, init=run.init, max_rank=4)
    assert again.summary == "already plain LoRA: converted before; nothing to do"
    assert convert_pissa(run.adapter, max_rank=2).details["relative error"]
    assert adapters.config_of(run.adapter)["r"] == 2


def test_experts_lose_rank_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**small, intermediate_size=48, num_hidden_layers=1, num_local_experts=4)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    options = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    run = adapters.train(tmp_path / "base", tmp_path, "taken", **options)
    convert_pissa(run.adapter, init=run.init, output=tmp_path / "whole")
    report = convert_pissa(tmp_path / "whole", output=tmp_path / "less", max_rank=7)
    assert 0 < float(report.details["relative error"]["overall"]) < 0.5
    difference = adapters.logits_on(run.base, tmp_path / "less") - run.logits
    assert 0 < difference.abs().max() < 1.0


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            lambda t: (t * 60000).half(),
            {"fold_scaling": True},
            r"lora_B.weight would hold \S+ in F16; had the training",
        ),
        (
            lambda t: t * float("nan"),
            {"max_rank": 2},
            r"lora_A.weight holds NaN or infinity; the training had diverged",
        ),
    ],
    ids=["too large", "NaN"],
)
def test_what_no_number_can_hold_is_refused(
    change: Any, options: dict[str, Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    run = adapters.train(tiny, tmp_path, "pissa", lora_alpha=256)
    adapters.set_config(run.adapter, init_lora_weights=True)
    file = run.adapter / "adapter_model.safetensors"
    save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file)
    before = contents(run.adapter)
    with pytest.raises(CheckpointError, match=message):
        convert_pissa(run.adapter, **options)
    assert contents(run.adapter) == before


def test_plain_lora_is_folded_too(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, True, use_rslora=True, r=16, lora_alpha=16)
    report = convert_pissa(run.adapter, fold_scaling=True)
    assert report.changed
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-6
    assert not convert_pissa(run.adapter, fold_scaling=True).changed


def test_a_fitting_rank_is_nothing_to_do(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, True)
    assert not convert_pissa(run.adapter, max_rank=4).changed


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
SIZES = st.integers(1, 9)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["q_proj", "v_proj", "up_proj"]), min_size=1, unique=True))
    ranks = draw(st.dictionaries(st.sampled_from(names), st.integers(1, 5)))
    alphas = draw(st.dictionaries(st.sampled_from(names), st.integers(1, 9)))
    return {
        "modules": {f"model.layers.0.{name}": (draw(SIZES), draw(SIZES)) for name in names},
        "config": {
            "peft_type": "LORA",
            "r": draw(st.integers(1, 5)),
            "lora_alpha": draw(st.integers(1, 9)),
            "use_rslora": draw(st.booleans()),
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "init_lora_weights": "lora_ga",
            "base_model_name_or_path": "base",
        },
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "fold": draw(st.booleans()),
        "max_rank": draw(st.none() | st.just(10)),
    }


@settings(max_examples=60, deadline=None)
@given(run=runs())
def test_the_change_of_the_base_is_the_trained_minus_the_initial_product(
    run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    config, dtype = run["config"], DTYPES[run["dtype"]]
    wanted: dict[str, torch.Tensor] = {}
    for sign, part in ((1, "trained"), (-1, "init")):
        tensors = {}
        for name, (rows, columns) in run["modules"].items():
            r = config["rank_pattern"].get(name.rpartition(".")[2], config["r"])
            alpha = config["alpha_pattern"].get(name.rpartition(".")[2], config["lora_alpha"])
            a, b = torch.randn(r, columns, dtype=torch.float64), torch.randn(rows, r, dtype=torch.float64)
            key = f"base_model.model.{name}"
            tensors |= {f"{key}.lora_A.weight": a.to(dtype), f"{key}.lora_B.weight": b.to(dtype)}
            product = tensors[f"{key}.lora_B.weight"].double() @ tensors[f"{key}.lora_A.weight"].double()
            scale = alpha / (r**0.5 if config["use_rslora"] else r)
            wanted[key] = wanted.get(key, torch.zeros(rows, columns)) + sign * scale * product
        (folder / part).mkdir()
        save_file(tensors, folder / part / "adapter_model.safetensors")
        (folder / part / "adapter_config.json").write_text(json.dumps(config))
    options = {"fold_scaling": run["fold"], "max_rank": run["max_rank"]}
    convert_pissa(folder / "trained", init=folder / "init", **options)
    epsilon = 2 * torch.finfo(dtype).eps if run["fold"] else 1e-6
    for name, found in deltas(folder / "trained").items():
        bound = epsilon * (1 + wanted[name].abs().max()) * 20
        assert (found - wanted[name]).abs().max() <= bound
