"""Tiny bases and adapters of every kind, made by PEFT, and what PEFT's own merge makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tools.postprocess.merge_adapter import merge_adapter

IDS = torch.arange(10)[None]


def model(path: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A random model of this family, saved by transformers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {
        "llama": {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": False},
        "gpt2": {"n_positions": 32},
        "gpt_neox": {"intermediate_size": 64},
        "qwen3_moe": {
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "mixtral": {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
        "gpt_oss": {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 8},
    }[kind]
    config = AutoConfig.for_model(kind, **{**sizes, **own, **options})
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(path)
    return path


def adapter(
    base: Path, path: Path, *, rows: int | None = None, dtype: str | torch.dtype = "auto", **options: Any
) -> torch.Tensor:
    """Put LoRA on the base, move every trainable number, save it; the logits of the live model."""
    torch.manual_seed(1)
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if rows:
        loaded.resize_token_embeddings(rows, mean_resizing=False)
    options = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]} | options
    wrapped = get_peft_model(loaded, LoraConfig(**options)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        logits = wrapped(IDS).logits
    wrapped.save_pretrained(path)
    return logits


def merged_by_peft(base: Path, adapter: Path, rows: int | None = None) -> PreTrainedModel:
    """The model that `merge_and_unload` makes of them in fp32: in half precision it rounds some changes twice."""
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if rows:
        loaded.resize_token_embeddings(rows, mean_resizing=False)
    return PeftModel.from_pretrained(loaded, adapter).eval().merge_and_unload()


def logits(path: Path) -> torch.Tensor:
    """What transformers' model of this directory says; every weight must be there, and no other."""
    loaded, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    with torch.no_grad():
        return loaded.eval()(IDS).logits


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model directory."""
    return {
        name: tensor for file in sorted(path.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def store_head(base: Path) -> None:
    """Write the output matrix of a tied model beside its embedding, as some savers do."""
    held = tensors(base)
    save_file(
        held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()},
        base / "model.safetensors",
        {"format": "pt"},
    )


def assert_same(merged: Path, theirs: PreTrainedModel, base: Path, units: int = 1) -> None:
    """Every tensor in the dtype of the base, and at most so many units in the last place from what PEFT makes of it."""
    ours, before = tensors(merged), tensors(base)
    theirs.save_pretrained(merged.with_name("by-peft"))
    expected = tensors(merged.with_name("by-peft"))
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == before[name].dtype
        assert units_apart(tensor, expected[name].to(tensor.dtype)) <= units, name


def units_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The most units in the last place by which two tensors differ; in fp32, of the largest number in them."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    size = torch.maximum(one.double().abs(), other.double().abs())
    size = size.max() if one.dtype == torch.float32 else size
    limits = torch.finfo(one.dtype)
    unit = limits.eps * torch.exp2(torch.floor(torch.log2(size.clamp(min=limits.smallest_normal))))
    return float(((one.double() - other.double()).abs() / unit).max())


def edit(file: Path, **fields: object) -> None:
    """Set fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def rewritten(adapter: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write the adapter's tensors as `change` makes them."""
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def tokenizer_of(folder: Path, tokens: int) -> None:
    """A tokenizer with so many tokens."""
    vocabulary = {f"t{number}": number for number in range(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary}}))
    (folder / "tokenizer_config.json").write_text("{}")


def alone(adapter: Path, base: Path) -> Path:
    """The adapter merged alone, beside it."""
    merge_adapter(adapter, base=str(base), output=adapter.with_name(f"{adapter.name}-alone"))
    return adapter.with_name(f"{adapter.name}-alone")
