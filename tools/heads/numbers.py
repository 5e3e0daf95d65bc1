"""A tensor of one number: read as a float, and made of one, exactly."""

import struct

from tools.checkpoint.change import Computed, Stored
from tools.checkpoint.errors import CheckpointError

_FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e"}


def number_of(source: Stored) -> float:
    """The one element of a stored tensor. Raises CheckpointError for a dtype that is none of the usual floats."""
    raw = source.read()
    if source.dtype == "BF16":
        raw = bytes(2) + raw
    elif source.dtype not in _FORMATS:
        raise CheckpointError(source.file.path, f"{source.name} is {source.dtype}, not a plain float")
    return float(struct.unpack(_FORMATS.get(source.dtype, "<f"), raw)[0])


def constant(dtype: str, value: float) -> Computed:
    """A tensor of shape [1]: back from what `number_of` said, to the bit.

    Where this dtype does not hold the number as it is, it is F32, or F64 where that does not either.
    """
    dtype, data = next((each, data) for each in (dtype, "F32", "F64") if (data := _packed(each, value)) is not None)
    return Computed(dtype, (1,), len(data), lambda: (data,), ())


def _packed(dtype: str, value: float) -> bytes | None:
    """The bytes of a number, None where the dtype is no plain float or does not hold it exactly."""
    code = "<f" if dtype == "BF16" else _FORMATS.get(dtype)
    try:
        data = struct.pack(code, value) if code else b""
    except OverflowError:
        return None
    if not code or struct.unpack(code, data)[0] != value:
        return None
    if dtype != "BF16":
        return data
    return data[2:] if data[:2] == bytes(2) else None
