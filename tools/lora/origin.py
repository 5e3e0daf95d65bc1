"""Where the factors come from that an initialisation took out of the base: an initial adapter, or base weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.lora.adapters import LoraModule, changes_base
from tools.lora.initial import find_initial, open_initial, pairs_of, refuse_other_run, refuse_overwritten
from tools.lora.original import base_config, open_base, original_base, refuse_base, require_base, vocabulary_of
from tools.lora.proof import refuse_other_base, refuse_trained_factors
from tools.lora.recovering import Recovered, find_weight, from_residual, linear_weight, recomputed, why_not_recomputed
from tools.lora.stacking import Initial, is_stacked

# In the metadata of every converted adapter: less rank leaves no tensor by which it could be told.
MARK = {"lora": "plain"}

Modules = Mapping[str, LoraModule]
Recover = Callable[[Callable[[Modules], Recovered], Modules], Recovered]


@dataclass(frozen=True)
class Given:
    """What the user names: the initial adapter, the original base, the residual base."""

    init: Path | None = None
    base: str | None = None
    residual: Path | None = None


@dataclass(frozen=True)
class Origin:
    """The factors that were taken out of the base, by module; its name, and its vocabulary if it is here to tell."""

    factors: Mapping[str, Initial]
    base: str
    vocabulary: int | None
    details: Mapping[str, Any]
    recovered: Mapping[str, Any] = field(default_factory=dict)  # of the details, what a receipt keeps


def origin_of(trained: Checkpoint, modules: Modules, given: Given, recover: Recover) -> Origin | str:
    """The factors that were taken out of the base, or why the adapter is plain LoRA as it is.

    `recover` computes what has to be computed. Raises CheckpointError when they cannot be had, or are not of this run.
    """
    kind = (trained.adapter_config or {}).get("init_lora_weights")
    assert trained.adapter is not None
    if MARK.items() <= trained.adapter.files[0].metadata.items():
        return "already plain LoRA: converted before"
    if given.residual:
        return _from_residual(trained, modules, given, recover)
    if given.init is None and not changes_base(kind):
        return f"plain LoRA (init_lora_weights is {str(kind).lower()})"
    if folder := given.init or find_initial(trained.path):
        return _from_adapter(trained, modules, folder, given.base)
    return _from_base(trained, modules, given.base, recover)


def _from_adapter(trained: Checkpoint, modules: Modules, folder: Path, named: str | None) -> Origin | str:
    if folder.resolve() == trained.path.resolve():
        raise CheckpointError(folder, "is the trained adapter itself", "--init is the adapter before the first step")
    initial = open_initial(folder)
    pairs = pairs_of(trained, modules, initial)
    factors = {name: Initial(then.A, then.B) for name, (_, then) in pairs.items()}
    if all(is_stacked(module, factors[name]) for name, module in modules.items()):
        return f"already plain LoRA: holds the initial adapter of {folder}"
    refuse_other_run(trained, initial, pairs)
    refuse_overwritten(trained, initial)
    kind, then = str(_kind(trained)), [then for _, then in pairs.values()]
    refuse_trained_factors(kind, then)
    name, vocabulary = _original(trained, modules, initial.path, named)
    if (base := open_base(name)) is not None:
        transposed = _is_transposed(trained)
        there = then if named else [each for each in then if find_weight(base, each)]  # not of another naming
        refuse_other_base(kind, there, lambda module: linear_weight(base, module, transposed))
    return Origin(factors, name, vocabulary, {"initial adapter": str(initial.path)})


def _from_residual(trained: Checkpoint, modules: Modules, given: Given, recover: Recover) -> Origin:
    assert given.residual is not None
    if given.base is None:
        raise CheckpointError(given.residual, "what was taken out is W - W_res, and W is not given", "add --base")
    name, vocabulary = _original(trained, modules, None, given.base)
    base, residual = require_base(given.base), require_base(str(given.residual))
    found = recover(lambda each: from_residual(each, base, residual, _is_transposed(trained)), modules)
    return Origin(found.factors, name, vocabulary, found.details, found.details)


def _from_base(trained: Checkpoint, modules: Modules, named: str | None, recover: Recover) -> Origin:
    kind = str(_kind(trained))
    problem = f"init_lora_weights is {kind}, and the adapter as it was before training is not here"
    if reason := why_not_recomputed(kind):
        problem = f"{problem}; {reason}" if named else problem
        raise CheckpointError(trained.path, problem, "name it with --init, or the two bases: --base W --residual W_RES")
    if named is None:
        remedy = "name it with --init, or the original base with --base, from which it can be decomposed again"
        raise CheckpointError(trained.path, problem, remedy)
    name, vocabulary = _original(trained, modules, None, named)
    base = require_base(named)
    found = recover(lambda each: recomputed(kind, each, base, _is_transposed(trained)), modules)
    return Origin(found.factors, name, vocabulary, found.details, found.details)


def _original(trained: Checkpoint, modules: Modules, initial: Path | None, named: str | None) -> tuple[str, int | None]:
    name = original_base(trained, initial, named)
    config = base_config(name)
    refuse_base(trained, modules.values(), name, config)
    return name, vocabulary_of(config)


def _kind(trained: Checkpoint) -> Any:
    return (trained.adapter_config or {}).get("init_lora_weights")


def _is_transposed(trained: Checkpoint) -> bool:
    return bool((trained.adapter_config or {}).get("fan_in_fan_out"))
