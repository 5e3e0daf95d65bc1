"""safetensors headers: parse, check, build. No tensor is read.

A file is an 8-byte little-endian length N, N bytes of JSON, then the tensors without gaps. The rules below are those of
the official parser (safetensors 0.8, `SafeTensors::read_metadata` and `Metadata::validate`), and stricter in two: no
name stands twice in an object, and a tensor is an object of a dtype by name, a shape and data_offsets, nothing else.
What a file with more means depends on its reader, and a rewrite would lose a part of it.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.opening import open_file

MAX_HEADER_BYTES = 100_000_000
_U64 = 2**64
DTYPE_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "C64": 64},
    **{"U64": 64, "I64": 64, "F64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a header: `start` and `end` are byte offsets from the first byte after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds. `tensors` is in the order of the data; `length` is N, padding included."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    length: int

    @property
    def data_start(self) -> int:
        return 8 + self.length

    @property
    def data_bytes(self) -> int:
        return max((tensor.end for tensor in self.tensors.values()), default=0)


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file against the official rules and the file's own size.

    Raises CheckpointError naming what the file really is (Git LFS pointer, HTML page, pickle) or where it is cut.
    """
    with open_file(path) as (file, size):
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            raise _not_safetensors(path, start + file.read(512), size)
        if size < 8 + length and start.startswith(_ZIP):
            raise _not_safetensors(path, start, size)
        if size < 8 + length:
            raise CheckpointError(path, f"cut inside its header: {size} bytes, the header alone is {8 + length}", _CUT)
        raw = file.read(length)
    header = parse_header(path, raw)
    expected = header.data_start + header.data_bytes
    if size < expected:
        first = next(name for name, tensor in header.tensors.items() if header.data_start + tensor.end > size)
        raise CheckpointError(
            path, f"cut short: {size} of {expected} bytes; the first tensor affected is {first}", _CUT
        )
    if size > expected:
        raise CheckpointError(path, f"{size - expected} bytes follow the last tensor; the file is damaged", _CUT)
    return header


_ZIP = b"PK\x03\x04"
_CUT = "copy, download or save it again"


def _not_safetensors(path: Path, start: bytes, size: int) -> CheckpointError:
    if start.startswith(b"version https://git-lfs"):
        real = re.search(r"^size (\d+)", start.decode(errors="replace"), re.MULTILINE)
        problem = f"a Git LFS pointer; the real file is {real[1] if real else '?'} bytes"
        return CheckpointError(path, problem, "run `git lfs pull`")
    if start.lstrip()[:1] == b"<":
        return CheckpointError(path, "an HTML or XML page, not safetensors", "download the file itself")
    if start.startswith((_ZIP, b"\x80")):
        return CheckpointError(path, "a pickle written by torch.save, not safetensors", "name it pytorch_model.bin")
    if size < 8:
        return CheckpointError(path, f"{size} bytes; a safetensors file has at least 8", _CUT)
    length = int.from_bytes(start[:8], "little")
    return CheckpointError(path, f"not a safetensors file: its header would be {length} bytes long", _CUT)


def parse_header(path: Path, raw: bytes) -> Header:
    """Parse the N bytes of a header; `path` is only named in errors."""
    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"its header is not JSON as the format wants it ({error})", _CUT) from error
    if not isinstance(fields, dict):
        raise CheckpointError(path, "its header is not a JSON object", _CUT)
    metadata = fields.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(path, "__metadata__ in its header is not a map of strings", "save the file again")
    if not is_unicode((*fields, *metadata, *metadata.values())):
        raise CheckpointError(path, "its header has half a surrogate pair in a name or in __metadata__", _CUT)
    tensors = {name: _parse_tensor(path, name, entry) for name, entry in fields.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    end = 0
    for name, tensor in ordered.items():
        if tensor.start != end:
            raise CheckpointError(path, f"{name} starts at byte {tensor.start}, the tensor before ends at {end}", _CUT)
        end = tensor.end
    return Header(ordered, metadata, len(raw))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice} stands twice in it")
    return fields


def _whole(digits: str) -> int:
    if len(digits) > 20 or digits.startswith("-") or int(digits) >= _U64:
        raise ValueError(f"{digits[:30]} is not an unsigned 64-bit number")
    return int(digits)


def is_unicode(texts: Iterable[str]) -> bool:
    """Whether these can be written as UTF-8; JSON and pickles may also hold halves of surrogate pairs."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_tensor(path: Path, name: str, entry: Any) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if dtype in DTYPE_BITS:
            pass
        case _:
            raise CheckpointError(path, f"{name} has no valid dtype, shape and data_offsets in the header", _CUT)
    if len(entry) > 3:
        raise CheckpointError(path, f"{name} has more than dtype, shape and data_offsets in the header", _CUT)
    if not all(type(number) is int for number in (*shape, start, end)):
        raise CheckpointError(path, f"{name} has a shape or offset that is not a whole number", _CUT)
    elements = _product(shape)
    if elements is None or end < start or (end - start) * 8 != elements * DTYPE_BITS[dtype]:
        raise CheckpointError(path, f"{name} is {dtype} {shape} but spans bytes {start} to {end}", _CUT)
    return Tensor(dtype, tuple(shape), start, end)


def _product(shape: Iterable[int]) -> int | None:
    """The number of elements; None once it exceeds 64 bits, whatever follows, before it grows without bound."""
    product = 1
    for length in shape:
        product *= length
        if product >= _U64:
            return None
    return product


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str], length: int | None = None
) -> bytes:
    """The first 8 + N bytes of a file whose data holds `(name, dtype, shape, nbytes)` in this order.

    With `length`, N is exactly that (ValueError when the JSON does not fit); else it is padded to a multiple of 8.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-len(raw) // 8) * 8 if length is None else length
    if len(raw) > length:
        raise ValueError(f"a header of {len(raw)} bytes does not fit in {length}")
    return length.to_bytes(8, "little") + raw.ljust(length)
