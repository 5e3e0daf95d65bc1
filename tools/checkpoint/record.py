"""A commit record read back: carried out only if a step can have written it, and never outside its checkpoint.

Whoever opens a checkpoint finishes the step that its record describes, so a record that somebody else made by hand
must not reach any other file.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.files import is_shared
from tools.checkpoint.header import is_unicode
from tools.checkpoint.opening import open_file

_REMEDY = "move it away if no step of yours was interrupted here"


def read_record(checkpoint: Path, path: Path) -> Mapping[str, Any]:
    """The record at `path` for the files of `checkpoint`.

    Raises CheckpointError for what no step writes: other operations, other types, names that leave the directory, an
    edit of a file that is shared through a link.
    """
    with open_file(path) as (file, _):
        raw = file.read()
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not a commit record ({error})", _REMEDY) from error
    match record:
        case {
            "receipt": {"id": number, "step": str(), "time": str(), "files": [*files]},
            "gate": gate,
            "gate_returns": bool(),
            "operations": [*operations],
            "forget": [*spent],
        } if all(map(_is_id, (number, *spent))):
            names = [*files, *([] if gate is None else [gate]), *(_checked(path, each) for each in operations)]
        case _:
            raise CheckpointError(path, "not a commit record", _REMEDY)
    for name in names:
        if not is_plain(name):
            raise CheckpointError(path, f"names {name}, which is not a file of this checkpoint", _REMEDY)
    for operation in operations:
        edited = checkpoint / operation["file"]
        if operation["op"] == "edit" and (not edited.is_file() or is_shared(edited)):
            problem = f"edits {edited.name}, which is no file, or one that others hold too"
            raise CheckpointError(path, problem, "put a file in its place that is a copy")
    return dict(record)


def refuse_links(*paths: Path) -> None:
    """Raise CheckpointError if one of these, which Burnish writes to, is a symbolic link to elsewhere."""
    for path in paths:
        if path.is_symlink():
            raise CheckpointError(path, "a symbolic link, which Burnish never makes there", "remove it")


def refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError if something in Burnish's own folder leads elsewhere, or is no folder where one belongs.

    For a caller that holds the lock, so that nothing vanishes meanwhile.
    """
    for inside in ("*", "stage/undo", "stage/*.tail", "undo/*"):
        refuse_links(*folder.glob(inside))
    for path in (folder / "stage", folder / "undo"):
        if path.exists() and not path.is_dir():
            raise CheckpointError(path, "not a directory", "remove it")


def _checked(path: Path, operation: Any) -> Any:
    """The file that an operation names."""
    match operation:
        case {"op": "place" | "remove", "file": name}:
            return name
        case {"op": "edit", "file": name, "head": str(head), "size": int(size)} if 0 <= size < 2**63:
            try:
                base64.b64decode(head, validate=True)
            except ValueError as error:
                raise CheckpointError(path, f"not a commit record ({error})", _REMEDY) from error
            return name
    raise CheckpointError(path, "holds an operation that no step writes", _REMEDY)


def is_receipt(value: Any) -> bool:
    """Whether this is a receipt as a step writes it; undo goes by the names of its files."""
    match value:
        case {"id": number, "step": str(), "time": str(), "files": {**files}} if _is_id(number):
            return all(is_plain(name) and isinstance(known, dict | None) for name, known in files.items())
    return False


def _is_id(number: Any) -> bool:
    return type(number) is int and number > 0


def is_plain(name: Any) -> bool:
    """Whether this names a file in a directory itself: no path, none of Burnish's own."""
    reserved = {"", "..", ".burnish"}
    return isinstance(name, str) and Path(name).name == name and name not in reserved and _can_be_a_name(name)


def _can_be_a_name(name: str) -> bool:
    return "\0" not in name and is_unicode((name,))
