"""The initial adapter of a PiSSA-like run: found, opened, and refused when it cannot be the one of this run."""

from collections.abc import Mapping
from pathlib import Path

from tools.checkpoint.change import Stored, refuse_ungathered, same_bytes, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint, checkpoints_in
from tools.lora.adapters import INITIAL_ADAPTER, LoraModule, lora_modules

# Where trainers leave it: our own and LLaMA-Factory, ms-swift.
_FOLDERS = (INITIAL_ADAPTER, "initial_model")
# What the scale of a module depends on; trained and initial adapter must agree on it.
_SCALING_FIELDS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_WHOSE = "is it the initial adapter of this run?"


def find_initial(adapter: Path) -> Path | None:
    """The initial adapter inside the adapter's directory, beside it or in the run above; None when it is not there.

    An adapter with a name of its own lies in a folder of that name, and so may its initial one.
    """
    above = adapter.resolve()
    places = [above, *list(above.parents)[:2]]
    for folder in (place / name for place in places for name in _FOLDERS):
        for candidate in (folder / above.name, folder, folder / "default"):
            if (candidate / "adapter_config.json").is_file() and candidate != above:
                return candidate
    return None


def open_initial(folder: Path) -> Checkpoint:
    """Raise CheckpointError unless the directory holds an adapter."""
    initial = Checkpoint.open(folder)
    if initial.adapter_config is None or initial.adapter is None:
        raise CheckpointError(folder, "no adapter: adapter_config.json or adapter_model.safetensors is not there")
    refuse_ungathered(initial)
    return initial


def pairs_of(
    trained: Checkpoint, modules: Mapping[str, LoraModule], initial: Checkpoint
) -> dict[str, tuple[LoraModule, LoraModule]]:
    """Each module as it was trained and as it was before. Raises CheckpointError when one of the two lacks it."""
    assert initial.adapter is not None
    then = lora_modules(initial.adapter_config or {}, initial.adapter)
    for one, other, path in ((modules, then, initial.path), (then, modules, trained.path)):
        if absent := next((name for name in one if name not in other), None):
            lacking = one[absent].A.name
            raise CheckpointError(path, f"has no {lacking}", "trained and initial adapter must be of the same run")
    return {name: (module, then[name]) for name, module in modules.items()}


def refuse_other_run(
    trained: Checkpoint, initial: Checkpoint, pairs: Mapping[str, tuple[LoraModule, LoraModule]]
) -> None:
    """Raise CheckpointError when ranks, shapes, scales or values say that the two are not of one run."""
    for now, then in pairs.values():
        if now.r != then.r:
            problem = f"rank {then.r} at {then.A.name}, but {trained.path} has rank {now.r}"
            raise CheckpointError(initial.path, problem, _WHOSE)
        for one, other in ((now.A, then.A), (now.B, then.B)):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                problem = f"{one.name} is {other.dtype} {list(other.shape)}, in {trained.path} "
                raise CheckpointError(initial.path, f"{problem}{one.dtype} {list(one.shape)}")
    config, then_config = trained.adapter_config or {}, initial.adapter_config or {}
    for field in _SCALING_FIELDS:
        if (config.get(field) or 0) != (then_config.get(field) or 0):
            problem = f"{field} is {then_config.get(field)}, in {trained.path} {config.get(field)}"
            raise CheckpointError(initial.path, problem, _WHOSE)
    if all(same_bytes(now.A, then.A) and same_bytes(now.B, then.B) for now, then in pairs.values()):
        problem = f"is the same as {trained.path}: either nothing was trained, or a resume wrote over it"
        raise CheckpointError(initial.path, problem, "name the adapter as it was before the first step")


def refuse_overwritten(trained: Checkpoint, initial: Checkpoint) -> None:
    """Raise CheckpointError when the initial adapter is that of a checkpoint: a resume has written over it."""
    assert initial.adapter is not None
    runs = {place.resolve() for place in (trained.path.parent, initial.path.parent, trained.path)}
    for checkpoint in (path for run in sorted(runs) for path in checkpoints_in(run)):
        if checkpoint.resolve() != trained.path.resolve() and _holds(checkpoint, _factors(initial)):
            raise CheckpointError(
                initial.path,
                f"holds what {checkpoint} holds, so a resume wrote over it: it is not how the run began",
                "restore it from a copy, or recover it: --base W --residual W_RES, or for pissa and olora --base W",
            )


def _holds(checkpoint: Path, factors: Mapping[str, Stored]) -> bool:
    try:
        saved = _factors(Checkpoint.read(checkpoint))
    except CheckpointError:  # one that is damaged holds nothing for sure
        return False
    return saved.keys() == factors.keys() and all(same_bytes(source, saved[name]) for name, source in factors.items())


def _factors(adapter: Checkpoint) -> dict[str, Stored]:
    found = stored(adapter.adapter) if adapter.adapter else {}
    return {name: source for name, source in found.items() if ".lora_" in name}
