"""merge-adapter: no tensor of a merged model holds NaN or infinity, and one of its numbers has changed."""

from pathlib import Path
from typing import Any

import merging
import pytest
import torch
from safetensors.torch import save_file

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.merge_adapter import merge_adapter

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "saved": ({"modules_to_save": ["norm"]}, ".norm."),
    "tokens": ({"trainable_token_indices": [1, 5]}, "tokens_delta"),
    "bias": ({"lora_bias": True}, "lora_B.bias"),
    "magnitude": ({"use_dora": True}, "magnitude"),
    "factors": ({}, "lora_B"),
}
NONE = {"NaN": float("nan"), "infinity": float("inf"), "NaN of a GPU": 0x7FFFFFFF}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", NONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_no_number_is_refused(dtype: torch.dtype, value: str, kind: str, tmp_path: Path) -> None:
    options, part = KINDS[kind]
    base = merging.model(tmp_path / "base", dtype=dtype, attention_bias=True)
    merging.adapter(base, tmp_path / "adapter", dtype=torch.float32, **options)
    number = NONE[value]

    def spoilt(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.float().clone().view(-1)
        flat[-1] = number if isinstance(number, float) else torch.tensor(number, dtype=torch.int32).view(torch.float32)
        return flat.view(tensor.shape)

    merging.rewritten(tmp_path / "adapter", lambda held: {n: spoilt(t) if part in n else t for n, t in held.items()})
    with pytest.raises(CheckpointError, match="NaN or infinity; the training had diverged"):
        merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("kind", ["saved", "tokens", "bias"])
def test_what_float16_cannot_hold_is_refused(kind: str, tmp_path: Path) -> None:
    options, part = KINDS[kind]
    base = merging.model(tmp_path / "base", dtype=torch.float16, attention_bias=True)
    merging.adapter(base, tmp_path / "adapter", dtype=torch.float32, **options)
    merging.rewritten(tmp_path / "adapter", lambda held: {n: t + 1e6 if part in n else t for n, t in held.items()})
    with pytest.raises(CheckpointError, match="would have numbers that F16 cannot hold; give the base in BF16 or F32"):
        merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def without_lora(adapter: Path) -> None:
    merging.rewritten(adapter, lambda held: {n: t * 0 if "lora_B" in n else t for n, t in held.items()})


def test_a_saved_tensor_alone_is_a_change(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", dtype=torch.bfloat16)
    merging.adapter(base, tmp_path / "adapter", dtype=torch.float32, modules_to_save=["lm_head"])
    without_lora(tmp_path / "adapter")
    assert merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged").changed


def test_a_value_head_alone_is_none(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    merging.adapter(base, tmp_path / "adapter")
    without_lora(tmp_path / "adapter")
    head = {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.randn(1)}
    torch.save(head, tmp_path / "adapter/pytorch_model.bin")
    with pytest.raises(CheckpointError, match="changes nothing: every number of the base is the same"):
        merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")


def test_the_value_head_of_another_adapter_is_not_lost(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    for name in ("adapter", "other"):
        merging.adapter(base, tmp_path / name)
    save_file({"v_head.summary.weight": torch.randn(1, 32)}, tmp_path / "other/value_head.safetensors")
    with pytest.raises(
        CheckpointError, match=r"other: has a value head, .*; name this adapter first, or move its head"
    ):
        merge_adapter(tmp_path / "adapter", base=str(base), more=[str(tmp_path / "other")], output=tmp_path / "merged")
