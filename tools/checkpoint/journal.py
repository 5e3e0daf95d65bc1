"""The redo log inside a checkpoint: lock, commit record, apply, recovery, receipts.

    CKPT/.burnish/lock            held by flock while a step works; says who holds it
    CKPT/.burnish/stage/          new files before the commit, the record among them
    CKPT/.burnish/commit.json     the commit record; its rename into place is the commit point
    CKPT/.burnish/undo/ID/        what the step ID replaced or removed
    CKPT/.burnish/receipts.jsonl  one line for each step that changed the checkpoint

Before the record is in place nothing of the checkpoint has changed; once it is, every operation in it can be repeated,
so whoever opens the checkpoint next finishes the step.
"""

import base64
import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointBusy, CheckpointError
from tools.checkpoint.files import fsync_folder, is_there, make_folder, write_synced
from tools.checkpoint.receipts import FOLDER, read_receipts, write_receipt
from tools.checkpoint.record import read_record, refuse_foreign, refuse_links

# Without these no loader finds the rest, so none loads half of a change.
_GATES = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json", "config.json")


@contextlib.contextmanager
def lock(checkpoint: Path) -> Iterator[None]:
    """Hold the checkpoint's lock, freed by the kernel when this process dies; a first open leaves no trace on failure.

    Raises CheckpointBusy naming the holder.
    """
    folder = checkpoint / FOLDER
    with contextlib.ExitStack() as at_exit:
        fd = _acquire(checkpoint, folder)
        at_exit.callback(os.close, fd)
        at_exit.callback(_leave_no_lock, folder)
        refuse_foreign(folder)
        holder = {"pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)
        yield


def _leave_no_lock(folder: Path) -> None:
    (folder / "lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty once a step has left a receipt
        folder.rmdir()


def _holder(written: bytes) -> str:
    """Who holds a lock, as far as it has written it down."""
    try:
        holder = json.loads(written)
        return f"process {holder['pid']} (since {holder['since']})"
    except (ValueError, TypeError, KeyError):
        return "another process"


def _acquire(checkpoint: Path, folder: Path) -> int:
    path = folder / "lock"
    refuse_links(folder, path)
    while True:
        try:
            folder.mkdir(exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # the holder before us removed the folder between the two calls
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(fd, 4096, 0))
            os.close(fd)
            raise CheckpointBusy(checkpoint, f"{holder} is changing it", "try again later") from None
        except OSError as error:
            os.close(fd)
            _leave_no_lock(folder)
            raise CheckpointError(path, f"this file system has no working locks ({error.strerror})") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)  # the holder before us removed the file that we have just locked


def recover(checkpoint: Path) -> str | None:
    """Finish the step whose record is committed, throw away what was staged without one; says what it did, if anything.

    Raises CheckpointError when a committed step awaits completion and this process cannot write, CheckpointBusy when
    another process is at it.
    """
    folder = checkpoint / FOLDER
    committed = is_there(folder / "commit.json")
    if not committed and not is_there(folder / "stage") and not is_there(folder / "lock"):
        return None
    try:
        with lock(checkpoint):
            return finish(checkpoint)
    except CheckpointBusy:
        if committed:
            raise
        return None  # somebody is staging; what is here is the old checkpoint, whole
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise
        if committed:
            problem = "an interrupted step awaits completion, and this process may not write here"
            raise CheckpointError(checkpoint, problem, "run any command on it as its owner") from error
        return None


def finish(checkpoint: Path) -> str | None:
    """What `recover` does, for a caller that holds the lock."""
    folder = checkpoint / FOLDER
    record_path = folder / "commit.json"
    if not is_there(record_path):
        if not is_there(folder / "stage"):
            return None
        shutil.rmtree(folder / "stage")
        return "an interrupted step had changed nothing; what it had prepared is removed"
    record = read_record(checkpoint, record_path)
    _apply(checkpoint, record)
    return f"an interrupted {record['receipt']['step']} was completed"


def generation(checkpoint: Path) -> int | None:
    """A number that grows with each step that changes the checkpoint; None while one is being applied."""
    folder = checkpoint / FOLDER
    if is_there(folder / "commit.json"):
        return None
    return (folder / "receipts.jsonl").stat().st_size if (folder / "receipts.jsonl").exists() else 0


@contextlib.contextmanager
def staging(checkpoint: Path) -> Iterator[Path]:
    """The folder for new files, and in it `undo` for old bytes; gone again when staging fails."""
    stage = checkpoint / FOLDER / "stage"
    try:
        (stage / "undo").mkdir(parents=True)
        yield stage
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def commit(
    checkpoint: Path,
    receipt: Mapping[str, Any],
    operations: Sequence[Mapping[str, Any]],
    gate: str | None,
    *,
    gate_returns: bool,
    forget: Sequence[int] = (),
) -> None:
    """Make the record durable and carry it out. Staged files must be flushed already.

    `gate` is moved aside meanwhile, and comes back where `gate_returns` rather than being replaced; what is kept for
    the steps in `forget` goes when all is done.
    """
    folder = checkpoint / FOLDER
    for staged in (folder / "stage" / "undo", folder / "stage", folder, checkpoint):
        fsync_folder(staged)
    record = {
        "receipt": receipt,
        "gate": gate,
        "gate_returns": gate_returns,
        "operations": operations,
        "forget": list(forget),
    }
    write_synced(folder / "stage" / "commit.json", json.dumps(record).encode())
    (folder / "stage" / "commit.json").rename(folder / "commit.json")
    fsync_folder(folder)
    _apply(checkpoint, record)


def gate_for(checkpoint: Path, touched: Sequence[str]) -> str | None:
    """The file to move aside while several of the files that are present change: one that every loader reads first."""
    if len(touched) < 2:
        return None
    return next((n for n in _GATES if n in touched), None) or next(
        (n for n in _GATES if (checkpoint / n).exists()), None
    )


def edit_operation(name: str, head: bytes, size: int) -> dict[str, Any]:
    """The operation that replaces the first bytes of a file and cuts it to `size` bytes."""
    return {"op": "edit", "file": name, "head": base64.b64encode(head).decode(), "size": size}


def _apply(checkpoint: Path, record: Mapping[str, Any]) -> None:
    """Carry out a committed record. Each line may be repeated: a crash at any of them is followed by all of them."""
    folder = checkpoint / FOLDER
    if not any(known["id"] == record["receipt"]["id"] for known in read_receipts(checkpoint)):
        _change(checkpoint, record)
        write_receipt(checkpoint, record["receipt"])
    for spent in record["forget"]:
        shutil.rmtree(undo_folder(checkpoint, spent), ignore_errors=True)
    if is_there(folder / "stage"):
        shutil.rmtree(folder / "stage")
    (folder / "commit.json").unlink()
    fsync_folder(folder)


def _change(checkpoint: Path, record: Mapping[str, Any]) -> None:
    stage, undo = checkpoint / FOLDER / "stage", undo_folder(checkpoint, record["receipt"]["id"])
    if not is_there(undo):
        make_folder(undo.parent)
        (stage / "undo").rename(undo)
        fsync_folder(undo.parent)
    gate = record["gate"]
    if gate and is_there(checkpoint / gate) and not is_there(undo / gate):
        (checkpoint / gate).rename(undo / gate)
        fsync_folder(undo)
        fsync_folder(checkpoint)
    for operation in record["operations"]:
        _OPERATIONS[operation["op"]](checkpoint, stage, undo, operation)
    fsync_folder(checkpoint)
    if gate:
        new = stage / gate
        if is_there(new):
            new.rename(checkpoint / gate)
        elif record["gate_returns"] and is_there(undo / gate):
            (undo / gate).rename(checkpoint / gate)
        fsync_folder(checkpoint)


def undo_folder(checkpoint: Path, receipt_id: int) -> Path:
    """Where the files that a step replaced or removed are kept."""
    return checkpoint / FOLDER / "undo" / str(receipt_id)


def _place(checkpoint: Path, stage: Path, undo: Path, operation: Mapping[str, Any]) -> None:
    name = operation["file"]
    if is_there(stage / name):
        _keep(checkpoint / name, undo)
        (stage / name).replace(checkpoint / name)


def _keep(file: Path, undo: Path) -> None:
    """Give a file that is about to go a second name in `undo`."""
    kept = undo / file.name
    if not is_there(kept):
        if not is_there(file):
            return
        try:
            os.link(file, kept, follow_symlinks=False)
        except OSError:  # a file system without hard links: for an instant the name is absent instead
            file.rename(kept)
    fsync_folder(undo)


def _edit(checkpoint: Path, stage: Path, undo: Path, operation: Mapping[str, Any]) -> None:
    tail = stage / f"{operation['file']}.tail"
    with (checkpoint / operation["file"]).open("r+b") as file:
        file.write(base64.b64decode(operation["head"]))
        if tail.is_file():  # what a step had cut off comes back
            file.seek(operation["size"] - tail.stat().st_size)
            with tail.open("rb") as kept:
                shutil.copyfileobj(kept, file)
        file.flush()
        file.truncate(operation["size"])
        os.fsync(file.fileno())


def _remove(checkpoint: Path, stage: Path, undo: Path, operation: Mapping[str, Any]) -> None:
    _keep(checkpoint / operation["file"], undo)
    (checkpoint / operation["file"]).unlink(missing_ok=True)


_OPERATIONS = {"place": _place, "edit": _edit, "remove": _remove}
