"""Stored tensors as arrays: their bits for what only moves, their numbers for what is computed.

numpy knows no bfloat16: it is the upper half of a float32, so it is widened by a shift and rounded on the bits.
"""

from typing import TYPE_CHECKING, Any

from tools.checkpoint.change import Computed, Source, Stored
from tools.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIGN_BIT = {"F64": 1 << 63, "F32": 1 << 31, "F16": 1 << 15, "BF16": 1 << 15}
_BITS = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2"}
_NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
# The greatest number there is.
_GREATEST = {"F64": 1.7976931348623157e308, "F32": 3.4028234663852886e38, "F16": 65504.0, "BF16": 3.3895313892515355e38}
# The relative error of one rounding.
EPSILON = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}


def precision(source: Source) -> float:
    """The relative error of the coarsest rounding that the numbers show: bf16 factors are often stored as float32."""
    import numpy as np

    if source.dtype == "F32":
        raw = source.read()
        if not (np.frombuffer(raw, "<u4") & 0xFFFF).any():
            return EPSILON["BF16"]
        values = widened(raw, "F32")
        with np.errstate(over="ignore"):
            if np.array_equal(values.astype("<f2").astype(np.float32), values):
                return EPSILON["F16"]
    return EPSILON[source.dtype]


def require_floats(source: Stored) -> None:
    """Raise CheckpointError unless the tensor is of a dtype that can be computed with here."""
    if source.dtype not in _BITS:
        problem = f"{source.name} is {source.dtype} {list(source.shape)}; only floating-point matrices can be converted"
        raise CheckpointError(source.file.path, problem)


def bits(source: Source) -> "NDArray[Any]":
    """The tensor as unsigned integers of its width, in its shape."""
    import numpy as np

    return np.frombuffer(source.read(), dtype=_BITS[source.dtype]).reshape(source.shape)


def negated(values: "NDArray[Any]", dtype: str) -> "NDArray[Any]":
    """Bits of numbers with their sign turned."""
    turned: NDArray[Any] = values ^ values.dtype.type(SIGN_BIT[dtype])
    return turned


def numbers(source: Source) -> "NDArray[Any]":
    """The tensor in float32, or float64 when it is stored so, in its shape; exact."""
    return widened(source.read(), source.dtype).reshape(source.shape)


def widened(raw: bytes, dtype: str) -> "NDArray[Any]":
    """Little-endian bytes as a vector of float32, or of float64 when they are; new or read-only, exact."""
    import numpy as np

    if dtype == "BF16":
        wide = np.frombuffer(raw, "<u2").astype("<u4")
        wide <<= 16
        return wide.view(np.float32)
    values: NDArray[Any] = np.frombuffer(raw, _NUMBERS[dtype])
    return values if dtype == "F64" else values.astype(np.float32, copy=False)


def rounded(values: "NDArray[Any]", dtype: str) -> bytes:
    """Numbers as bytes of `dtype`, each rounded once to the nearest, ties to even; `values` are used up.

    Not for NaN, of which some would carry over into the sign.
    """
    import numpy as np

    if dtype != "BF16":
        return values.astype(_NUMBERS[dtype], copy=False).tobytes()
    wide = np.ascontiguousarray(values, "<f4").view("<u4")
    odd = wide >> 16
    odd &= 1
    odd += 0x7FFF
    wide += odd
    wide >>= 16
    return wide.astype("<u2").tobytes()


def fitting(values: "NDArray[Any]", dtype: str, source: Stored) -> bytes:
    """What `rounded` makes of them. Raises CheckpointError, with the name of the tensor that they come from, when one
    is no finite number of this dtype."""
    import numpy as np

    greatest = float(np.abs(values).max(initial=0))
    if not greatest <= _GREATEST[dtype]:
        what = "NaN or infinity" if not np.isfinite(greatest) else f"{greatest:.3g}"
        problem = f"{source.name} would hold {what} in {dtype}"
        raise CheckpointError(source.file.path, problem, "had the training diverged, or is the scale too large?")
    return rounded(values, dtype)


def computed(values: "NDArray[Any]", dtype: str, sources: tuple[Stored, ...]) -> Computed:
    """A tensor of these numbers, computed from `sources`."""
    data = rounded(values, dtype)
    return Computed(dtype, tuple(values.shape), len(data), lambda: (data,), sources)
