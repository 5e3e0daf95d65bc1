"""rewrite(): the one way in which a checkpoint directory changes, in place or into a new directory."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools import __version__
from tools.checkpoint import journal
from tools.checkpoint.change import Change, Content, FileCopy, TensorFile
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.export import already_made, check_output, export
from tools.checkpoint.files import copy_range, is_there, link
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.receipts import next_id
from tools.checkpoint.report import Report
from tools.checkpoint.staging import HeaderEdit, check_written, header_edit, require_space, write_content

Plan = Callable[[Checkpoint], Change]


def rewrite(
    step: str,
    path: Path,
    plan: Plan,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    copy: bool = False,
    accept_run: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Carry out what `plan` wants of the checkpoint at `path`, so that a kill at any instant leaves it old or new.

    In place, files are staged, committed by one rename and applied (see journal); a safetensors file that only loses
    tensors at its ends or changes names has its header edited where it lies, unless `copy` asks for a new file. With
    `output`, a copy without the training state is built beside it and renamed into place, and `path` is only read.
    `accept_run` lets `path` be a run directory; `options` are recorded in the receipt. Raises CheckpointError; then
    nothing has changed.
    """
    started = time.perf_counter()
    path = Path(path)
    with _os_errors(path):
        checkpoint = Checkpoint.open(path, accept_run=accept_run)
        change = plan(checkpoint)
        change.check(checkpoint)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        receipt = {"step": step, "version": __version__, "time": now, "options": dict(options or {})}
        receipt |= {"recorded": dict(change.recorded)} if change.recorded else {}
        recovered = {"recovered": checkpoint.recovered} if checkpoint.recovered else {}
        details = {**change.details, **recovered}
        report = Report(step, str(path), changed=False, summary=change.summary, details=details)
        made = already_made(report, checkpoint, output.expanduser(), receipt) if dry_run and output else None
        if made:
            report = made
        elif dry_run:
            report = _dry_run(report, checkpoint, change, copy, output, overwrite)
        elif output is not None:
            report = export(report, checkpoint, change, output.expanduser(), overwrite, receipt)
        elif change.files:
            report = _in_place(report, checkpoint, plan, copy, receipt)
    return replace(report, seconds=round(time.perf_counter() - started, 3))


@contextlib.contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "nothing is lost; free some space, or choose an --output" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(error.filename or path, (error.strerror or str(error)).lower(), remedy) from error


def _edits(checkpoint: Checkpoint, change: Change, copy: bool) -> dict[str, HeaderEdit]:
    """The wanted files that an edit of the header in place can make."""
    candidates = {} if copy else change.files
    edits = {
        name: header_edit(content, checkpoint.path / name)
        for name, content in candidates.items()
        if isinstance(content, TensorFile) and (checkpoint.path / name).exists()
    }
    return {name: edit for name, edit in edits.items() if edit}


def _moved(path: Path, change: Change) -> dict[str, Path]:
    """The wanted files that are files of the checkpoint under another name, by their new names."""
    going = {path / name for name, content in change.files.items() if content is None}
    copies = {name: c.source for name, c in change.files.items() if isinstance(c, FileCopy)}
    return {name: source for name, source in copies.items() if source in going}


def _dry_run(
    report: Report, checkpoint: Checkpoint, change: Change, copy: bool, output: Path | None, overwrite: bool
) -> Report:
    if output is not None:
        check_output(checkpoint, change, output.expanduser(), overwrite)
    edits = _edits(checkpoint, change, copy or output is not None)
    moved = _moved(checkpoint.path, change) if output is None else {}
    plan = {
        name: f"edit the header, {len(edits[name].head)} bytes"
        if name in edits
        else f"rename {moved[name].name}"
        if name in moved
        else ("remove" if output is None else "leave out")
        if content is None
        else f"write, {content.nbytes} bytes"
        for name, content in change.files.items()
        if checkpoint.path / name not in moved.values()
    }
    if output is not None:
        plan["everything else"] = f"copy to {output}"
    summary = f"would do: {report.summary}" if plan else report.summary
    return replace(report, summary=summary, details={**report.details, **({"plan": plan} if plan else {})})


def _in_place(report: Report, checkpoint: Checkpoint, plan: Plan, copy: bool, receipt: dict[str, Any]) -> Report:
    path = checkpoint.path
    if not os.access(path, os.W_OK):
        raise CheckpointError(path, "not writable", "choose an --output")
    with journal.lock(path):
        journal.finish(path)
        checkpoint = Checkpoint.read(path)  # as it is now that nobody else can change it
        change = plan(checkpoint)
        change.check(checkpoint)
        if not change.files:  # another process has done it since
            return replace(report, summary=change.summary, details=dict(change.details))
        edits = _edits(checkpoint, change, copy)
        new = {name: c for name, c in change.files.items() if c is not None and name not in edits}
        removed = tuple(name for name, content in change.files.items() if content is None)
        moved = _moved(path, change)
        require_space(path, sum(content.nbytes for name, content in new.items() if name not in moved))
        touched = [name for name in change.files if is_there(path / name)]
        gate = journal.gate_for(path, touched)
        with journal.staging(path) as stage:
            written = _stage(path, stage, new, moved, edits)
            change.accept()
        operations = [
            *({"op": "place", "file": name} for name in new if name not in touched),
            *(journal.edit_operation(name, edit.head, edit.size) for name, edit in edits.items()),
            *({"op": "place", "file": name} for name in new if name in touched and name != gate),
            *({"op": "remove", "file": name} for name in removed),
        ]
        receipt |= {"id": next_id(path), "files": list(change.files)}
        journal.commit(path, receipt, operations, gate, gate_returns=gate not in change.files)
        check_written(path, change)
    odd = [name for name, edit in edits.items() if len(edit.head) % 8]
    note = {"not aligned to 8 bytes": f"{', '.join(odd)}: legal, but some readers mind; --copy aligns"} if odd else {}
    return replace(
        report,
        changed=True,
        details={**report.details, **note},
        written=tuple(new),
        edited=tuple(edits),
        removed=removed,
        bytes_written=written + sum(len(edit.head) for edit in edits.values()),
    )


def _stage(
    path: Path, stage: Path, new: Mapping[str, Content], moved: Mapping[str, Path], edits: Mapping[str, HeaderEdit]
) -> int:
    """Write the new files, and what undo needs of the edited ones, under `.burnish/stage`; returns the bytes.

    A file that only gets another name is linked there, where the file system has hard links.
    """
    written = 0
    for name, content in new.items():
        if not (name in moved and link(moved[name], stage / name)):
            written += write_content(content, stage / name)
    for name, edit in edits.items():
        with (path / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for part, start, end in (("head", 0, len(edit.head)), ("tail", edit.size, size)):
                with (stage / "undo" / f"{name}.{part}").open("xb") as kept:
                    copy_range(file, start, end - start, kept)
                    kept.flush()
                    os.fsync(kept.fileno())
    return written
