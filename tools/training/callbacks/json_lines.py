"""A file of JSON lines that grows off the training thread, and keeps its history when training starts again."""

import errno
import json
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends records to a file: `write` returns at once, one thread writes each in order and flushes it.

    Closed by `close`, else when the object is dropped or the interpreter ends; nothing queued is lost. A record that
    cannot be written costs one warning and never stops the caller.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        records: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._records = records
        thread = threading.Thread(target=_write_all, args=(path, records), name=f"writes {path.name}", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _finish, records, thread)

    def write(self, record: Mapping[str, Any]) -> None:
        self._records.put(record)

    def close(self) -> None:
        """Wait until everything queued is written."""
        self._finalizer()


def _finish(records: "SimpleQueue[Mapping[str, Any] | None]", thread: threading.Thread) -> None:
    records.put(None)
    thread.join()


def _write_all(path: Path, records: "SimpleQueue[Mapping[str, Any] | None]") -> None:
    failed = False
    while (record := records.get()) is not None:
        try:
            _append(path, json.dumps(record, allow_nan=False) + "\n")
        except (OSError, ValueError, TypeError) as error:
            if not failed:
                logger.warning("%s: a record was not written (%s); training goes on", path, error)
            failed = True


def _append(path: Path, line: str) -> None:
    """Opened anew each time, so that a full disk costs only the rows meanwhile; a part of a row is taken back."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        data = line.encode()
        if file.write(data) < len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def set_aside(path: Path) -> Path | None:
    """Rename an old file by the time of now, so that a new one starts; None when there is none."""
    if not path.exists():
        return None
    return path.rename(_free(path, "before"))


def start(path: Path, step: int, key: str = "current_steps") -> None:
    """Make ready to append what comes after `step`: from 0 on in a new file, the old one renamed, else behind the rows
    up to `step`, with later ones moved aside. `key` is where a row holds its step.
    """
    if aside := cut_after(path, step, key) if step else set_aside(path):
        logger.info("%s: earlier rows are kept in %s", path, aside.name)


def cut_after(path: Path, step: int, key: str = "current_steps") -> Path | None:
    """Keep the rows up to `step`; those beyond it, and any half-written one, move to a file beside. None if there are
    none."""
    if not path.exists():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line, key) <= step]
    if len(kept) == len(lines):
        return None
    beyond = _free(path, f"beyond-step-{step}")
    _write(beyond, [line for line in lines if _step_of(line, key) > step])
    draft = path.with_name(f".{path.name}.draft")
    _write(draft, kept)
    draft.replace(path)
    return beyond


def _step_of(line: str, key: str) -> float:
    try:
        return float(json.loads(line)[key]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _free(path: Path, reason: str) -> Path:
    """A name beside `path` that nothing has: train_log.jsonl.beyond-step-50.20260801T120000.123456Z."""
    return path.with_name(f"{path.name}.{reason}.{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")


def _write(path: Path, lines: list[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
