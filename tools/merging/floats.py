"""Stored numbers as float32, and back into the dtype they were stored in: finite ones, of 32 bits or fewer."""

from pathlib import Path
from typing import TYPE_CHECKING

from tools.checkpoint.change import Stored
from tools.checkpoint.errors import CheckpointError
from tools.lora import floats
from tools.lora.floats import numbers

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# What is as large as this becomes infinity: the greatest number of the dtype and half a unit in its last place.
_LIMITS = {"F32": float("inf"), "F16": 65520.0, "BF16": 2.0**128 - 2.0**119}


def rounded(values: "NDArray[float32]", dtype: str, weight: Stored) -> bytes:
    """Float32 values of `weight` as bytes of `dtype`, rounded once; `values` are used up.

    Raises CheckpointError for a value that is no finite number, or none once it is rounded.
    """
    import numpy as np

    limit = _LIMITS[dtype]
    if -limit < values.min() and values.max() < limit:  # false for NaN too
        return floats.rounded(values, dtype)
    if not np.isfinite(values).all():
        raise CheckpointError(
            weight.file.path, f"{weight.name} would hold NaN or infinity", "the training had diverged"
        )
    problem = f"{weight.name} would have numbers that {dtype} cannot hold"
    raise CheckpointError(weight.file.path, problem, "give the base in BF16 or F32")


def matrix(source: Stored) -> "NDArray[float32]":
    """A stored tensor as float32, in its shape.

    Raises CheckpointError for a dtype that is none of these, and for a value that is no finite number.
    """
    import numpy as np

    require_floats(source)
    values = numbers(source)
    if not np.isfinite(values).all():
        raise CheckpointError(source.file.path, f"{source.name} holds NaN or infinity", "the training had diverged")
    return values


class Matrices:
    """Stored tensors as float32; the last four stay in memory, since experts share one."""

    def __init__(self) -> None:
        self._recent: dict[tuple[Path, str], NDArray[float32]] = {}

    def __call__(self, source: Stored) -> "NDArray[float32]":
        key = (source.file.path, source.name)
        if key not in self._recent:
            self._recent[key] = matrix(source)
            if len(self._recent) > 4:
                del self._recent[next(iter(self._recent))]
        return self._recent[key]


def require_floats(source: Stored) -> None:
    """Raise CheckpointError unless the tensor is float32, float16 or bfloat16."""
    if source.dtype not in ITEM_BYTES:
        raise unknown_dtype(source.file.path, source.name, source.dtype)


def unknown_dtype(path: Path, name: str, dtype: str) -> CheckpointError:
    """The error for a tensor whose numbers cannot be computed with here."""
    return CheckpointError(path, f"{name} is {dtype}; only F32, F16 and BF16 are computed with")
