"""Where rows come from: a file, a directory of files, a saved dataset, or a dataset of the Hugging Face hub."""

import hashlib
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.training.rows import KINDS, Row, read_rows, row_of

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.%\[\]:-]+)?")
_SAVED = "state.json"  # what datasets' save_to_disk puts beside the rows


def source_of(text: str | Path) -> Path | str:
    """A path, or the name of a dataset on the hub: `OWNER/NAME` or `OWNER/NAME:SPLIT`.

    What exists here, ends like a data file, or lies in a directory that exists, is a path; it is never looked up on the
    hub.
    """
    path = Path(text).expanduser()
    if isinstance(text, Path) or not _HUB_NAME.fullmatch(text):
        return path
    return path if path.exists() or path.suffix in KINDS or path.parent.is_dir() else text


def read_source(source: Path | str, *, split: str, subset: str | None = None, limit: int | None = None) -> list[Row]:
    """The first `limit` rows (all by default), each with its place.

    `split` is read of a dataset of the hub that names none, `subset` chooses among its configurations. Raises
    CheckpointError for what is missing, of another kind, broken, or empty.
    """
    if isinstance(source, str):
        rows = _from_hub(source, split, subset)
    elif subset is not None:
        raise CheckpointError("data.subset", f"is of a dataset on the hub, which {source} is not", "leave it out")
    else:
        rows = chain.from_iterable(map(_rows_of, _parts(source)))
    read = list(islice(rows, limit))
    if not read:
        raise CheckpointError(source, "has no rows")
    return read


def digest(source: Path) -> str:
    """SHA-256 of a file, or of the names and contents of the files that `read_source` reads of a directory."""
    total = hashlib.sha256()
    for part in _parts(source):
        files = sorted(part.glob("*.arrow")) if part.is_dir() else [part]
        for file in files:
            try:
                with file.open("rb") as stream:
                    content = hashlib.file_digest(stream, "sha256")
            except OSError as error:
                problem = f"cannot be read ({error.strerror})"
                raise CheckpointError(file, problem, "check the files under data") from None
            if file == source:
                return f"sha256:{content.hexdigest()}"
            total.update(f"{file.relative_to(source)} {content.hexdigest()}\n".encode())
    return f"sha256:{total.hexdigest()}"


def _parts(source: Path) -> list[Path]:
    """The data files under a directory in the order of their names; a file, or a saved dataset, is itself the only one.

    Hidden files and those of other kinds, as a README, hold no rows.
    """
    if not source.exists():
        raise CheckpointError(source, "not found", "check the files under data")
    if not source.is_dir() or (source / _SAVED).is_file():
        return [source]
    if (source / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(folder.name for folder in source.iterdir() if folder.is_dir()))
        raise CheckpointError(source, f"holds several splits ({splits})", "name the directory of one of them")
    inside = sorted(path for path in source.rglob("*") if path.suffix in KINDS and path.is_file())
    files = [path for path in inside if not any(part.startswith(".") for part in path.relative_to(source).parts)]
    if not files:
        raise CheckpointError(source, "holds no data file", f"rows are read from {', '.join(KINDS)}")
    return files


def _rows_of(part: Path) -> Iterator[Row]:
    if not part.is_dir():
        return read_rows(part)
    from datasets import load_from_disk

    return _numbered(load_from_disk(str(part)), str(part))


def _from_hub(source: str, split: str, subset: str | None) -> Iterator[Row]:
    from datasets import load_dataset

    name, _, own_split = source.partition(":")
    try:
        dataset = load_dataset(name, subset, split=own_split or split)
    except (OSError, ValueError) as error:  # nothing here of that name, no network, another split or subset
        reason = str(error).strip().partition("\n")[0]
        remedy = "give a file that is here, or OWNER/NAME:SPLIT of a dataset that the hub has"
        raise CheckpointError(source, f"is no file here, and does not load from the hub ({reason})", remedy) from error
    return _numbered(dataset, source)


def _numbered(dataset: Any, source: str) -> Iterator[Row]:
    return (row_of(f"{source} row {number}", columns) for number, columns in enumerate(dataset, 1))
