"""What a `.bin` file written by torch.save holds: names, dtypes, shapes and byte ranges. Nothing in it is executed.

A `.bin` is an uncompressed zip: one pickle that describes the tensors, and one entry for each storage. The unpickler
below knows the few names such a description needs and refuses every other, so no code of the file runs.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import DTYPE_BITS, Tensor

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


@dataclass(frozen=True)
class _Storage:
    dtype: str
    start: int
    nbytes: int


class _Refused(Exception):
    """The pickle names something a plain state dict does not need."""


def read_bin(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a state dict written by torch.save; `start` and `end` are byte offsets in the file itself.

    Raises CheckpointError for files in torch's format before 1.6, for pickles that are no plain map of contiguous
    tensors, and for anything that names a class or function outside the few that tensors need.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            description = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
            if description is None:
                raise CheckpointError(path, "a zip file without the data.pkl that torch.save writes", "save it again")
            folder = description.removesuffix("data.pkl")
            state = _Unpickler(archive, file, folder).load()
    except OSError as error:
        raise CheckpointError(path, (error.strerror or str(error)).lower()) from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            path, "not a zip file as torch.save writes since 1.6, or cut short", "save it again"
        ) from error
    except _Refused as error:
        raise CheckpointError(path, f"its pickle needs {error}; only plain tensors are read") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(path, f"its pickle is damaged ({error})", "save it again") from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) and type(n) is str for n, t in state.items()):
        raise CheckpointError(path, "its pickle is not a map from names to tensors")
    return state


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, file: io.BufferedReader, folder: str):
        super().__init__(io.BytesIO(archive.read(folder + "data.pkl")))
        self.archive, self.file, self.folder = archive, file, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in _REBUILDERS:
            return _REBUILDERS[name]
        if module in {"torch", "torch.storage"} and name in STORAGES:
            return STORAGES[name]
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, elements = pid
        if kind != "storage" or dtype not in DTYPE_BITS:
            raise _Refused(f"a persistent {kind}")
        entry = self.archive.getinfo(f"{self.folder}data/{key}")
        nbytes = elements * DTYPE_BITS[dtype] // 8
        if entry.compress_type != zipfile.ZIP_STORED or nbytes > entry.file_size:
            raise _Refused(f"a compressed or incomplete storage {key}")
        self.file.seek(entry.header_offset + 26)
        name_bytes, extra_bytes = struct.unpack("<HH", self.file.read(4))
        return _Storage(dtype, entry.header_offset + 30 + name_bytes + extra_bytes, nbytes)


def _rebuild_tensor(storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    expected: list[int] = []
    size = 1
    for length in reversed(shape):
        expected.insert(0, size)
        size *= length
    if any(s != e for s, e, n in zip(stride, expected, shape, strict=True) if n > 1):
        raise _Refused("a tensor that is not contiguous")
    width = DTYPE_BITS[storage.dtype] // 8
    if offset < 0 or (offset + size) * width > storage.nbytes:
        raise _Refused("a tensor beyond its storage")
    start = storage.start + offset * width
    return Tensor(storage.dtype, tuple(shape), start, start + size * width)


def _rebuild_parameter(data: Tensor, *_: Any) -> Tensor:
    return data


_REBUILDERS: dict[str, Callable[..., Tensor]] = {
    "_rebuild_tensor_v2": _rebuild_tensor,
    "_rebuild_parameter": _rebuild_parameter,
}
