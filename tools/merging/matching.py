"""Which tensors of the base an adapter module changes: by name, by the other ways in which files write it, by shape."""

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tools.checkpoint.change import Stored
from tools.checkpoint.errors import CheckpointError

# How names in files differ from those of modules in some families (transformers 5.24, conversion_mapping).
_FAMILIES = ((".mlp.", ".block_sparse_moe."), ("lm_head.", "embed_out."))
# A parameter that holds all experts, and what files call its parts for one expert, in the order of its outputs.
_EXPERT_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}

Rename = Callable[[str], str]


def renaming(
    path: Path, base: Path, names: Sequence[str], is_there: Callable[[str], bool], held: Iterable[str]
) -> Rename:
    """The way from a name in the adapter's model to that in the files of the base, one for all of `names`.

    A name is as files of its family have it, or as it is, or without its first component, or behind the first component
    of the base's names: a model was trained with or without its head. Raises CheckpointError with an unmatched name and
    the nearest of the base.
    """
    held = list(held)
    best: list[str] = []
    for rename in _renamings(names, held):
        found = [name for name in names if is_there(rename(name))]
        if len(found) == len(names):
            return rename
        best = max(best, found, key=len)
    absent = next(name for name in names if name not in best)
    near = difflib.get_close_matches(absent, held, n=1, cutoff=0)
    problem = f"{len(best)} of {len(names)} adapter modules matched {base}: it has no {absent}, nearest is {near[0]}"
    raise CheckpointError(path, problem, "is it the base that the adapter was trained on?")


def _renamings(names: Sequence[str], held: Sequence[str]) -> Iterator[Rename]:
    family = [(old, new) for old, new in _FAMILIES if any(new in name for name in held)]

    def in_family(name: str) -> str:
        for old, new in family:
            name = name.replace(old, new)
        return name

    first = names[0].split(".")[0] + "." if names else ""
    prefixes = {name.split(".")[0] + "." for name in held if name.count(".") > 2}
    yield in_family
    yield lambda name: name
    yield lambda name: in_family(name.removeprefix(first))
    for prefix in sorted(prefixes):
        yield lambda name, prefix=prefix: in_family(prefix + name)  # type: ignore[misc]


def expert_parts(module: str, parameter: str, experts: int, tensors: Mapping[str, Stored]) -> list[list[str]]:
    """For each expert the tensors that make up its part of a parameter, where files hold experts apart; else empty."""
    for names in _EXPERT_PARTS.get(parameter, ()):
        parts = [[f"{module}.{expert}.{name}.weight" for name in names] for expert in range(experts)]
        if all(name in tensors for name in itertools.chain(*parts)):
            return parts
    return []


def parameters_of(module: str, targeted: Iterable[str]) -> list[str]:
    """The parameters of a module that `target_parameters` means, by their last component."""
    found = []
    for target in sorted(targeted):
        owner, _, parameter = target.rpartition(".")
        if not owner or module == owner or module.endswith(f".{owner}"):
            found.append(parameter)
    return sorted(
        found,
        key=lambda name: (name not in _EXPERT_PARTS, list(_EXPERT_PARTS).index(name) if name in _EXPERT_PARTS else 0),
    )
