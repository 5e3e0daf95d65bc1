"""Value heads among the tensors of a checkpoint: found by names and shapes, and the one to act on chosen."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import Tensor
from tools.heads.layouts import HeadLayout, layouts_for
from tools.heads.wrappers import bare_names


@dataclass(frozen=True)
class Head:
    """A value head found among tensors.

    `names` maps its names on disk to those without wrapper prefixes, `companions` those of tensors that the framework
    saves beside it (trlx: the frozen layers of the reference model). `declared`: the architecture has it as a part of
    its own. `outputs`: how many numbers it gives, one for a value head.
    """

    layout: HeadLayout
    names: Mapping[str, str]
    declared: bool
    companions: Mapping[str, str] = field(default_factory=dict)
    outputs: int = 1

    @property
    def label(self) -> str:
        """What `--head` calls it: the first component of its names."""
        return self.layout.label

    def described(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Framework, and dtype and shape of each tensor, for a report."""
        shapes = {bare: f"{tensors[name].dtype} {list(tensors[name].shape)}" for name, bare in self.names.items()}
        return {"framework": self.layout.frameworks, **shapes}


def some(names: Iterable[str]) -> str:
    """Names as a sentence holds them: up to four, else two and how many more."""
    names = list(names)
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def architectures_of(config: Mapping[str, Any] | None) -> list[str]:
    """`architectures` of a config.json, empty where it has none or something else there."""
    names = (config or {}).get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def find_heads(tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> tuple[Head, ...]:
    """Every head of a documented layout, those with several outputs too."""
    layouts = layouts_for(config)
    starts = tuple({start for layout in layouts for start in (f"{layout.prefix}.", *layout.companions)})
    bare = {name: inner for name, inner in bare_names(tensors).items() if inner.startswith(starts)}
    found = (_head_of(layout, bare, tensors, config) for layout in layouts)
    return tuple(head for head in found if head)


def _head_of(
    layout: HeadLayout, bare: Mapping[str, str], tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> Head | None:
    names = {name: inner for name, inner in bare.items() if layout.shape_of(inner)}
    outputs = layout.outputs((inner, tensors[name].shape) for name, inner in names.items())
    if outputs is None:
        return None
    architectures = architectures_of(config)
    declared = layout.in_adapter or any(name.endswith(layout.declared_by) for name in architectures)
    companions = {n: inner for n, inner in bare.items() if layout.companions and inner.startswith(layout.companions)}
    return Head(layout, names, declared, companions, outputs)


def choose_head(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, wanted: str | None = None
) -> Head | None:
    """The one head to act on; None when there is none, or when it belongs to the model and `wanted` does not name it.

    Raises CheckpointError when there are several and none is `wanted`, when `wanted` is not a head, and when the head
    is there twice or with tensors that no layout has.
    """
    found = find_heads(tensors, config)
    if wanted:
        heads = [head for head in found if wanted in (head.label, head.layout.prefix)]
        if not heads:
            raise CheckpointError(path, f"no value head called {wanted}; {_near(tensors, config, wanted)}")
    else:
        heads = [head for head in found if not head.declared and head.outputs == 1]
    if len(heads) > 1:
        names = ", ".join(name for head in heads for name in head.names)
        raise CheckpointError(path, f"several value heads: {names}", "choose one with --head")
    for head in heads:
        _refuse_odd_names(path, tensors, head, found)
    return heads[0] if heads else None


def _refuse_odd_names(path: Path, tensors: Mapping[str, Tensor], head: Head, found: tuple[Head, ...]) -> None:
    all_names = {**head.names, **head.companions}
    if len(set(all_names.values())) < len(all_names):
        twice = [name for name, inner in all_names.items() if list(all_names.values()).count(inner) > 1]
        raise CheckpointError(path, f"the value head is there twice: {', '.join(twice)}", "keep one of the two")
    known = {name for each in found for name in each.names}
    odd = [n for n, inner in bare_names(tensors).items() if inner.startswith(f"{head.label}.") and n not in known]
    if odd:
        problem = f"{', '.join(odd)} beside {', '.join(head.names)}: no known head has such a tensor"
        raise CheckpointError(path, problem, "split it by hand, or report the framework")


def _near(tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, wanted: str) -> str:
    alike = [name for name, inner in bare_names(tensors).items() if inner.startswith(f"{wanted}.")]
    if alike:
        shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in alike[:8])
        return f"a value head has one output, and these are {shapes}"
    labels = dict.fromkeys(layout.label for layout in layouts_for(config))
    return f"known names are {', '.join(labels)}"
