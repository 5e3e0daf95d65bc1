"""Wrapper prefixes: what training puts before, and inside, the names of the parameters that it wraps."""

import re
from collections.abc import Iterable
from pathlib import Path

from tools.checkpoint.errors import CheckpointError

# torch.compile, FSDP and activation checkpointing wrap inner modules too, so these stand anywhere in a name.
_ANYWHERE = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
_INNER = re.compile(rf"(?:(?<=\.)|^){_ANYWHERE}")
# Modules around a whole model: DDP, TRL, DeepSpeed-Chat.
_LEADING = re.compile(rf"(?:module\.|pretrained_model\.|rwtransformer\.|{_ANYWHERE})*")
_STARTS = ("module.", "pretrained_model.", "rwtransformer.", "_")
# A policy and a value model in one file: another command takes them apart.
ACTOR_CRITIC = ("policy.", "value_model.", "critic_backbone.")
_TRLX = "base_model."
_TRLX_HEAD = re.compile(r"(v_head\.(\d+|decoder_blocks|lm_head)|ilql_heads|frozen_head)\.")
_ADAPTER = re.compile(r"base_model\.model\..*lora_")


def strip_wrappers(name: str) -> str:
    """The name of a parameter without the wrappers before and inside it."""
    if "._" not in name and not name.startswith(_STARTS):  # most names of most checkpoints
        return name
    return _INNER.sub("", name.removeprefix(_leading(name)))


def inner_wrappers(name: str) -> list[str]:
    """Those wrappers in a name that may stand inside it."""
    return _INNER.findall(name)


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Each name with what it is without wrappers, as the names that stand beside it tell.

    `base_model.` is trlx's wrapper beside one of trlx's heads, and a part of PEFT's names elsewhere.
    """
    names = list(names)
    if not _is_trlx(names):
        return {name: strip_wrappers(name) for name in names}
    return {name: _INNER.sub("", name.removeprefix(_leading(name, is_trlx=True))) for name in names}


def wrapper_of(path: Path, names: Iterable[str], among: Iterable[str] = ()) -> str:
    """The wrapper prefix that all these names share, empty for none; `among` are further names of the same file.

    Raises CheckpointError when only some of them have it, or when two names are one without it: what the rest means is
    not known.
    """
    names = list(names)
    is_trlx = _is_trlx([*names, *among])
    bare: dict[str, str] = {}
    by_prefix: dict[str, str] = {}
    for name in names:
        prefix = _leading(name, is_trlx=is_trlx)
        inner = _INNER.sub("", name.removeprefix(prefix))
        if inner in bare:
            raise CheckpointError(path, f"{bare[inner]} and {name} are the same tensor of the model, {inner}")
        bare[inner] = name
        by_prefix.setdefault(prefix, name)
    if len(by_prefix) > 1:
        examples = ", ".join(sorted(by_prefix.values()))
        raise CheckpointError(path, f"only a part of the names have a wrapper prefix: {examples}")
    return next(iter(by_prefix), "")


def _is_trlx(names: list[str]) -> bool:
    bare = [strip_wrappers(name) for name in names]
    return any(map(_TRLX_HEAD.match, bare)) and not any(map(_ADAPTER.match, bare))


def _leading(name: str, *, is_trlx: bool = False) -> str:
    """The wrappers before the first part of a name that is none; trlx's, which is there once, among them."""
    start = _LEADING.match(name)
    assert start
    if is_trlx and name.startswith(_TRLX, start.end()):
        start = _LEADING.match(name, start.end() + len(_TRLX))
        assert start
    return name[: start.end()]
