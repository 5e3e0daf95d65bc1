"""Receipts: one line for each step that changed a checkpoint, with the fingerprints of the files it left."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.files import fsync_folder
from tools.checkpoint.opening import open_file
from tools.checkpoint.record import is_receipt

FOLDER = ".burnish"
_HASHED_WHOLE_BYTES = 1 << 20


def read_receipts(checkpoint: Path) -> list[dict[str, Any]]:
    """The receipts of this checkpoint, oldest first; a line cut by a power failure is not one.

    Raises CheckpointError naming a whole line that is none either.
    """
    path = checkpoint / FOLDER / "receipts.jsonl"
    if not path.exists():
        return []
    with open_file(path) as (file, _):
        lines = file.read().split(b"\n")
    return [_receipt(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def _receipt(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        receipt = json.loads(line)
    except (ValueError, RecursionError):
        receipt = None
    if not is_receipt(receipt):
        raise CheckpointError(path, f"line {number} is not a receipt", "remove the line")
    return dict(receipt)


def next_id(checkpoint: Path) -> int:
    """The number of the next receipt."""
    return max((receipt["id"] for receipt in read_receipts(checkpoint)), default=0) + 1


def write_receipt(checkpoint: Path, receipt: Mapping[str, Any]) -> None:
    """Append a receipt, with the fingerprints its files have now."""
    files = {name: fingerprint(checkpoint / name) for name in receipt["files"]}
    path = checkpoint / FOLDER / "receipts.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        whole = path.read_bytes().rfind(b"\n") + 1  # a torn last line goes
        file.truncate(whole)
        file.write(json.dumps({**receipt, "files": files}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(path.parent)


def fingerprint(file: Path) -> dict[str, Any] | None:
    """Size in bytes, mtime and the SHA-256 of the safetensors header (of the whole file when small); None when absent.

    Hashing a large file's data costs as much as copying it, so that is left to those who ask for it.
    """
    if not file.is_file():
        return None
    stat = file.stat()
    known: dict[str, Any] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    with file.open("rb") as opened:
        if stat.st_size <= _HASHED_WHOLE_BYTES:
            known["sha256"] = hashlib.sha256(opened.read()).hexdigest()
        elif file.suffix == ".safetensors":
            start = opened.read(8)
            header = opened.read(int.from_bytes(start, "little"))
            known["header_sha256"] = hashlib.sha256(start + header).hexdigest()
    return known
