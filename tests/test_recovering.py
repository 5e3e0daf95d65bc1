"""Without an initial adapter, base weights tell what was taken out of them; or it is said why they cannot."""

import json
import shutil
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from snapshots import state
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.receipts import read_receipts
from tools.postprocess.convert_pissa import convert_pissa


def _without_init(base: Path, folder: Path, init: str = "pissa", **options: Any) -> adapters.Trained:
    run = adapters.train(base, folder, init, **options)
    shutil.rmtree(run.init)
    return run


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora and patterns": {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5}},
    "dora": {"use_dora": True},
    "embedding and lm_head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "more rank than outputs": {"r": 16, "target_modules": ["v_proj"]},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_base_and_residual_base_tell_what_was_taken_out(init: str, option: str, tiny: Path, tmp_path: Path) -> None:
    run = _without_init(tiny, tmp_path, init, **OPTIONS[option])
    report = convert_pissa(run.adapter, base=str(tiny), residual=run.residual)
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-4
    assert "least drop of the singular values" in report.details["initial adapter"]
    assert not convert_pissa(run.adapter, base=str(tiny), residual=run.residual).changed


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_is_a_function_of_the_base_is_decomposed_again(init: str, option: str, tiny: Path, tmp_path: Path) -> None:
    run = _without_init(tiny, tmp_path, init, **OPTIONS[option])
    report = convert_pissa(run.adapter, base=str(tiny))
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-4
    assert len(report.details["sha256 of the base weights"]) == 64
    assert "decomposed again by numpy" in report.details["initial adapter"]
    recorded = read_receipts(run.adapter)[-1]["recorded"]
    assert recorded.items() <= report.details.items()
    assert recorded.keys() >= {"initial adapter", "sha256 of the base weights"}
    assert not convert_pissa(run.adapter, base=str(tiny)).changed


def test_a_transposed_base_is_decomposed_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64)).save_pretrained(tmp_path / "base")
    options = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    run = _without_init(tmp_path / "base", tmp_path, **options)
    shutil.copytree(run.adapter, tmp_path / "again")
    for adapter, residual in ((run.adapter, run.residual), (tmp_path / "again", None)):
        convert_pissa(adapter, base=str(run.base), residual=residual)
        assert (adapters.logits_on(run.base, adapter) - run.logits).abs().max() < 1e-4


def test_a_residual_base_in_bf16_gives_what_its_rounding_left(tiny: Path, tmp_path: Path) -> None:
    def narrow(base: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)

    narrow(tiny).save_pretrained(tmp_path / "base")
    run = _without_init(tmp_path / "base", tmp_path, "pissa", model=narrow)
    report = convert_pissa(run.adapter, base=str(run.base), residual=run.residual)
    assert (adapters.logits_on(run.base, run.adapter, narrow) - run.logits.float()).abs().max() < 0.1
    assert report.changed


def _residual_of_another(run: adapters.Trained) -> dict[str, Any]:
    torch.manual_seed(9)
    model = AutoModelForCausalLM.from_pretrained(run.residual)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(run.residual)
    return {"base": str(run.base), "residual": run.residual}


REFUSED = {
    "random": ("pissa_niter_4", lambda run: {"base": str(run.base)}, r"starts from a random projection"),
    "data": ("corda", lambda run: {"base": str(run.base)}, r"corda depends on the data it was calibrated with"),
    "gradients": ("lora_ga", lambda run: {"base": str(run.base)}, r"lora_ga depends on the data"),
    "no base": ("pissa", lambda run: {}, r"is not here; name it with --init, or the original base with --base"),
    "residual alone": ("pissa", lambda run: {"residual": run.residual}, r"W is not given; add --base"),
    "both": ("pissa", lambda run: {"residual": run.residual, "init": run.base}, r"give one"),
    "the base itself": (
        "pissa",
        lambda run: {"base": str(run.base), "residual": run.base},
        r"is the same as in the base, so nothing was taken out",
    ),
    "another residual": ("pissa", _residual_of_another, r"differs from .* by more than rank 4 .*drop by [1-9]\.\d"),
    "no weights": ("pissa", lambda run: {"base": "nobody/nowhere"}, r"its weights are not on this machine"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_recovered_is_refused_with_the_reason(why: str, tiny: Path, tmp_path: Path) -> None:
    init, given, message = REFUSED[why]
    run = _without_init(tiny, tmp_path, init)
    before = state(run.adapter)
    with pytest.raises(CheckpointError, match=message):
        convert_pissa(run.adapter, **given(run))
    assert state(run.adapter) == before


def test_equal_singular_values_leave_no_principal_part(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.copy_(torch.eye(32))
    model.save_pretrained(tmp_path / "base")
    run = _without_init(tmp_path / "base", tmp_path)
    with pytest.raises(CheckpointError, match=r"singular values 4 and 5 of the base are equal"):
        convert_pissa(run.adapter, base=str(run.base))


def test_base_weights_are_read_once_though_the_plan_is_made_twice(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    calls = []
    monkeypatch.setattr(np.linalg, "svd", lambda *a, _svd=np.linalg.svd, **o: calls.append(1) or _svd(*a, **o))
    run = _without_init(tiny, tmp_path)
    convert_pissa(run.adapter, base=str(tiny))
    assert len(calls) == len(json.loads((run.adapter / "adapter_config.json").read_text())["target_modules"]) * 2
