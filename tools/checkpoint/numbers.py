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
    """A tensor of shape [1]: back from what `number_of` said, to the bit."""
    data = struct.pack("<f", value)[2:] if dtype == "BF16" else struct.pack(_FORMATS[dtype], value)
    return Computed(dtype, (1,), len(data), lambda: (data,), ())
