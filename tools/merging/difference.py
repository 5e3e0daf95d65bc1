"""What a full fine-tune changed of its base, tensor by tensor: what LoRA can hold, and what has to be saved whole."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tools.checkpoint.change import Stored, same_bytes
from tools.checkpoint.errors import CheckpointError
from tools.lora.base_config import is_tied
from tools.lora.floats import widened
from tools.merging.base import Base, is_head
from tools.merging.floats import ITEM_BYTES, require_floats
from tools.merging.stored_rows import raw_blocks

# Tables that are looked up, and routers of experts: matrices, but not of a linear layer. PEFT saves the output matrix
# whole beside its factors, so it is saved whole at once.
_NO_LINEAR = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe|shared|relative_attention_bias|mlp\.gate|router|lm_head)\.weight")
_EXPERT = re.compile(r".*\.experts\.(.*\.)?\w+")
_NO_PREFIX = re.compile(r"(layers|h|blocks)\.\d+\..+")
_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Difference:
    """By name: `linear` weights with that of the base, `saved` tensors of modules that are kept whole, `biases`.

    `bias` is PEFT's word for which biases are among them. A tied embedding is saved as the output matrix too.
    """

    linear: Mapping[str, tuple[Stored, Stored]]
    saved: Mapping[str, Stored]
    biases: Mapping[str, Stored]
    bias: str

    @property
    def modules(self) -> list[str]:
        """The modules that are saved whole."""
        return sorted({name.rpartition(".")[0] for name in self.saved})


def difference(tuned: Base, base: Base) -> Difference:
    """Compare two models of one architecture; reads both.

    Raises CheckpointError where an adapter cannot hold the difference: other shapes, other tensors, experts.
    """
    changed = _changed(tuned, base)
    for name in changed:
        if _EXPERT.fullmatch(name):
            problem = f"{name} differs from the base, and no adapter of linear layers holds experts"
            raise CheckpointError(tuned.path, problem)
    linear = {
        name: (tuned.tensors[name], base.tensors[name])
        for name in changed
        if name in base.tensors and _is_linear(name, tuned.tensors[name])
    }
    owners = {name.removesuffix("weight") for name in tuned.tensors if _is_linear(name, tuned.tensors[name])}
    biased = [name for name in changed if name.endswith(".bias") and name.removesuffix("bias") in owners]
    whole = {name.rpartition(".")[0] for name in changed if name not in linear and name not in biased}
    saved = {name: source for name, source in tuned.tensors.items() if name.rpartition(".")[0] in whole}
    saved = {_in_model(name, tuned): source for name, source in saved.items()} | _tied_head(tuned, base)
    bias = "none" if not biased else "lora_only"
    if any(f"{name.removesuffix('bias')}weight" not in linear for name in biased):
        bias = "all"
    biases = {n: s for n, s in tuned.tensors.items() if n not in saved and _goes_with(n, bias, linear)}
    return Difference(linear, saved, biases, bias)


def _in_model(name: str, tuned: Base) -> str:
    """The name in the model of what files of GPT-NeoX call `embed_out` (transformers 5.24, conversion_mapping)."""
    return name.replace("embed_out.", "lm_head.") if tuned.config.get("model_type") == "gpt_neox" else name


def _tied_head(tuned: Base, base: Base) -> dict[str, Stored]:
    """A fine-tune's tied output matrix, by its name in the model; empty when it is that of the base."""
    if tuned.embedding is None or tuned.head is not None or not is_tied(tuned.config):
        return {}
    before = base.head or base.embedding
    if before and same_bytes(tuned.tensors[tuned.embedding], base.tensors[before]):
        return {}
    module = "embed_out" if tuned.config.get("model_type") == "gpt_neox_japanese" else "lm_head"
    return {f"{module}.weight": tuned.tensors[tuned.embedding]}


def _goes_with(name: str, bias: str, linear: Mapping[str, object]) -> bool:
    owner = f"{name.removesuffix('bias')}weight"
    return name.endswith(".bias") and (bias == "all" or (bias == "lora_only" and owner in linear))


def _is_linear(name: str, source: Stored) -> bool:
    return name.endswith(".weight") and len(source.shape) == 2 and not _NO_LINEAR.fullmatch(name)


def _changed(tuned: Base, base: Base) -> list[str]:
    absent = [name for name in base.tensors if name not in tuned.tensors and not is_head(name)]
    if absent:
        raise CheckpointError(tuned.path, f"has no {absent[0]}, which {base.path} has", "are they of one architecture?")
    if bare := next(filter(_NO_PREFIX.fullmatch, tuned.tensors), None):
        problem = f"{bare} has no prefix, so an adapter cannot say whose it is"
        raise CheckpointError(tuned.path, problem, "load and save the model with transformers")
    changed = []
    for name, source in tuned.tensors.items():
        if name not in base.tensors:
            changed.append(name)
            continue
        before = base.tensors[name]
        if source.shape != before.shape:
            problem = f"{name} is {list(source.shape)}, in {base.path} {list(before.shape)}"
            raise CheckpointError(tuned.path, problem, "resize the base's vocabulary first if it has grown")
        is_same = same_bytes(source, before) if source.dtype == before.dtype else _equal_values(source, before)
        if not is_same:
            changed.append(name)
    if not changed:
        raise CheckpointError(tuned.path, f"equals {base.path} in every number", "there is nothing to extract")
    return changed


def _equal_values(one: Stored, other: Stored) -> bool:
    for source in (one, other):
        require_floats(source)
    blocks = (raw_blocks(each, _BLOCK_ELEMENTS * ITEM_BYTES[each.dtype]) for each in (one, other))
    pairs = zip(*blocks, strict=True)
    return all((widened(a, one.dtype) == widened(b, other.dtype)).all() for a, b in pairs)
