"""A policy and a value model in TRL's wrapper, saved in every way in which trainers leave them."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file, save_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Wrapper(nn.Module):
    """The modules of a PPO trainer; the backbone is an alias of the decoder inside the value model."""

    def __init__(self, policy: Any, value_model: Any):
        super().__init__()
        self.policy = policy
        self.value_model = value_model
        self.critic_backbone = getattr(value_model, value_model.base_model_prefix)

    @property
    def values(self) -> torch.Tensor:
        """What the critic says at every position: [1, length, 1]."""
        hidden = self.critic_backbone(torch.arange(10)[None]).last_hidden_state
        return self.value_model.score(hidden)


def build(model_type: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> Wrapper:
    """Random models of one family, both of the same sizes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **ENDS, "tie_word_embeddings": False, **fields})
    policy = AutoModelForCausalLM.from_config(config, dtype=dtype)
    config = copy.deepcopy(config)
    config.num_labels = 1
    value_model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    return Wrapper(policy, value_model).eval()


def _folder(wrapper: Wrapper, path: Path) -> Path:
    """What lies beside the weights: the policy's configuration, a tokenizer, and files nobody knows."""
    path.mkdir(parents=True)
    wrapper.policy.config.architectures = [type(wrapper.policy).__name__]
    wrapper.policy.config.save_pretrained(path)
    (path / "generation_config.json").write_text('{"pad_token_id": 0}')
    (path / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    (path / "notes.txt").write_text("of the policy")
    return path


def without_backbone(wrapper: Wrapper) -> dict[str, torch.Tensor]:
    """Two prefixes; a tied embedding stays under one of its names."""
    state = {n: t for n, t in wrapper.state_dict().items() if not n.startswith("critic_backbone.")}
    tied = wrapper.policy.get_output_embeddings().weight is wrapper.policy.get_input_embeddings().weight
    return {n: t for n, t in state.items() if not (tied and n == "policy.lm_head.weight")}


def accelerated(wrapper: Wrapper, path: Path) -> Path:
    """As accelerate saves it."""
    save_file(without_backbone(wrapper), _folder(wrapper, path) / "model.safetensors", metadata={"format": "pt"})
    return path


def aliased(wrapper: Wrapper, path: Path) -> Path:
    """As safetensors' save_model leaves it: names that share a tensor are noted in the metadata."""
    save_model(wrapper, str(_folder(wrapper, path) / "model.safetensors"))
    return path


def aliased_in_ddp(wrapper: Wrapper, path: Path) -> Path:
    """The same from inside DDP."""
    save_model(nn.ModuleDict({"module": wrapper}), str(_folder(wrapper, path) / "model.safetensors"))
    return path


def gathered(wrapper: Wrapper, path: Path) -> Path:
    """As a full state dict of FSDP or ZeRO: three prefixes, each a copy of its own."""
    tensors = {name: tensor.clone() for name, tensor in wrapper.state_dict().items()}
    save_file(tensors, _folder(wrapper, path) / "model.safetensors", metadata={"format": "pt"})
    return path


def distributed(wrapper: Wrapper, path: Path) -> Path:
    """A full state dict from inside DDP and torch.compile."""
    tensors = {f"module._orig_mod.{name}": tensor.clone() for name, tensor in wrapper.state_dict().items()}
    save_file(tensors, _folder(wrapper, path) / "model.safetensors", metadata={"format": "pt"})
    return path


def pickled(wrapper: Wrapper, path: Path) -> Path:
    """By torch.save: three prefixes, where copies are the same storage."""
    torch.save(wrapper.state_dict(), _folder(wrapper, path) / "pytorch_model.bin")
    return path


def _in_shards(tensors: dict[str, torch.Tensor], path: Path, save: Callable[..., Any], name: str, count: int) -> Path:
    stem, dot, suffix = name.partition(".")
    names = list(tensors)
    size = -(-len(names) // count)
    files = [f"{stem}-{i + 1:05}-of-{count:05}{dot}{suffix}" for i in range(count)]
    weight_map = {tensor: files[i // size] for i, tensor in enumerate(names)}
    for file in files:
        save({tensor: tensors[tensor] for tensor in names if weight_map[tensor] == file}, path / file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / f"{name}.index.json").write_text(json.dumps(index))
    return path


def sharded(wrapper: Wrapper, path: Path) -> Path:
    """Four shards, of which one holds tensors of both models."""
    return _in_shards(without_backbone(wrapper), _folder(wrapper, path), save_file, "model.safetensors", 4)


def sharded_pickles(wrapper: Wrapper, path: Path) -> Path:
    """Shards by torch.save."""
    return _in_shards(wrapper.state_dict(), _folder(wrapper, path), torch.save, "pytorch_model.bin", 3)


FORMS = {
    form.__name__: form
    for form in (accelerated, aliased, aliased_in_ddp, gathered, distributed, pickled, sharded, sharded_pickles)
}
