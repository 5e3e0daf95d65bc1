"""Where a model that is named as on the Hugging Face hub lies on this machine."""

import os.path
from pathlib import Path


def local_copy(name_or_path: str | Path) -> Path | None:
    """The directory itself, or the snapshot of that name in the hub's cache; None when it is neither.

    The network is never asked: what a training loaded is in the cache.
    """
    if (folder := _directory(name_or_path)) is not None:
        return folder
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:  # without the library nothing can have been loaded by name
        return None
    try:
        return Path(snapshot_download(str(name_or_path), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def lasting_name(name_or_path: str | Path) -> str:
    """What to call a model in a file that is read elsewhere: a directory by its whole path, any other name as it is."""
    folder = _directory(name_or_path)
    return os.path.abspath(folder) if folder is not None else str(name_or_path)  # noqa: PTH100 - follows no link


def _directory(name_or_path: str | Path) -> Path | None:
    try:
        path = Path(name_or_path).expanduser()
        return path if path.is_dir() else None
    except (RuntimeError, OSError):  # the home of nobody, or a name longer than any file's
        return None
