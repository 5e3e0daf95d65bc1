"""What a directory holds, for comparing it before and after."""

import hashlib
from pathlib import Path

FOLDER = ".burnish"


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by its path within the folder, without Burnish's own records."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and FOLDER not in path.relative_to(folder).parts
    }


def state(folder: Path) -> dict[str, tuple[str, int]]:
    """SHA-256 and mtime of every file, Burnish's own records included."""
    return {
        path.relative_to(folder).as_posix(): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
