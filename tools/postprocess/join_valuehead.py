"""Value head: put back from its own file into the weights, as the trainer had it."""

from collections.abc import Mapping
from typing import Annotated

import typer

from tools.checkpoint.change import (
    Change,
    Content,
    Source,
    Stored,
    TensorFile,
    index_file,
    refuse_ungathered,
    renamed,
    stored,
)
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import DTYPE_BITS
from tools.checkpoint.layout import Checkpoint, WeightFile, Weights
from tools.checkpoint.report import Report
from tools.checkpoint.rewrite import rewrite
from tools.heads.files import refuse_contradictions, refuse_other_values
from tools.heads.finding import Head, choose_head, find_heads, some
from tools.heads.wrappers import bare_names
from tools.postprocess.options import CheckpointDir, DryRun, OutputDir, Overwrite

_WRAPPERS = ("pretrained_model.", "base_model.", "rwtransformer.")


def join_valuehead(
    checkpoint: CheckpointDir,
    *,
    output: OutputDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    copy: Annotated[bool, typer.Option("--copy", help="Write new shards instead of editing headers in place.")] = False,
    wrapper: Annotated[
        str, typer.Option(help="Put this before the names of the decoder: `pretrained_model.`.", show_default=False)
    ] = "",
) -> Report:
    """Put the value head back into the weights, so that TRL and other trainers find it where they left it.

    The inverse of fix-valuehead: value_head.* becomes a part of the last shard (an adapter has none, so that it becomes
    the model.safetensors or pytorch_model.bin that TRL reads beside an adapter). Tensors keep names, bytes and dtypes;
    the other shards stay as they are, unless --wrapper changes their names.

    Example: tools join-valuehead runs/ppo/checkpoint-500
    """
    if wrapper not in ("", *_WRAPPERS):
        problem = f"--wrapper {wrapper}: no framework puts that before the names of a decoder"
        raise CheckpointError(checkpoint, problem, f"one of {', '.join(_WRAPPERS)}")
    return rewrite(
        "join-valuehead",
        checkpoint,
        lambda source: _plan(source, wrapper),
        output=output,
        overwrite=overwrite,
        dry_run=dry_run,
        copy=copy,
        options={"wrapper": wrapper} if wrapper else {},
    )


def _plan(source: Checkpoint, wrapper: str) -> Change:
    refuse_ungathered(source)
    refuse_contradictions(source)
    model = source.model
    head = _head_in_file(source)
    inside = _head_inside(source, head.label if head else None)
    if head is None and inside is None:
        return Change("no value head here; nothing to do")
    if model is None and wrapper:
        raise CheckpointError(source.path, f"holds no decoder to put {wrapper} before", "leave --wrapper out")
    files = renamed(model, _wrapped(source, model, inside, wrapper)) if model else {}
    if head and source.head:
        files |= _joined(source, source.head, inside, files)
    if not files:
        where = model.name if model else ""
        return Change(f"the value head is in {where} already; nothing to do")
    parts = []
    if head and source.head:
        done = "is in the weights already, so that file goes" if inside else "joined into the weights"
        parts.append(f"value head of {source.head.name} {done} ({some(head.names)})")
    if wrapper:
        parts.append(f"{wrapper} before the names of the decoder")
    details = {"head": head.described(source.head.tensors)} if head and source.head else {}
    doubled = frozenset(source.head.tensors) if inside and source.head else frozenset()
    return Change("; ".join(parts), files, details, doubled)


def _head_in_file(source: Checkpoint) -> Head | None:
    """The head of value_head.*, which must be one that is known, and all of the file."""
    if source.head is None:
        return None
    heads = find_heads(source.head.tensors, source.config)
    known = {name for head in heads for name in (*head.names, *head.companions)}
    odd = [name for name in source.head.tensors if name not in known]
    if odd or len(heads) != 1:
        names = ", ".join(odd or known)
        raise CheckpointError(source.path / source.head.name, f"{names}: not one value head of a known framework")
    return heads[0]


def _head_inside(source: Checkpoint, label: str | None) -> Head | None:
    """The head in the weights, be it part of the model where it is called as that of the file."""
    if source.model is None:
        return None
    same = [head for head in find_heads(source.model.tensors, source.config) if head.label == label]
    return choose_head(source.path, source.model.tensors, source.config, label if same else None)


def _wrapped(source: Checkpoint, model: Weights, inside: Head | None, wrapper: str) -> dict[str, str]:
    """The new names of the decoder."""
    if not wrapper:
        return {}
    own = {**inside.names, **inside.companions} if inside else {}
    head = source.head.tensors if source.head else own
    names = bare_names([*model.tensors, *head])
    wrapped = {name: wrapper + names[name] for name in model.tensors if name not in own}
    read_again = bare_names([*wrapped.values(), *head])
    if any(read_again[new] != names[old] for old, new in wrapped.items()):
        problem = f"--wrapper {wrapper}: no framework puts that beside {some(head)}"
        raise CheckpointError(source.path, problem, f"one of {', '.join(w for w in _WRAPPERS if w != wrapper)}")
    return wrapped


def _joined(
    source: Checkpoint, file: Weights, inside: Head | None, files: Mapping[str, Content | None]
) -> dict[str, Content | None]:
    """The weights with the head, and its own file gone; `files` are those of the weights that change anyway."""
    gone: dict[str, Content | None] = {each.name: None for each in file.files}
    if file.index is not None:
        gone[file.index_name] = None
    head: dict[str, Source] = dict(stored(file))
    if source.model is None:
        name = "pytorch_model.bin" if file.name.endswith(".bin") else "model.safetensors"
        return {**gone, name: TensorFile(head)}
    if inside:
        own = {**inside.names, **inside.companions}
        refuse_other_values(source, {bare: stored(source.model)[name] for name, bare in own.items()}, head)
        return gone
    return {**gone, **_with_head(source.model, files, head)}


def _with_head(
    model: Weights, files: Mapping[str, Content | None], head: Mapping[str, Source]
) -> dict[str, Content | None]:
    """The last shard with the head in it, and the index that says so."""
    shards = {file.name: _tensors(file, files.get(file.name)) for file in model.files}
    last = model.files[-1]
    for file in model.files:
        if twice := head.keys() & shards[file.name].keys():
            raise CheckpointError(file.path, f"{', '.join(sorted(twice))} is there already, and is no value head")
    shards[last.name] = _placed(shards[last.name], head)
    changed: dict[str, Content | None] = {last.name: TensorFile(shards[last.name], last.metadata)}
    if model.index is not None:
        changed[model.index_name] = index_file(shards, model)
    return changed


def _tensors(file: WeightFile, wanted: Content | None) -> Mapping[str, Source]:
    return wanted.tensors if isinstance(wanted, TensorFile) else {name: Stored(file, name) for name in file.tensors}


def _placed(before: Mapping[str, Source], head: Mapping[str, Source]) -> Mapping[str, Source]:
    """The head where safetensors would write it: before tensors of a narrower dtype, else behind them.

    So each tensor is aligned to its own width, and fix-valuehead takes the head out again by an edit of the header.
    """
    width = max(DTYPE_BITS[source.dtype] for source in head.values())
    goes_first = any(DTYPE_BITS[source.dtype] < width for source in before.values())
    return {**head, **before} if goes_first else {**before, **head}
