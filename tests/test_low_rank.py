"""The arithmetic of one merged tensor: against torch, over shapes, ranks, dtypes and kinds of layers."""

import random
from pathlib import Path
from typing import Any

import merging
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModel, CLIPVisionConfig, CLIPVisionModel, ConvNextConfig, ConvNextModel, PreTrainedModel

from tools.checkpoint.change import Stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import read_weight_file
from tools.lora.floats import rounded, widened
from tools.merging import low_rank
from tools.merging.floats import Matrices
from tools.merging.low_rank import LowRank, merged_blocks
from tools.postprocess.merge_adapter import merge_adapter

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored(folder: Path, **tensors: torch.Tensor) -> dict[str, Stored]:
    save_file(tensors, folder / "tensors.safetensors")
    file = read_weight_file(folder / "tensors.safetensors")
    return {name: Stored(file, name) for name in tensors}


@pytest.mark.parametrize("seed", range(40))
def test_any_shape_rank_and_dtype_is_the_sum_rounded_once(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(low_rank, "_BLOCK_ELEMENTS", draw.choice([1, 50, 1000]))
    torch.manual_seed(seed)
    out, inputs, rank, count = draw.randint(1, 40), draw.randint(1, 40), draw.randint(1, 12), draw.choice([1, 1, 3])
    dtype, of_factors, transposed, dora = (
        draw.choice(c) for c in (list(DTYPES), list(DTYPES), [False, True], [False, True])
    )
    dora = dora and count == 1
    a, b = (
        torch.randn(count * rank, inputs).to(DTYPES[of_factors]),
        torch.randn(out, rank * count).to(DTYPES[of_factors]),
    )
    matrices = torch.randn(count, out, inputs).to(DTYPES[dtype])
    magnitude = torch.rand(out) + 0.5
    scale = draw.choice([1.0, 2.0, 0.3])
    delta = torch.einsum("ore,eri->eoi", b.double().reshape(out, rank, count), a.double().reshape(count, rank, inputs))
    expected = matrices.double() + scale * delta
    if dora:
        expected *= (magnitude.double() / expected.norm(dim=2))[:, :, None]
    if transposed:
        matrices, expected = matrices.transpose(1, 2).contiguous(), expected.transpose(1, 2)
    weight = matrices.reshape(-1, matrices.shape[2])
    held = stored(tmp_path, weight=weight, a=a, b=b, magnitude=magnitude)
    changes = [
        (LowRank(held["a"], held["b"], scale, transposed, (e, count), magnitude=held["magnitude"] if dora else None),)
        for e in range(count)
    ]
    blocks = list(merged_blocks(held["weight"], changes, dtype, Matrices()))
    assert b"".join(old for old, _ in blocks) == held["weight"].read()
    found = torch.frombuffer(bytearray(b"".join(new for _, new in blocks)), dtype=DTYPES[dtype]).reshape(expected.shape)
    largest = float(expected.abs().max())
    unit = torch.finfo(DTYPES[dtype]).eps * expected.abs() if dtype != "F32" else torch.tensor(8e-7 * largest)
    assert ((found.double() - expected).abs() <= unit + 1e-6 * largest).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_rounding_is_that_of_torch_for_every_number(dtype: str) -> None:
    """Every number of the dtype, halves between neighbours, and what is a little beside them."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    every = every[every.isfinite()].sort().values
    wide = torch.from_numpy(widened(every.view(torch.int16).numpy().tobytes(), dtype).copy())
    assert torch.equal(wide, every.float())
    between = ((wide[1:].double() + wide[:-1].double()) / 2).float()
    for values in (wide, between, torch.nextafter(between, wide[1:]), torch.nextafter(between, wide[:-1])):
        found = torch.frombuffer(bytearray(rounded(values.clone().numpy(), dtype)), dtype=DTYPES[dtype])
        assert torch.equal(found, values.to(DTYPES[dtype]))


def test_a_number_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    held = stored(
        tmp_path, w=torch.full((2, 2), 6e4, dtype=torch.float16), a=torch.ones(1, 2), b=torch.full((2, 1), 1e4)
    )
    with pytest.raises(
        CheckpointError, match="w would have numbers that F16 cannot hold; give the base in BF16 or F32"
    ):
        list(merged_blocks(held["w"], [(LowRank(held["a"], held["b"], 1.0),)], "F16", Matrices()))


def adapted(model: PreTrainedModel, folder: Path, **options: Any) -> PreTrainedModel:
    """Save a model and an adapter of it; PEFT's merge of them."""
    model.save_pretrained(folder / "base")
    wrapped = get_peft_model(model, LoraConfig(init_lora_weights=False, **options))
    wrapped.save_pretrained(folder / "adapter")
    return PeftModel.from_pretrained(AutoModel.from_pretrained(folder / "base"), folder / "adapter").merge_and_unload()


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_a_convolution_equals_the_merge_of_peft(dora: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = CLIPVisionModel(CLIPVisionConfig(image_size=16, patch_size=4, **sizes))
    expected = adapted(model, tmp_path, r=4, target_modules=["patch_embedding", "q_proj"], use_dora=dora)
    merge_adapter(tmp_path / "adapter", base=str(tmp_path / "base"), output=tmp_path / "merged")
    merging.assert_same(tmp_path / "merged", expected, tmp_path / "base", units=2)


def test_a_convolution_in_groups_is_refused(tmp_path: Path) -> None:
    model = ConvNextModel(ConvNextConfig(hidden_sizes=[8], depths=[1], num_stages=1, num_channels=3))
    model.save_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(r=8, target_modules=["dwconv"], init_lora_weights=False)).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(CheckpointError, match="convolutions in groups cannot be merged"):
        merge_adapter(tmp_path / "adapter", base=str(tmp_path / "base"), output=tmp_path / "merged")
