"""A step's result as a new directory: built beside its final name, checked, flushed, renamed."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.checkpoint import journal
from tools.checkpoint.change import Change
from tools.checkpoint.errors import CheckpointBusy, CheckpointError
from tools.checkpoint.files import fsync_folder, is_there, make_folder
from tools.checkpoint.layout import TRAINING_STATE, Checkpoint
from tools.checkpoint.receipts import FOLDER, fingerprint, read_receipts, write_receipt
from tools.checkpoint.report import Report
from tools.checkpoint.staging import check_written, copy_tree, require_space, write_content

# No part of a checkpoint for use: our own records, the other checkpoints of a run, and a pickle of trainer arguments.
_NOT_CARRIED = re.compile(rf"{re.escape(FOLDER)}|checkpoint-\d+|finished|training_args\.bin")


def export(
    report: Report, checkpoint: Checkpoint, change: Change, output: Path, overwrite: bool, receipt: Mapping[str, Any]
) -> Report:
    """Write the checkpoint with `change` made to it as `output`, without its training state; the source is only read.

    An output that this step already made of the very same source is nothing to do, whatever later steps did to it.
    """
    _clear_interrupted(output)
    if made := already_made(report, checkpoint, output, receipt):
        return made
    report = replace(report, path=str(output))
    source = recorded(checkpoint, output.parent)
    check_output(checkpoint, change, output, overwrite)
    partial = output.parent / f".{output.name}.burnish-partial"
    make_folder(output.parent)
    partial.mkdir(exist_ok=True)
    with journal.lock(partial):
        try:
            written = _build(checkpoint, change, partial)
            check_written(partial, change)
            _refuse_mixture(checkpoint)
            change.accept()
            write_receipt(partial, {**receipt, "id": 1, "files": list(change.files), "source": source})
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    fsync_folder(partial)
    names = tuple(sorted(entry.name for entry in partial.iterdir() if entry.name != FOLDER))
    if _occupied(output):
        output.rename(_old(output))
    partial.rename(output)
    fsync_folder(output.parent)
    _clear_interrupted(output)
    summary = report.summary if change.files else f"{report.summary.removesuffix('; nothing to do')}; copied unchanged"
    left_out = {"left_out": list(checkpoint.training_state)} if checkpoint.training_state else {}
    return replace(
        report,
        changed=True,
        summary=summary,
        details={**report.details, **left_out},
        written=names,
        bytes_written=written,
    )


def already_made(report: Report, checkpoint: Checkpoint, output: Path, receipt: Mapping[str, Any]) -> Report | None:
    """The report on an output that this step already made of the very same source, None where there is none."""
    if not _is_made(output, {**receipt, "source": recorded(checkpoint, output.parent)}):
        return None
    return replace(report, path=str(output), summary=f"already made from {checkpoint.path}; nothing to do", details={})


def _refuse_mixture(checkpoint: Checkpoint) -> None:
    """Raise CheckpointBusy when another process changed the source while it was copied."""
    if journal.generation(checkpoint.path) != checkpoint.generation:
        problem = "another process changed it while it was copied, so the copy is thrown away"
        raise CheckpointBusy(checkpoint.path, problem, "try again")


def check_output(checkpoint: Checkpoint, change: Change, output: Path, overwrite: bool) -> None:
    """Raise CheckpointError for an output that is in the way of an input, or that holds what --output did not make."""
    place = output.resolve()
    if output.is_symlink():
        raise CheckpointError(output, "a symbolic link", "name the directory itself")
    if place.is_relative_to(checkpoint.path.resolve()):
        raise CheckpointError(output, f"lies inside {checkpoint.path}", "choose another --output")
    for read in (checkpoint.path, *change.inputs()):
        if read.resolve().is_relative_to(place):
            raise CheckpointError(output, f"holds {read}, which is read from", "choose another --output")
    if output.name in ("", ".."):
        raise CheckpointError(output, "not the name of a directory that can be made", "name one below it")
    if _occupied(output):
        if not overwrite:
            raise CheckpointError(output, "exists and is not empty", "choose another --output, or --overwrite")
        if "source" not in _first_receipt(output):
            raise CheckpointError(output, "was not made by --output, so it is not replaced", "remove it yourself")


def _occupied(output: Path) -> bool:
    return is_there(output) and not (output.is_dir() and not any(output.iterdir()))


def _first_receipt(output: Path) -> Mapping[str, Any]:
    return next(iter(read_receipts(output)), {}) if output.is_dir() else {}


def _old(output: Path) -> Path:
    return output.parent / f".{output.name}.burnish-old"


def _clear_interrupted(output: Path) -> None:
    """Put back what was moved aside when the new one never came, else remove it."""
    if is_there(_old(output)):
        if is_there(output):
            shutil.rmtree(_old(output))
        else:
            _old(output).rename(output)
            fsync_folder(output.parent)


def recorded(read: Checkpoint, start: Path) -> dict[str, Any]:
    """What a receipt says of a checkpoint that a step reads: the path from `start`, and the fingerprint of each file.

    All files but the training state, since a result may be made of any: a step is done again when one has changed.
    """
    files = {entry.name: fingerprint(entry) for entry in _carried(read) if entry.is_file()}
    return {"path": os.path.relpath(read.path.resolve(), start.resolve()), "files": files}


def _is_made(output: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether this very step made the output of this very source, and all its files are there and readable."""
    first = _first_receipt(output)
    if any(first.get(key) != wanted[key] for key in ("step", "options", "source")):
        return False
    files = dict(wanted["source"]["files"])
    for receipt in read_receipts(output):
        files |= receipt["files"]
    if not all((output / name).exists() for name, known in files.items() if known is not None):
        return False
    try:
        return bool(Checkpoint.open(output))
    except CheckpointBusy:
        raise
    except CheckpointError:
        return False


def _carried(checkpoint: Checkpoint) -> list[Path]:
    skip = (_NOT_CARRIED, TRAINING_STATE)
    return sorted(e for e in checkpoint.path.iterdir() if not any(pattern.fullmatch(e.name) for pattern in skip))


def _build(checkpoint: Checkpoint, change: Change, partial: Path) -> int:
    records = partial / FOLDER
    for entry in (*partial.iterdir(), *records.iterdir()):  # left by a process that was killed
        if entry not in (records, records / "lock"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    carried = [entry for entry in _carried(checkpoint) if entry.name not in change.files]
    new = {name: content for name, content in change.files.items() if content is not None}
    files = [file for entry in carried for file in (entry.rglob("*") if entry.is_dir() else [entry])]
    require_space(partial, sum(f.stat().st_size for f in files) + sum(content.nbytes for content in new.values()))
    written = sum(write_content(content, partial / name) for name, content in new.items())
    return written + sum(copy_tree(entry, partial / entry.name) for entry in carried)
