"""Every initialisation with every option of LoRA: trained, converted, and the same model on the original base."""

from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from safetensors.torch import load_file

from tools.postprocess.convert_pissa import convert_pissa

PATTERNS = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5, "layers.1.self_attn.q_proj": 3}}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"v_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 5}},
    "both patterns": PATTERNS,
    "all linear": {"target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]},
    "one layer": {"layers_to_transform": [1]},
}
ALONE: dict[str, dict[str, Any]] = {
    "rslora and patterns": {"use_rslora": True, **PATTERNS},
    "dora": {"use_dora": True},
    "dora, rslora and patterns": {"use_dora": True, "use_rslora": True, **PATTERNS},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "modules_to_save": {"modules_to_save": ["lm_head", "norm"]},
    "trainable tokens": {"trainable_token_indices": [1, 5]},
}
INITS = ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga")
# lora_ga and corda begin with linear layers alone.
BEGINS = [(i, o) for i in (*INITS, "taken") for o in ALONE if o != "embedding" or i not in ("corda", "lora_ga")]


def _is_the_trained_model(run: adapters.Trained, model: adapters.Load = adapters.load) -> None:
    """The converted adapter on the original base; it would differ by far without the conversion."""
    before = adapters.logits_on(run.base, run.init, model)
    report = convert_pissa(run.adapter, init=run.init, output=run.adapter.parent / "lora")
    assert report.changed
    found = adapters.logits_on(run.base, run.adapter.parent / "lora", model)
    assert (found - run.logits).abs().max() < 1e-5
    assert (before - run.logits).abs().max() > 1e-2


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("init", INITS)
def test_it_is_the_trained_model_and_equals_what_peft_makes(init: str, option: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, init, peft=True, **OPTIONS[option])
    _is_the_trained_model(run)
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "lora", run.by_peft))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    for field in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"):
        assert adapters.config_of(tmp_path / "lora")[field] == adapters.config_of(run.by_peft)[field]


@pytest.mark.parametrize(("init", "option"), BEGINS)
def test_it_is_the_trained_model_where_peft_fails(init: str, option: str, tiny: Path, tmp_path: Path) -> None:
    _is_the_trained_model(adapters.train(tiny, tmp_path, init, **ALONE[option]))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_bias_of_b_is_part_of_the_adapter_alone_and_stays(use_rslora: bool, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, "taken", lora_bias=True, use_rslora=use_rslora)
    first = load_file(run.init / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in first.items() if name.endswith("lora_B.bias"))
    _is_the_trained_model(run)


@pytest.mark.real
def test_a_real_model_is_the_trained_one_and_equals_what_peft_makes(smollm2: Path, tmp_path: Path) -> None:
    run = adapters.train(smollm2, tmp_path, "pissa_niter_4", peft=True, target_modules=["q_proj", "down_proj"])
    convert_pissa(run.adapter, init=run.init, base=str(smollm2))
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (run.adapter, run.by_peft))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert (adapters.logits_on(smollm2, run.adapter) - run.logits).abs().max() < 1e-3
