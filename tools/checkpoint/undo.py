"""The last step taken back, byte for byte, from what it kept; itself a change through the commit record."""

import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools import __version__
from tools.checkpoint import journal
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.files import is_shared, is_there
from tools.checkpoint.receipts import fingerprint, next_id, read_receipts


def standing(checkpoint: Path) -> list[dict[str, Any]]:
    """The receipts of the steps that still hold, oldest first: those that were undone are left out."""
    steps: list[dict[str, Any]] = []
    for receipt in read_receipts(checkpoint):
        if "undoes" in receipt:
            steps = [step for step in steps if step["id"] != receipt["undoes"]]
        else:
            steps.append(receipt)
    return steps


def kept_bytes(checkpoint: Path, receipt: Mapping[str, Any]) -> int | None:
    """What undo keeps for a step, in bytes on disk; None when it was freed."""
    folder = journal.undo_folder(checkpoint, receipt["id"])
    if not folder.is_dir():
        return None
    return sum(path.lstat().st_size for path in folder.iterdir())


def undo_last(checkpoint: Path) -> dict[str, Any]:
    """Take the last standing step back and return its receipt.

    Raises CheckpointError when there is none, when what it kept was freed, and when a file has changed since, which
    undoing would destroy.
    """
    with journal.lock(checkpoint):
        journal.finish(checkpoint)
        steps = standing(checkpoint)
        if not steps:
            raise CheckpointError(checkpoint, "no step to undo")
        receipt = steps[-1]
        kept = journal.undo_folder(checkpoint, receipt["id"])
        _refuse(checkpoint, receipt, kept)
        with journal.staging(checkpoint) as stage:
            operations = [_reversed(checkpoint, name, kept, stage) for name in receipt["files"]]
        touched = [name for name in receipt["files"] if is_there(checkpoint / name)]
        gate = journal.gate_for(checkpoint, touched)
        number = next_id(checkpoint)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        mine = {"step": "undo", "version": __version__, "time": now, "options": {}, "undoes": receipt["id"]}
        journal.commit(
            checkpoint,
            mine | {"id": number, "files": list(receipt["files"])},
            [operation for operation in operations if operation["op"] != "place" or operation["file"] != gate],
            gate,
            gate_returns=gate not in receipt["files"],
            forget=(receipt["id"], number),
        )
    return receipt


def _refuse(checkpoint: Path, receipt: Mapping[str, Any], kept: Path) -> None:
    what = f"{receipt['step']} of {receipt['time']}"
    if "source" in receipt:
        raise CheckpointError(checkpoint, f"was made by {what}, so there is nothing before it", "remove the directory")
    if not kept.is_dir():
        raise CheckpointError(checkpoint, f"what {what} kept was freed", "it cannot be undone")
    latest = {name: known for each in read_receipts(checkpoint) for name, known in each["files"].items()}
    for name in receipt["files"]:
        if fingerprint(checkpoint / name) != latest[name]:  # where a later step was undone, as that left it
            problem = f"has changed since {what}, or was copied without its times"
            raise CheckpointError(checkpoint / name, problem, "undoing the step would destroy that")
        if is_there(kept / f"{name}.head") and is_shared(checkpoint / name):
            raise CheckpointError(checkpoint / name, "is a link or has a second name", "remove that name first")


def _reversed(checkpoint: Path, name: str, kept: Path, stage: Path) -> dict[str, Any]:
    """The operation that gives a file back as it was before the step, its old bytes staged."""
    if is_there(kept / name):
        _link(kept / name, stage / name)
        return {"op": "place", "file": name}
    if not is_there(kept / f"{name}.head"):
        return {"op": "remove", "file": name}
    _link(kept / f"{name}.tail", stage / f"{name}.tail")
    size = (checkpoint / name).stat().st_size + (kept / f"{name}.tail").stat().st_size
    return journal.edit_operation(name, (kept / f"{name}.head").read_bytes(), size)


def _link(old: Path, staged: Path) -> None:
    """A second name for the kept bytes; a copy on a file system that has no hard links."""
    try:
        os.link(old, staged, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, staged, follow_symlinks=False)
        if not staged.is_symlink():
            with staged.open("rb") as file:
                os.fsync(file.fileno())
