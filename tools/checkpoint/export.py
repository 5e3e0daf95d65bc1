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
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.files import fsync_folder, make_folder
from tools.checkpoint.layout import TRAINING_STATE, Checkpoint
from tools.checkpoint.report import Report
from tools.checkpoint.staging import check_written, copy_tree, require_space, write_content

# Neither part of a checkpoint: our own records, and the other checkpoints of a run that keeps its last one at the top.
_NOT_CARRIED = re.compile(rf"{re.escape(journal.FOLDER)}|checkpoint-\d+|finished")


def export(
    report: Report, checkpoint: Checkpoint, change: Change, output: Path, overwrite: bool, receipt: Mapping[str, Any]
) -> Report:
    """Write the checkpoint with `change` made to it as `output`, without its training state; the source is only read.

    An output that this step already made of the very same source is nothing to do, whatever later steps did to it.
    """
    report = replace(report, path=str(output))
    source = _source(checkpoint, output)
    if output.resolve().is_relative_to(checkpoint.path.resolve()):
        raise CheckpointError(output, "lies inside the checkpoint", "choose another --output")
    if _occupied(output) and not overwrite:
        if _made_from(output, {**receipt, "source": source}):
            return replace(report, summary=f"already made from {checkpoint.path}; nothing to do", details={})
        raise CheckpointError(output, "exists and is not empty", "choose another --output, or --overwrite")
    partial = output.parent / f".{output.name}.burnish-partial"
    make_folder(output.parent)
    partial.mkdir(exist_ok=True)
    with journal.lock(partial):
        try:
            written = _build(checkpoint, change, partial)
            check_written(partial, change)
            journal.write_receipt(partial, {**receipt, "id": 1, "files": list(change.files), "source": source})
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    fsync_folder(partial)
    names = tuple(sorted(entry.name for entry in partial.iterdir() if entry.name != journal.FOLDER))
    _put_in_place(partial, output)
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


def _occupied(output: Path) -> bool:
    return os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir()))


def _source(checkpoint: Checkpoint, output: Path) -> dict[str, Any]:
    """Where an output comes from: the path from its own folder, and the fingerprints of the files it is made of."""
    files = {entry.name: journal.fingerprint(entry) for entry in _carried(checkpoint) if entry.is_file()}
    return {"path": os.path.relpath(checkpoint.path.resolve(), output.parent.resolve()), "files": files}


def _made_from(output: Path, wanted: Mapping[str, Any]) -> bool:
    first = next(iter(journal.receipts(output)), {}) if output.is_dir() else {}
    return all(first.get(key) == wanted[key] for key in ("step", "options", "source"))


def _carried(checkpoint: Checkpoint) -> list[Path]:
    skip = (_NOT_CARRIED, TRAINING_STATE)
    return sorted(e for e in checkpoint.path.iterdir() if not any(pattern.fullmatch(e.name) for pattern in skip))


def _build(checkpoint: Checkpoint, change: Change, partial: Path) -> int:
    records = partial / journal.FOLDER
    for entry in (*partial.iterdir(), *records.iterdir()):  # left by a process that was killed
        if entry not in (records, records / "lock"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    carried = [entry for entry in _carried(checkpoint) if entry.name not in change.files]
    new = {name: content for name, content in change.files.items() if content is not None}
    files = [file for entry in carried for file in (entry.rglob("*") if entry.is_dir() else [entry])]
    require_space(partial, sum(f.stat().st_size for f in files) + sum(content.nbytes for content in new.values()))
    written = sum(write_content(content, partial / name) for name, content in new.items())
    return written + sum(copy_tree(entry, partial / entry.name) for entry in carried)


def _put_in_place(partial: Path, output: Path) -> None:
    old = output.parent / f".{output.name}.burnish-old"
    if _occupied(output):
        Checkpoint.open(output)  # whatever else lies here is not ours to replace
        shutil.rmtree(old, ignore_errors=True)  # left by a process that was killed
        output.rename(old)
    partial.rename(output)
    fsync_folder(output.parent)
    if old.exists():
        shutil.rmtree(old)
