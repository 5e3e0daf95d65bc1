"""Bytes that reach the disk: copies inside the kernel, flushed writes, flushed folders."""

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 256 << 10
# What copy_file_range says where it cannot, rather than where the copy failed.
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPERM}


def copy_range(file: BinaryIO, start: int, nbytes: int, out: BinaryIO) -> None:
    """Write `nbytes` of one file where another stands, inside the kernel where it can (shared blocks on btrfs, xfs)."""
    out.flush()
    at = out.tell()
    done = _copy_in_kernel(file, start, nbytes, out)
    out.seek(at + done)
    file.seek(start + done)
    while done < nbytes:
        block = file.read(min(_BLOCK_BYTES, nbytes - done))
        if not block:
            raise OSError(errno.EIO, f"ended {nbytes - done} bytes early", file.name)
        out.write(block)
        done += len(block)


def _copy_in_kernel(file: BinaryIO, start: int, nbytes: int, out: BinaryIO) -> int:
    """The bytes copied: all of them, or fewer where the kernel or the file system does not offer it (macOS, NFS 3)."""
    done = 0
    try:
        while done < nbytes:
            copied = os.copy_file_range(file.fileno(), out.fileno(), nbytes - done, start + done)
            if copied == 0:
                break
            done += copied
    except AttributeError:
        return 0
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    return done


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk; its name is durable once its folder is flushed too."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not flush folders
            raise
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def make_folder(folder: Path) -> None:
    """Create a folder and what is missing above it, so that it survives a power cut."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def is_there(path: Path) -> bool:
    """Whether the name is taken, be it by a link to nowhere; a disk that fails to say raises OSError and is no "no"."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_shared(file: Path) -> bool:
    """Whether somebody may hold the same bytes under another name: a symbolic or hard link, a blob of a cache."""
    return file.is_symlink() or file.stat().st_nlink > 1
