"""A row of train_log.jsonl: the last one of a file, and one in words."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

USUAL_BYTES = 65536  # that hold the last row


def last_row(log: Path) -> dict[str, Any] | None:
    """The last complete row; the file is opened anew, since a training that starts again replaces it."""
    try:
        with log.open("rb") as file:
            begin = max(0, file.seek(0, 2) - USUAL_BYTES)
            file.seek(begin)
            lines = file.read().split(b"\n")
            if begin and len(lines) < 3:  # not one whole row
                file.seek(0)
                lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    row: dict[str, Any] | None = json.loads(lines[-2]) if len(lines) > 1 else None
    return row


def describe(row: Mapping[str, Any]) -> str:
    """One row as words: `step 40 of 200, loss 1.2345, 0:10:00 left`."""
    words = [f"step {row['current_steps']} of {row['total_steps']}"]
    if row.get("loss") is not None:
        words.append(f"loss {row['loss']:.4f}")
    if "remaining_time" in row:
        words.append(f"{row['remaining_time']} left")
    return ", ".join(words)
