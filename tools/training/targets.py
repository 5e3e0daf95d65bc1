"""Which layers of a model get an adapter: found, named, or refused with those there are."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.lora.adapters import changes_base
from tools.training.config import FinetuningArguments

ALL_LINEAR = "all-linear"
# TRL's SFTTrainer multiplies by the head's weight itself (trl 1.16).
_NOT_TRAINED = "the loss of sft reads its weight directly, so an adapter on it would never be trained"
SHOWN = 12  # candidates named in an error


def check_targets(decoder: Any, finetuning: FinetuningArguments) -> None:
    """Raise CheckpointError unless every name in `finetuning` is a layer of this kind, and nothing tied is torn.

    PEFT itself is content when one name of several matches, and leaves the others out without a word.
    """
    layers = targets(finetuning)
    if isinstance(layers, list):
        _check_layers(decoder, layers)
    elif layers != ALL_LINEAR and not _matches(decoder, layers):
        problem = f"no layer matches {layers}"
        raise CheckpointError("finetuning.target_modules", problem, f"there are {_linear(decoder)}")
    for name in finetuning.modules_to_save or ():
        if not _ending(name, [path for path, _ in decoder.named_modules()]):
            problem = f"the model has no module {name}"
            raise CheckpointError("finetuning.modules_to_save", problem, f"there are {_others(decoder)}")
    _check_parameters(decoder, finetuning.target_parameters or [])
    _check_tied(decoder, finetuning)
    _check_excluded(decoder, finetuning)
    _check_patterns(decoder, finetuning)
    if changes_base(finetuning.init_lora_weights):
        _check_ranks(decoder, finetuning)


def targets(finetuning: FinetuningArguments) -> str | list[str]:
    """`target_modules` as PEFT takes it: `q_proj` and `q_proj, v_proj` are names, not a regex."""
    named = finetuning.target_modules
    if isinstance(named, str) and named != ALL_LINEAR and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]+)*", named):
        return [name.strip() for name in named.split(",")]
    return named


def linear_layers(decoder: Any) -> list[str]:
    """What all-linear means: the path of every linear layer but the output head."""
    head = decoder.get_output_embeddings()
    return [name for name, module in decoder.named_modules() if _is_linear(module) and module is not head]


def experts(decoder: Any) -> list[str]:
    """Stacked weights of experts, [experts, out, in] each: no linear layers, so only target_parameters reaches them."""
    return sorted(
        {_short(name) for name, weight in decoder.named_parameters() if weight.dim() == 3 and "expert" in name}
    )


def _check_layers(decoder: Any, names: list[str]) -> None:
    modules = dict(decoder.named_modules())
    key = "finetuning.target_modules"
    for name in names:
        found = _ending(name, modules)
        if not found and _ending(name, dict(decoder.named_parameters())):
            raise CheckpointError(key, f"{name} is a parameter and no layer", "name it in finetuning.target_parameters")
        if not found:
            raise CheckpointError(
                key, f"the model has no layer {name}", f"there are {_linear(decoder)}, or {ALL_LINEAR}"
            )
        kind = type(modules[found[0]]).__name__
        if not (_is_linear(modules[found[0]]) or kind in ("Embedding", "Conv1d", "Conv2d", "Conv3d")):
            raise CheckpointError(key, f"{name} is {kind} and no linear layer", f"there are {_linear(decoder)}")


def _check_parameters(decoder: Any, names: list[str]) -> None:
    parameters = [name for name, _ in decoder.named_parameters()]
    for name in names:
        if not _ending(name, parameters):
            there = ", ".join(experts(decoder)) or "no weights of experts; name layers in finetuning.target_modules"
            raise CheckpointError(
                "finetuning.target_parameters", f"the model has no parameter {name}", f"there are {there}"
            )


def _check_excluded(decoder: Any, finetuning: FinetuningArguments) -> None:
    excluded, key = finetuning.exclude_modules or [], "finetuning.exclude_modules"
    chosen = _adapted(decoder, finetuning, excluded=None)
    for name in [excluded] if isinstance(excluded, str) else excluded:
        if isinstance(excluded, str):
            found: Any = any(_regex(key, name).fullmatch(layer) for layer in chosen)
        else:
            found = _ending(name, chosen)
        if not found:
            problem = f"{name} is none of the layers that get an adapter"
            raise CheckpointError(key, problem, f"there are {_counted(chosen)}")


def _check_patterns(decoder: Any, finetuning: FinetuningArguments) -> None:
    layers = _adapted(decoder, finetuning, excluded=finetuning.exclude_modules)
    parameters = [name for name, _ in decoder.named_parameters()]
    named = [path for name in finetuning.target_parameters or () for path in _ending(name, parameters)]
    adapted = [*layers, *sorted({path.rpartition(".")[0] for path in named})]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(finetuning, key):
            regex = _pattern(pattern, f"finetuning.{key}")
            if not any(regex.match(layer) for layer in adapted):
                problem = f"{pattern} matches no layer that gets an adapter"
                raise CheckpointError(f"finetuning.{key}", problem, f"there are {_counted(adapted)}")


def _check_ranks(decoder: Any, finetuning: FinetuningArguments) -> None:
    """An init that takes the first components of a layer finds no more of them than its smaller side has.

    LoRA-GA takes its B from a second r of them. (peft 0.21, LoraLayer.lora_ga_init)
    """
    init = finetuning.init_lora_weights
    for name, module in _adapted(decoder, finetuning, excluded=finetuning.exclude_modules).items():
        patterns = (p for p in finetuning.rank_pattern if _pattern(p, "finetuning.rank_pattern").match(name))
        pattern = next(patterns, None)  # of several, PEFT takes the first
        key, rank = ("r", finetuning.r) if pattern is None else ("rank_pattern", finetuning.rank_pattern[pattern])
        most = min(module.weight.shape) // (2 if init == "lora_ga" else 1)
        if _is_linear(module) and rank > most:
            size = " x ".join(map(str, module.weight.shape))
            problem = f"{rank} is more than {init} finds in {name} of {size}"
            raise CheckpointError(f"finetuning.{key}", problem, f"write {most} at most, or exclude the layer")


def _adapted(decoder: Any, finetuning: FinetuningArguments, excluded: str | list[str] | None) -> dict[str, Any]:
    """The layers that get an adapter, by their paths, as PEFT chooses them."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    named = targets(finetuning)
    config = LoraConfig(
        target_modules=linear_layers(decoder) if named == ALL_LINEAR else named,
        exclude_modules=excluded,
        modules_to_save=finetuning.modules_to_save,
    )
    return {name: module for name, module in decoder.named_modules() if check_target_module_exists(config, name)}


