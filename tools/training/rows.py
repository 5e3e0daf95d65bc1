"""The rows of a data file, each with its place."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError

_LONGEST_CELL = 2**31 - 1  # csv's own limit of 128 KiB is less than a long text


@dataclass(frozen=True)
class Row:
    """One row: where it stands (`FILE:LINE`, or `FILE row N`), and its columns that are not null."""

    place: str
    columns: dict[str, Any]

    def refused(self, problem: str, remedy: str = "") -> CheckpointError:
        """The error that names this row."""
        return CheckpointError(self.place, problem, remedy)


def row_of(place: str, columns: Any) -> Row:
    """The row of these columns. Raises CheckpointError for what has none."""
    if not isinstance(columns, dict):
        raise CheckpointError(place, f"is {type(columns).__name__}, not a row", "write one JSON object a row")
    return Row(place, {name: value for name, value in columns.items() if value is not None})


def read_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a .jsonl, .json, .csv or .parquet file.

    Raises CheckpointError for a file that is missing, of another kind, or broken; it names the line.
    """
    if file.suffix not in _READERS:
        raise CheckpointError(file, "is no data file", f"rows are read from {', '.join(KINDS)}")
    try:
        for place, columns in _READERS[file.suffix](file):
            yield row_of(place, columns)
    except UnicodeDecodeError as error:
        raise CheckpointError(file, f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise CheckpointError(
            file, f"cannot be read ({error.strerror or error})", "check the files under data"
        ) from None


def _jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file}:{number}", _parsed(line.rstrip("\r\n"), file, number)


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    """An array of objects; many files with this name hold JSON lines instead, and are read as such."""
    text = file.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _jsonl(file)
        return
    for number, columns in enumerate(_parsed(text, file, 1), 1):
        yield f"{file} row {number}", columns


def _parsed(text: str, file: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{file}:{first_line + error.lineno - 1}"
        raise CheckpointError(place, f"is not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise CheckpointError(f"{file}:{first_line}", "is nested too deeply for a row") from None


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        csv.field_size_limit(_LONGEST_CELL)
        reader = csv.DictReader(lines)
        try:
            for columns in reader:
                place = f"{file}:{reader.line_num}"
                if None in columns:
                    problem = "has more cells than the header has columns"
                    raise CheckpointError(place, problem, "quote cells with commas")
                yield place, columns
        except csv.Error as error:
            raise CheckpointError(f"{file}:{reader.line_num}", f"is not valid CSV: {error}") from None


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowInvalid  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        with ParquetFile(file) as table:
            rows = (columns for batch in table.iter_batches() for columns in batch.to_pylist())
            for number, columns in enumerate(rows, 1):
                yield f"{file} row {number}", columns
    except ArrowInvalid as error:
        raise CheckpointError(file, f"is not valid parquet: {error}") from None


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
KINDS = tuple(_READERS)
