"""Opening a file to read it: a regular file, or a CheckpointError that says why not."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tools.checkpoint.errors import CheckpointError


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The opened file and its size in bytes; whatever the system refuses, here or while it is read, is named.

    A pipe would wait for a writer and a device might act, so neither is opened.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "a pipe, socket or device"
            raise CheckpointError(path, f"{what}, not a file")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(path, (error.strerror or str(error)).lower()) from error
