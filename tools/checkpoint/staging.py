"""Writing one wanted file: as an edit of the header where no data has to move, else as a new file."""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tools.checkpoint.change import Change, Computed, Content, FileCopy, Source, Stored, TensorFile, TextFile
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.files import copy_range, fsync_folder, is_shared
from tools.checkpoint.layout import Checkpoint, read_weight_file
from tools.checkpoint.opening import open_file

# Above this huggingface_hub no longer reads a header, so a longer one is never made in place.
MAX_EDITED_HEADER_BYTES = 25_000_000


@dataclass(frozen=True)
class HeaderEdit:
    """The first bytes of a file replaced by as many others, and its end cut off; no tensor moves.

    Tensors at the end go with the cut, tensors at the start are swallowed by a longer header, names change in it.
    """

    head: bytes
    size: int


def header_edit(wanted: TensorFile, file: Path) -> HeaderEdit | None:
    """The edit that turns `file` into `wanted`, or None when data would have to move or other readers would mind.

    A symbolic link, a hard link or a blob of the hub cache is shared with somebody, so it is never edited.
    """
    sources = list(wanted.tensors.values())
    if not sources or file.suffix != ".safetensors" or is_shared(file):
        return None
    start = end = None
    for source in sources:
        if not isinstance(source, Stored) or source.file.path != file or end not in (None, source.tensor.start):
            return None
        start, end = (source.tensor.start if start is None else start), source.tensor.end
    assert start is not None
    assert end is not None
    if start > MAX_EDITED_HEADER_BYTES:
        return None
    try:
        return HeaderEdit(wanted.header(start - 8), end)
    except ValueError:  # the new names are longer than the old header has room for
        return None


def write_content(content: Content, target: Path) -> int:
    """Write a new file with this content, flushed to the disk; returns its size in bytes."""
    with target.open("xb") as out:
        match content:
            case TextFile(text):
                out.write(text.encode())
            case FileCopy(source):
                with open_file(source) as (file, size):
                    copy_range(file, 0, size, out)
            case TensorFile() if target.suffix == ".bin":
                _write_bin(content, out)
            case TensorFile():
                out.write(content.header())
                _write_tensors(content.tensors.values(), out)
        out.flush()
        os.fsync(out.fileno())
        return out.tell()


def _write_tensors(sources: Iterable[Source], out: BinaryIO) -> None:
    for source in _runs(sources):
        if isinstance(source, Computed):
            written = sum(out.write(block) for block in source.blocks())
            if written != source.nbytes:
                raise AssertionError(f"{written} bytes computed, {source.nbytes} announced")
        else:
            path, start, end = source
            with path.open("rb") as file:
                copy_range(file, start, end - start, out)


def _runs(sources: Iterable[Source]) -> Iterator[Computed | tuple[Path, int, int]]:
    """Stored tensors that lie one after the other become one byte range `(path, start, end)`."""
    run: tuple[Path, int, int] | None = None
    for source in sources:
        if isinstance(source, Stored) and run and run[0] == source.file.path and run[2] == source.tensor.start:
            run = (run[0], run[1], source.tensor.end)
            continue
        if run:
            yield run
        run = (source.file.path, source.tensor.start, source.tensor.end) if isinstance(source, Stored) else None
        if isinstance(source, Computed):
            yield source
    if run:
        yield run


def _write_bin(content: TensorFile, out: BinaryIO) -> None:
    import torch

    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    dtypes |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
    dtypes |= {"U8": torch.uint8, "BOOL": torch.bool}
    by_range: dict[object, torch.Tensor] = {}
    state = {}
    for name, source in content.tensors.items():
        key = (source.file.path, source.tensor) if isinstance(source, Stored) else name
        if key not in by_range:  # tied weights are one range under two names, and stay so
            data = torch.frombuffer(bytearray(source.read()), dtype=dtypes[source.dtype])
            by_range[key] = data.reshape(source.shape)
        state[name] = by_range[key]
    try:
        torch.save(state, out)
    except RuntimeError as error:  # torch's zip writer hides what the disk said behind a complaint of its own
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def copy_tree(source: Path, target: Path) -> int:
    """Copy a file, or a folder with all in it, links followed and each file flushed; returns the bytes written."""
    if source.is_dir():
        target.mkdir()
        written = sum(copy_tree(entry, target / entry.name) for entry in sorted(source.iterdir()))
        fsync_folder(target)
        return written
    written = write_content(FileCopy(source), target)
    shutil.copymode(source, target)
    return written


def require_space(folder: Path, nbytes: int) -> None:
    """Raise CheckpointError when the file system of `folder` has fewer bytes free."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise CheckpointError(folder, f"needs {nbytes} bytes, and {free} are free", "free some, or choose an --output")


def check_written(folder: Path, change: Change) -> None:
    """Re-open the whole checkpoint, and compare the files that were written with what was wanted."""
    Checkpoint.read(folder)
    for name, content in change.files.items():
        if isinstance(content, TensorFile):
            found = {n: (t.dtype, t.shape) for n, t in read_weight_file(folder / name).tensors.items()}
            wanted = {n: (s.dtype, s.shape) for n, s in content.tensors.items()}
            if found != wanted:
                raise AssertionError(f"{folder / name}: holds other tensors than were written")
