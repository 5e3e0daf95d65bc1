"""What readers of an adapter stumble over is named, with the option or command that resolves it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import state

from tools.checkpoint.errors import CheckpointError
from tools.lora.serving import rank_option, serving_limits
from tools.postprocess.convert_pissa import convert_pissa
from tools.postprocess.inspect import inspect

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "init_lora_weights": True}


def test_another_method_than_lora_is_named() -> None:
    assert list(serving_limits({"peft_type": "IA3"})) == ["peft_type IA3"]
    assert list(serving_limits({**LORA, "layer_replication": [[0, 2]]})) == ["layer_replication"]


@pytest.mark.parametrize(
    ("rank", "option"), [(8, None), (16, None), (17, "--max-lora-rank 32"), (300, "--max-lora-rank 320"), (600, "none")]
)
def test_the_rank_option_is_the_next_on_the_list(rank: int, option: str | None) -> None:
    found = rank_option(rank)
    assert found is None if option is None else str(found).startswith(option)


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "rank 32": ({"r": 32}, "--max-lora-rank 32, or tools convert-pissa --max-rank 16"),
    "rank 64": ({"rank_pattern": {"q_proj": 64}, "alpha_pattern": {"q_proj": 1}}, "--max-lora-rank 64"),
    "use_rslora": ({"use_rslora": True}, "--fold-scaling"),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 2}}, "--fold-scaling"),
    "use_dora": ({"use_dora": True}, "tools merge-adapter"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "tools merge-adapter"),
    "trainable_token_indices": ({"trainable_token_indices": [1]}, "tools merge-adapter"),
    "target_parameters": ({"target_parameters": ["experts.down_proj"]}, "tools merge-adapter"),
    "bias all": ({"bias": "all"}, "tools merge-adapter"),
    "init_lora_weights olora": ({"init_lora_weights": "olora"}, "decomposing it again; convert first"),
}


@pytest.mark.parametrize("what", LIMITS)
def test_each_limit_is_named_with_its_remedy(what: str) -> None:
    values, remedy = LIMITS[what]
    assert remedy in serving_limits(LORA | values)[what]


@pytest.mark.parametrize("values", [{}, {"r": 16, "alpha_pattern": {}}, {"r": None}, {"bias": "none"}])
def test_a_plain_adapter_of_little_rank_has_none(values: dict[str, Any]) -> None:
    assert serving_limits(LORA | values) == {}


def test_pi_11_an_adapter_that_rewrites_the_base_says_so(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    for init, how in (("pissa", "decomposing it again"), ("pissa_niter_4", "decomposing it at random")):
        adapters.set_config(run.adapter, init_lora_weights=init)
        said = inspect(run.adapter).details["serving"][f"init_lora_weights {init}"]
        assert said == f"rewrites the base on load, {how}; convert first: tools convert-pissa"
    convert_pissa(run.adapter, init=run.init)
    assert adapters.config_of(run.adapter)["init_lora_weights"] is True
    assert inspect(run.adapter).details["serving"] == "as an adapter, nothing in the way"


def test_pi_13_fields_that_say_nothing_are_left_to_newer_versions(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, trainable_token_indices=[1, 2], exclude_modules=["k_proj"])
    written = adapters.config_of(run.adapter)
    assert {"eva_config", "corda_config", "arrow_config", "lora_bias", "exclude_modules"} <= written.keys()
    convert_pissa(run.adapter, init=run.init)
    config = adapters.config_of(run.adapter)
    newer = {"trainable_token_indices": [1, 2], "exclude_modules": ["k_proj"]}
    assert not {"eva_config", "corda_config", "arrow_config", "lora_bias", "peft_version"} & config.keys()
    assert {field: config[field] for field in newer} == newer
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-6


def test_pi_15_the_report_states_rank_option_and_error(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, r=16)
    whole = convert_pissa(run.adapter, init=run.init, output=tmp_path / "whole")
    assert whole.details["rank"].startswith("16 -> 32")
    assert whole.details["serving"] == "rank 32 needs vLLM's --max-lora-rank 32"
    less = convert_pissa(run.adapter, init=run.init, output=tmp_path / "less", max_rank=16)
    assert 0 < float(less.details["relative error"]["overall"]) < 1
    assert "serving" not in less.details
    assert adapters.config_of(tmp_path / "less")["r"] == 16


def test_pi_16_a_folded_scale_is_right_where_rslora_is_unknown(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, True, r=16, lora_alpha=16, use_rslora=True)
    before = load_file(run.adapter / "adapter_model.safetensors")
    convert_pissa(run.adapter, fold_scaling=True)
    config, after = adapters.config_of(run.adapter), load_file(run.adapter / "adapter_model.safetensors")
    assert config["use_rslora"] is False
    naive = config["lora_alpha"] / config["r"]
    for name in (n.removesuffix("lora_A.weight") for n in before if n.endswith("lora_A.weight")):
        wanted = 4.0 * before[f"{name}lora_B.weight"] @ before[f"{name}lora_A.weight"]
        found = naive * after[f"{name}lora_B.weight"] @ after[f"{name}lora_A.weight"]
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_pi_05_what_was_trained_in_full_is_kept_as_it_is(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, modules_to_save=["lm_head"])
    name = "base_model.model.lm_head.weight"
    trained = load_file(run.adapter / "adapter_model.safetensors")[name]
    convert_pissa(run.adapter, init=run.init)
    assert torch.equal(load_file(run.adapter / "adapter_model.safetensors")[name], trained)
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-6


def test_pi_07_an_adapted_embedding_survives(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, target_modules=["q_proj", "embed_tokens"])
    before = {
        name.partition(".lora_")[0] for name in load_file(run.adapter / "adapter_model.safetensors") if ".lora_" in name
    }
    convert_pissa(run.adapter, init=run.init)
    after = {name.partition(".lora_")[0] for name in load_file(run.adapter / "adapter_model.safetensors")}
    assert before == after
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-6


FI_13 = {
    "no tensors": lambda tensors: {},
    "all empty": lambda tensors: {name: torch.ones(0) for name in tensors},
    "one empty": lambda tensors: tensors | {"base_model.model.lm_head.weight": torch.ones(0)},
}


@pytest.mark.parametrize("which", ["adapter", "init"])
@pytest.mark.parametrize("what", FI_13)
def test_fi_13_what_zero_3_did_not_gather_is_refused(what: str, which: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, modules_to_save=["lm_head"])
    file = getattr(run, which) / "adapter_model.safetensors"
    save_file(FI_13[what](load_file(file)), file)
    before = state(run.adapter)
    with pytest.raises(CheckpointError, match=r"has 0 elements|holds no lora_A and lora_B at all|has no base_model"):
        convert_pissa(run.adapter, init=run.init)
    assert state(run.adapter) == before


def test_conversion_needs_no_torch(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    paths = json.dumps([str(run.adapter), str(run.init), str(tmp_path / "lora")])
    script = (
        "import json, sys; from pathlib import Path; from tools.postprocess.convert_pissa import convert_pissa;"
        f"adapter, init, output = map(Path, json.loads({paths!r}));"
        "convert_pissa(adapter, init=init, output=output, max_rank=6);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
