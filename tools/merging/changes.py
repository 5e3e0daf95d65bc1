"""What an adapter's modules add to which tensors of the base, as products of low rank in the shape of each tensor."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.checkpoint.change import Stored
from tools.checkpoint.errors import CheckpointError
from tools.lora.adapters import LoraModule
from tools.merging.adapter import Adapter
from tools.merging.base import Base, is_head
from tools.merging.low_rank import LowRank
from tools.merging.matching import Rename, expert_parts, parameters_of

# A tensor is one matrix, or as many below each other as there are experts; each gets the sum of these changes.
Parts = tuple[tuple[LowRank, ...], ...]

# Families whose linear layers keep their weight as [in, out] (`Conv1D` of transformers 5.24).
_TRANSPOSED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"}
# Families whose experts keep theirs as [expert, in, out].
_TRANSPOSED_EXPERTS = {"gpt_oss", "openai_privacy_filter", "aria", "aria_text"}


def changes_of(adapter: Adapter, base: Base, weights: Mapping[str, Stored], rename: Rename) -> dict[str, Parts]:
    """By the name of the tensor what is added to it. `weights` are the tensors that are added to.

    Raises CheckpointError for shapes that do not fit, naming both.
    """
    changes: dict[str, Parts] = {}
    of_parameters = [module for module in adapter.modules if module.kind == "parameter"]
    for module in adapter.modules:
        if module.kind != "parameter":
            name = rename(f"{module.name}.weight")
            changes[name] = ((_change(adapter, module, weights[name], base),),)
    for owner, group in itertools.groupby(sorted(of_parameters, key=_owner), key=_owner):
        # Each parameter of a module wraps the one before (PEFT 0.21), so the innermost is the first.
        modules = sorted(group, key=lambda module: -module.name.count(".base_layer"))
        changes |= _parameter_changes(adapter, rename(owner), modules, weights, base)
    return changes


def _owner(module: LoraModule) -> str:
    return module.name.replace(".base_layer", "")


def _change(adapter: Adapter, module: LoraModule, weight: Stored, base: Base) -> LowRank:
    change = LowRank(module.A, module.B, adapter.weight * module.scaling, magnitude=module.magnitude)
    if module.kind == "embedding" or _is_transposed(change.shape, weight.shape, stores_transposed(base.config, weight)):
        change = replace(change, transposed=True)
    if not _fits(change, weight):
        raise _misfit(adapter, module, change, weight)
    return change


def stores_transposed(config: Mapping[str, Any], weight: Stored) -> bool:
    """Whether a linear layer of this family keeps its weight as [in, out]; all do but the output matrix.

    A model made of several names a part by its key in config.json: `decoder.` is of the family in `decoder`.
    Raises CheckpointError for a square matrix when such a family is somewhere in it, and no name tells where.
    """
    part = config.get(weight.name.partition(".")[0])
    family = part if isinstance(part, dict) else config
    if is_head(weight.name) or len(weight.shape) != 2:
        return False
    parts = [each for each in config.values() if isinstance(each, dict)]
    if _is_transposing(family):
        return True
    if family is config and weight.shape[0] == weight.shape[1] and any(map(_is_transposing, parts)):
        problem = f"{weight.name} is square, and config.json does not say whether it is [in, out] or [out, in]"
        raise CheckpointError(weight.file.path, problem, "load the model with PEFT instead")
    return False


def _is_transposing(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in _TRANSPOSED


def _is_transposed(shape: tuple[int, int], stored: Sequence[int], when_square: bool) -> bool:
    """Whether a change [out, in] goes into a matrix stored as [in, out]; a square one does not show it."""
    rows, columns = shape
    return len(stored) == 2 and (rows, columns) != tuple(stored) if rows != columns else when_square


def _fits(change: LowRank, weight: Stored) -> bool:
    """Equal as matrices, and for a convolution in its inner shape: with groups the two have other inputs."""
    rows, columns = change.shape
    inner = change.a.shape[1:] if len(weight.shape) > 2 else weight.shape[1:]
    return weight.shape[0] == rows and math.prod(weight.shape[1:]) == columns and tuple(inner) == weight.shape[1:]


def _misfit(adapter: Adapter, module: LoraModule, change: LowRank, weight: Stored) -> CheckpointError:
    is_conv = len(weight.shape) > 2
    problem = f"{module.name} changes {list(change.shape)}, but {weight.file.path} has {list(weight.shape)}"
    remedy = "convolutions in groups cannot be merged" if is_conv else "is it the base that the adapter was trained on?"
    return CheckpointError(adapter.checkpoint.path, problem, remedy)


def _parameter_changes(
    adapter: Adapter, owner: str, modules: Sequence[LoraModule], weights: Mapping[str, Stored], base: Base
) -> dict[str, Parts]:
    config = adapter.checkpoint.adapter_config or {}
    parameters = parameters_of(_owner(modules[0]), config.get("target_parameters") or ())
    options = [_ways(adapter, modules, names, owner, weights, base) for names in itertools.permutations(parameters)]
    fitting = [option for option in options if option]
    if len(parameters) != len(modules) or not fitting:
        shapes = ", ".join(f"B {list(m.B.shape)} A {list(m.A.shape)}" for m in modules)
        problem = (
            f"{owner} has {shapes}, which fit none of {', '.join(parameters) or 'its target_parameters'} in the base"
        )
        raise CheckpointError(adapter.checkpoint.path, problem, "is it the base that the adapter was trained on?")
    return fitting[0]


def _ways(
    adapter: Adapter,
    modules: Sequence[LoraModule],
    parameters: Sequence[str],
    owner: str,
    weights: Mapping[str, Stored],
    base: Base,
) -> dict[str, Parts]:
    """The changes when these modules are for these parameters, one each; empty when a shape does not fit."""
    changes: dict[str, Parts] = {}
    for module, parameter in zip(modules, parameters, strict=False):
        found = _experts(adapter, module, f"{owner}.{parameter}", weights, base) or _apart(
            adapter, module, owner, parameter, weights
        )
        if not found:
            return {}
        changes |= found
    return changes


def _experts(
    adapter: Adapter, module: LoraModule, name: str, weights: Mapping[str, Stored], base: Base
) -> dict[str, Parts]:
    """All experts in one tensor [experts, out, in] or [experts, in, out], or a plain matrix."""
    if name not in weights:
        return {}
    count = module.blocks
    shape = weights[name].shape[-2:]
    if weights[name].shape != ((count, *shape) if count > 1 or len(weights[name].shape) == 3 else shape):
        return {}
    plain = (module.B.shape[0], module.A.shape[1])
    transposed = _is_transposed(plain, shape, base.config.get("model_type") in _TRANSPOSED_EXPERTS)
    if shape != (plain[::-1] if transposed else plain):
        return {}
    scale = adapter.weight * module.scaling
    return {name: tuple((LowRank(module.A, module.B, scale, transposed, (e, count)),) for e in range(count))}


def _apart(
    adapter: Adapter, module: LoraModule, owner: str, parameter: str, weights: Mapping[str, Stored]
) -> dict[str, Parts]:
    """Each expert in tensors of its own: transformers joins them to one parameter when it loads the model."""
    count = module.blocks
    changes: dict[str, Parts] = {}
    for expert, names in enumerate(expert_parts(owner, parameter, count, weights)):
        start = 0
        for name in names:
            end = start + weights[name].shape[0]
            if weights[name].shape != (end - start, module.A.shape[1]) or end > module.B.shape[0]:
                return {}
            scale = adapter.weight * module.scaling
            change = LowRank(module.A, module.B, scale, expert=(expert, count), outputs=(start, end))
            changes[name] = ((change,),)
            start = end
        if start != module.B.shape[0]:
            return {}
    return changes
