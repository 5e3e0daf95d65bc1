"""Value heads: the layouts that training frameworks write, and how one is recognised by names and shapes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import Tensor

# What torch.compile, DDP, FSDP and TRL's wrapper put before the name of every parameter they hold.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "pretrained_model.")
# Suffixes of `config.architectures` whose model has the head as a part of its own.
_WITH_HEAD = ("ForSequenceClassification", "ForTokenClassification", "RewardModel", "CriticModel")


@dataclass(frozen=True)
class HeadLayout:
    """How one family of frameworks names a linear head of one output: weight [1, hidden], bias [1] where it has one."""

    frameworks: str
    prefix: str
    has_bias: bool

    def shape_matches(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor called `prefix.weight` or `prefix.bias` has the shape of a head with one output."""
        return len(shape) == 2 and shape[0] == 1 if name.endswith(".weight") else shape == (1,) and self.has_bias


LAYOUTS = (
    HeadLayout("TRL, LLaMA-Factory", "v_head.summary", has_bias=True),
    HeadLayout("DeepSpeed-Chat, InternLM2", "v_head", has_bias=False),
    HeadLayout("OpenRLHF", "value_head", has_bias=False),
    HeadLayout("reward models", "reward_head", has_bias=True),
    HeadLayout("sequence and token classifiers, OpenRLHF", "score", has_bias=True),
)


@dataclass(frozen=True)
class Head:
    """A value head found among tensors. `names` maps its names on disk to those without wrapper prefixes."""

    layout: HeadLayout
    names: Mapping[str, str]
    declared: bool

    @property
    def label(self) -> str:
        """What `--head` calls it: the first component of its names."""
        return self.layout.prefix.split(".")[0]


def strip_wrappers(name: str) -> str:
    """The name of a parameter without the wrapper prefixes in front of it."""
    while prefix := next((w for w in WRAPPERS if name.startswith(w)), None):
        name = name.removeprefix(prefix)
    return name


def architectures_of(config: Mapping[str, Any] | None) -> list[str]:
    """`architectures` of a config.json, empty where it has none or something else there."""
    names = (config or {}).get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def find_heads(tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> tuple[Head, ...]:
    """Every head of a documented layout; `declared` when the architecture in `config` has one of its own."""
    declared = any(name.endswith(_WITH_HEAD) for name in architectures_of(config))
    heads = []
    for layout in LAYOUTS:
        pattern = re.compile(rf"{re.escape(layout.prefix)}\.(weight|bias)")
        names = {n: bare for n in tensors if pattern.fullmatch(bare := strip_wrappers(n))}
        shapes_match = all(layout.shape_matches(n, tensors[n].shape) or not tensors[n].elements for n in names)
        if names and shapes_match and any(n.endswith(".weight") for n in names):
            heads.append(Head(layout, names, declared))
    return tuple(heads)


def choose_head(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, wanted: str | None = None
) -> Head | None:
    """The one head to act on; None when there is none, or when it belongs to the model and `wanted` does not name it.

    Raises CheckpointError when there are several and none is `wanted`, or when `wanted` is not a head of one output.
    """
    heads = find_heads(tensors, config)
    if wanted:
        chosen = [head for head in heads if wanted in (head.label, head.layout.prefix)]
        if not chosen:
            raise CheckpointError(path, f"no value head called {wanted}; {_near(tensors, wanted)}")
        heads = tuple(chosen)
    else:
        heads = tuple(head for head in heads if not head.declared)
    if len(heads) > 1:
        names = ", ".join(name for head in heads for name in head.names)
        raise CheckpointError(path, f"several value heads: {names}", "choose one with --head")
    if heads and len(set(heads[0].names.values())) < len(heads[0].names):
        raise CheckpointError(path, f"the value head is there twice: {', '.join(heads[0].names)}")
    return heads[0] if heads else None


def _near(tensors: Mapping[str, Tensor], wanted: str) -> str:
    shapes = [f"{n} {list(t.shape)}" for n, t in tensors.items() if strip_wrappers(n).startswith(f"{wanted}.")]
    if shapes:
        return f"a value head has one output, and these are {', '.join(shapes)}"
    return f"known names are {', '.join(layout.prefix for layout in LAYOUTS)}"


def wrapper_of(path: Path, names: Iterable[str]) -> str:
    """The wrapper prefix that all these names share, empty for none.

    Raises CheckpointError when only some of them have it: what the rest means is not known.
    """
    by_prefix: dict[str, str] = {}
    for name in names:
        by_prefix.setdefault(name.removesuffix(strip_wrappers(name)), name)
    if len(by_prefix) > 1:
        examples = ", ".join(sorted(by_prefix.values()))
        raise CheckpointError(path, f"only a part of the names have a wrapper prefix: {examples}")
    return next(iter(by_prefix), "")
