"""What a `.bin` file written by torch.save holds: names, dtypes, shapes and byte ranges. Nothing in it is executed.

A `.bin` is an uncompressed zip: one pickle that describes the tensors, and one entry for each storage. A pickle is a
program for a stack machine. The one below has the few instructions and names that such a description needs and refuses
every other, so a file can neither run code nor ask for more time or memory than its length explains.
"""

import io
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import DTYPE_BITS, Tensor, is_unicode
from tools.checkpoint.opening import open_file

_MAX_DESCRIPTION_BYTES = 25_000_000  # some 80,000 tensors
_MAX_DIMENSIONS = 64
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
_DTYPES = frozenset(STORAGES.values())


@dataclass(frozen=True)
class _Storage:
    dtype: str
    start: int
    nbytes: int


class _Refused(Exception):
    """The pickle names something a plain state dict does not need."""


# What the machine raises for a program that does not fit its stack, and zipfile and pickletools for broken bytes.
_DAMAGED = (
    zipfile.BadZipFile,
    EOFError,
    IndexError,
    KeyError,
    NotImplementedError,
    TypeError,
    ValueError,
    struct.error,
)


def read_bin(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a state dict written by torch.save; `start` and `end` are byte offsets in the file itself.

    Raises CheckpointError for pickles that are no plain map of contiguous tensors, and for anything that names a class
    or function outside the few that tensors need.
    """
    with open_file(path) as (file, size):
        try:
            old = file.read(len(_OLD_START)) == _OLD_START
            archive = None if old else _Archive(file)
        except _DAMAGED as error:
            raise CheckpointError(path, "not a file as torch.save writes it, or cut short", "save it again") from error
        if archive and archive.folder is None:
            raise CheckpointError(path, "a zip file without the data.pkl that torch.save writes", "save it again")
        try:
            state = _run(archive.description(), archive.storage) if archive else _read_old(file, size)
        except _Refused as error:
            raise CheckpointError(path, f"its pickle needs {error}; only plain tensors are read") from error
        except _DAMAGED as error:
            raise CheckpointError(path, f"its pickle is damaged ({error})", "save it again") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(path, "its pickle is not a map from names to tensors")
    if not is_unicode(state):
        raise CheckpointError(path, "has half a surrogate pair in a name", "save it again")
    return state


class _Archive:
    """The entries of a zip file as byte ranges; `folder` is the one that holds data.pkl, with its slash."""

    def __init__(self, file: BinaryIO):
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        self.file = file
        self.entries = {entry.filename: entry for entry in entries}
        if len(self.entries) < len(entries):
            raise zipfile.BadZipFile("an entry is there twice")
        descriptions = [name for name in self.entries if name.endswith("/data.pkl")]
        self.folder = descriptions[0].removesuffix("data.pkl") if len(descriptions) == 1 else None

    def range(self, name: str) -> tuple[int, int]:
        """Where the bytes of an entry start and end in the file."""
        entry = self.entries[f"{self.folder}{name}"]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise _Refused(f"a compressed {name}")
        self.file.seek(max(entry.header_offset, 0))
        signature, name_bytes, extra_bytes = struct.unpack("<4s22xHH", self.file.read(30))
        start = entry.header_offset + 30 + name_bytes + extra_bytes
        end = start + entry.file_size
        if signature != b"PK\x03\x04" or end > os.fstat(self.file.fileno()).st_size:
            raise ValueError(f"{name} is not where the zip file says")
        return start, end

    def description(self) -> bytes:
        start, end = self.range("data.pkl")
        if end - start > _MAX_DESCRIPTION_BYTES:
            raise ValueError(f"it is {end - start} bytes long")
        self.file.seek(start)
        return self.file.read(end - start)

    def storage(self, persistent: Any) -> _Storage:
        match persistent:
            case ("storage", str(dtype), str(key), _, int(elements)) if dtype in _DTYPES and elements >= 0:
                start, end = self.range(f"data/{key}")
                nbytes = elements * DTYPE_BITS[dtype] // 8
                if start + nbytes > end:
                    raise _Refused(f"an incomplete storage {key}")
                return _Storage(dtype, start, nbytes)
        raise _Refused("an unknown kind of storage")


# The pickle of the magic number with which torch.save began its files before 1.6.
_OLD_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def _read_old(file: BinaryIO, size: int) -> Any:
    """The state dict of a file in the format before torch 1.6.

    Five pickles: a magic number, a version, what machine it was, the description, the keys of the storages; then each
    storage, its number of elements (8 bytes) before it. So the description is read twice: for the dtypes of the
    storages, and once it is known where they lie, for the tensors.
    """
    import pickletools

    file.seek(0)
    pickles = io.BytesIO(file.read(_MAX_DESCRIPTION_BYTES))
    for _ in range(3):
        for _ in pickletools.genops(pickles):
            pass
    begin = pickles.tell()
    found: dict[str, _Storage] = {}

    def note(persistent: Any) -> _Storage:
        match persistent:
            case ("storage", str(dtype), str(key), _, int(elements), None) if dtype in _DTYPES and elements >= 0:
                return found.setdefault(key, _Storage(dtype, 0, elements * DTYPE_BITS[dtype] // 8))
        raise _Refused("an unknown kind of storage")

    _run(pickles, note)
    keys = _run(pickles, note)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or sorted(keys) != sorted(found):
        raise ValueError("its storages are not those that its tensors need")
    start = pickles.tell()
    for key in keys:
        storage = found[key]
        file.seek(start)
        if int.from_bytes(file.read(8), "little") * DTYPE_BITS[storage.dtype] // 8 != storage.nbytes:
            raise ValueError(f"storage {key} has another length than its tensors need")
        found[key] = _Storage(storage.dtype, start + 8, storage.nbytes)
        start += 8 + storage.nbytes
    if start > size:
        raise EOFError(f"cut short: {size} of {start} bytes")
    pickles.seek(begin)
    return _run(pickles, note)


def _run(program: bytes | io.BytesIO, storage_of: Callable[[Any], _Storage]) -> Any:
    """What the program leaves on the stack. Time and memory grow with its length alone."""
    import pickletools

    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(program):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" as name:
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_TUPLE" | "EMPTY_DICT" | "EMPTY_LIST" as name:
                stack.append({"EMPTY_TUPLE": (), "EMPTY_DICT": {}, "EMPTY_LIST": []}[name])
            case "APPEND" | "APPENDS" as name:
                _append(_popped(stack, -1 if name == "APPEND" else marks.pop()), stack[-1])
            case "GLOBAL":
                stack.append(_known(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                stack.append(_known(".".join(_popped(stack, -2))))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(_popped(stack, marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(_popped(stack, -int(name[-1]))))
            case "SETITEM" | "SETITEMS" as name:
                _set_items(_popped(stack, -2 if name == "SETITEM" else marks.pop()), stack[-1])
            case "BINPERSID":
                stack.append(storage_of(stack.pop()))
            case "REDUCE":
                stack.append(_called(*_popped(stack, -2)))
            case "BUILD":  # attributes of a state dict itself: versions of its modules
                _popped(stack, -1)
                _set_items([], stack[-1])
            case "STOP":
                return stack.pop()
            case name:
                raise _Refused(f"the instruction {name}")


def _popped(stack: list[Any], start: int) -> list[Any]:
    if start < -len(stack):
        raise IndexError("it takes more from its stack than is there")
    items = stack[start:]
    del stack[start:]
    return items


def _append(items: list[Any], target: Any) -> None:
    if not isinstance(target, list):
        raise TypeError("not a list")
    target.extend(items)


def _set_items(items: list[Any], target: Any) -> None:
    keys, values = items[::2], items[1::2]
    if not isinstance(target, dict) or not all(isinstance(key, str) for key in keys):
        raise TypeError("not a map of names")
    target.update(zip(keys, values, strict=True))


def _known(name: str) -> Any:
    """What stands for a global: a dtype for a storage class, one of the functions below."""
    if name not in _GLOBALS:
        raise _Refused(name)
    return _GLOBALS[name]


def _called(function: Any, arguments: Any) -> Any:
    if function not in (_empty_map, _rebuild_tensor, _rebuild_parameter) or not 0 <= len(arguments) < 10:
        raise TypeError("it calls what is no function")
    return function(*arguments)


def _empty_map() -> dict[str, Any]:
    return {}


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    if not isinstance(storage, _Storage) or not len(shape) == len(stride) <= _MAX_DIMENSIONS:
        raise TypeError("a tensor without storage, shape and stride")
    if not all(type(number) is int and number >= 0 for number in (offset, *shape, *stride)):
        raise TypeError("an offset, shape or stride that is not a whole number")
    width = DTYPE_BITS[storage.dtype] // 8
    elements = 0 if 0 in shape else 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if elements and length > 1 and step != elements:
            raise _Refused("a tensor that is not contiguous")
        elements *= length
    if (offset + elements) * width > storage.nbytes:
        raise _Refused("a tensor beyond its storage")
    start = storage.start + offset * width
    return Tensor(storage.dtype, tuple(shape), start, start + elements * width)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


_GLOBALS = {
    "collections.OrderedDict": _empty_map,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    **{f"{module}.{name}": dtype for module in ("torch", "torch.storage") for name, dtype in STORAGES.items()},
}