def _pattern(pattern: str, key: str) -> "re.Pattern[str]":
    """A name or regex of layers, as PEFT reads those of rank_pattern and alpha_pattern."""
    _regex(key, pattern)
    return re.compile(rf"(.*\.)?({pattern})$")


def _regex(key: str, pattern: str) -> "re.Pattern[str]":
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(key, f"{pattern} is no regex: {error}") from None


def _check_tied(decoder: Any, finetuning: FinetuningArguments) -> None:
    """Tied embeddings are one tensor under two names: an adapter or a copy on one of them tears them apart.

    The result loads into PEFT, and is wrong once it is merged, exported or served. (peft 0.21, issue 2777)
    """
    tied = _tied_names(decoder)
    layers = targets(finetuning)
    chosen = layers if isinstance(layers, list) else [name for name in tied if _matches(decoder, layers, name)]
    key, touched = "finetuning.target_modules", sorted({name for name in chosen if _ending(name, tied)})
    if not tied and finetuning.stage == "sft" and (head := _head_among(decoder, layers)):
        raise CheckpointError(key, f"{head}: {_NOT_TRAINED}", "name it in finetuning.modules_to_save instead")
    if not touched:
        key = "finetuning.modules_to_save"
        touched = sorted({name for name in finetuning.modules_to_save or () if _ending(name, tied)})
    if not touched:
        if finetuning.ensure_weight_tying:
            problem = "nothing that is tied is trained" if tied else "the embeddings of this model are not tied"
            raise CheckpointError("finetuning.ensure_weight_tying", problem, "leave it out")
        return
    if not finetuning.ensure_weight_tying:
        problem = f"{touched[0]} is tied to {' and '.join(n for n in tied if not _ending(touched[0], [n]))}"
        remedy = "add finetuning.ensure_weight_tying: true to train them as one, or leave it out"
        raise CheckpointError(key, f"{problem}, and would be torn from it", remedy)
    if key == "finetuning.target_modules" and finetuning.stage == "sft":
        problem = f"{touched[0]} is tied to the output head, and {_NOT_TRAINED}"
        raise CheckpointError(key, problem, "name it in finetuning.modules_to_save instead")
    if key == "finetuning.target_modules" and finetuning.init_lora_weights not in (True, False, "gaussian"):
        problem = f"{finetuning.init_lora_weights} cannot start the one adapter of tied embeddings"
        raise CheckpointError("finetuning.init_lora_weights", problem, "use true, or leave them out of target_modules")
    if key == "finetuning.target_modules" and finetuning.use_dora:
        raise CheckpointError("finetuning.use_dora", "is not made for tied embeddings", "leave one of both out")


def _head_among(decoder: Any, layers: str | list[str]) -> str | None:
    """The path of the output head, if it is among the layers."""
    head = decoder.get_output_embeddings()
    path = next((name for name, module in decoder.named_modules() if module is head), "")
    if not path:
        return None
    named = (
        any(_ending(name, [path]) for name in layers) if isinstance(layers, list) else _matches(decoder, layers, path)
    )
    return path if named else None


def _tied_names(decoder: Any) -> list[str]:
    """The modules that share the weight of the input embeddings, those included; none where nothing is shared."""
    weight = decoder.get_input_embeddings().weight
    names = [name for name, module in decoder.named_modules() if getattr(module, "weight", None) is weight]
    return names if len(names) > 1 else []


def _matches(decoder: Any, layers: str, only: str | None = None) -> bool:
    if layers == ALL_LINEAR:
        return False
    pattern = _regex("finetuning.target_modules", layers)
    names = [only] if only else [name for name, _ in decoder.named_modules()]
    return any(pattern.fullmatch(name) for name in names)


def _ending(name: str, paths: Iterable[str]) -> list[str]:
    """The paths that a name means, as PEFT reads it: the whole path, or its last parts."""
    return [path for path in paths if path == name or path.endswith(f".{name}")]


def _is_linear(module: Any) -> bool:
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (Linear, Conv1D))


def _linear(decoder: Any) -> str:
    """The names of the linear layers, each with its number: `q_proj (30), lm_head (1)`."""
    return _counted(name for name, module in decoder.named_modules() if _is_linear(module))


def _others(decoder: Any) -> str:
    return _counted(name for name, module in decoder.named_modules() if name and not list(module.children()))


def _counted(paths: Iterable[str]) -> str:
    counts = Counter(path.rpartition(".")[2] for path in paths)
    names = [f"{name} ({count})" for name, count in counts.most_common(SHOWN)]
    return ", ".join(names) + (", ..." if len(counts) > SHOWN else "")


def _short(path: str) -> str:
    """A parameter without the number of its layer: `mlp.experts.down_proj`."""
    return re.split(r"\.\d+\.", path)[-1]
