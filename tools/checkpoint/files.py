"""Bytes that reach the disk: copies inside the kernel, flushed writes, flushed folders."""

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 256 << 10
# What link says where the file system has no hard links, or allows this file no more.
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
# What the kernel copies in one call. Each is on its way to the disk while the next is copied.
_RANGE_BYTES = 64 << 20
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
            length = min(nbytes - done, _RANGE_BYTES)
            copied = os.copy_file_range(file.fileno(), out.fileno(), length, start + done)
            if copied == 0:
                break
            done += copied
            begin_flush(out, copied)
    except AttributeError:
        return 0
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    return done


def same_range(one: Path, start: int, other: Path, other_start: int, nbytes: int) -> bool:
    """Whether two files hold the same bytes there, read in blocks."""
    with one.open("rb") as file, other.open("rb") as second:
        file.seek(start)
        second.seek(other_start)
        for left in range(nbytes, 0, -_BLOCK_BYTES):
            block = file.read(min(left, _BLOCK_BYTES))
            if len(block) < min(left, _BLOCK_BYTES) or block != second.read(len(block)):
                return False
    return True


def begin_flush(out: BinaryIO, nbytes: int) -> None:
    """Let the disk begin with the last `nbytes` written, so that the flush at the end of the file has less to wait for.

    Nothing is durable by this. Linux starts to write out pages that are said to be of no more use.
    """
    if hasattr(os, "posix_fadvise"):
        end = os.lseek(out.fileno(), 0, os.SEEK_CUR)
        os.posix_fadvise(out.fileno(), end - nbytes, nbytes, os.POSIX_FADV_DONTNEED)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk; its name is durable once its folder is flushed too."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes) -> None:
    """Replace a small file as a whole, making its folder: after a crash it is the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    write_synced(draft, data)
    draft.replace(path)
    fsync_folder(path.parent)


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


def link(file: Path, other: Path) -> bool:
    """Give a file a second name; whether the file system could."""
    try:
        os.link(file, other, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


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
