"""One merged tensor: stored numbers plus a product of low rank, in row blocks that fit the cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.checkpoint.change import Stored
from tools.lora.floats import widened
from tools.merging.floats import ITEM_BYTES, Matrices, rounded

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    Floats = NDArray[float32]

_BLOCK_ELEMENTS = 1 << 15

# A block of a tensor as it was, and as it becomes.
Block = tuple[bytes, bytes]


@dataclass(frozen=True)
class LowRank:
    """What an adapter module adds to a stored matrix [out, in]: `scale * B @ A`, with A [r, in] and B [out, r].

    `transposed`: the matrix is stored as [in, out]. `expert` `(e, n)`: A is [n * r, in], expert after expert, B is
    [out, r * n], the experts of one rank side by side (PEFT 0.21, ParamWrapper), and the matrix is that of expert e.
    `outputs`: the matrix holds those from one to the other alone. `magnitude` (DoRA, arXiv:2402.09353): the sum is
    scaled to this norm, output by output.
    """

    a: Stored
    b: Stored
    scale: float
    transposed: bool = False
    expert: tuple[int, int] = (0, 1)
    outputs: tuple[int, int] | None = None
    magnitude: Stored | None = None

    @property
    def sources(self) -> tuple[Stored, ...]:
        return (self.a, self.b, *((self.magnitude,) if self.magnitude else ()))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix it is added to."""
        start, end = self.outputs or (0, self.b.shape[0])
        outputs = end - start
        inputs = self.a.tensor.elements // self.a.shape[0]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def factors(self, read: Matrices) -> "tuple[Floats, Floats]":
        """`left` [rows, r] and `right` [r, columns]."""
        index, count = self.expert
        a, b = read(self.a), read(self.b)
        a = a.reshape(count, a.shape[0] // count, -1)[index]
        start, end = self.outputs or (0, len(b))
        b = b.reshape(len(b), -1, count)[start:end, :, index]
        return (a.T, b.T) if self.transposed else (b, a)


def merged_blocks(weight: Stored, parts: Sequence[Sequence[LowRank]], dtype: str, read: Matrices) -> Iterator[Block]:
    """The blocks of `weight` [parts * rows, columns], to each part of which these changes are added.

    Computed in float32 and rounded once, to `dtype`; at most some blocks and the factors of one part are in memory.
    """
    for number, changes in enumerate(parts):
        merge = _merge_of(weight, number, changes, dtype, read)
        for row, raw in _raw(weight, number, changes[0].shape):
            yield raw, merge(row, raw)


def _merge_of(
    weight: Stored, part: int, changes: Sequence[LowRank], dtype: str, read: Matrices
) -> Callable[[int, bytes], bytes]:
    """The function from the first row of a block and its bytes to the bytes it becomes."""
    import numpy as np

    pairs = [change.factors(read) for change in changes]
    # The scale of a single change multiplies the product, as in PEFT; of several, each its own left factor.
    scales = [1.0] if len(changes) == 1 else [change.scale for change in changes]
    lefts = [left * left.dtype.type(scale) for scale, (left, _) in zip(scales, pairs, strict=True)]
    left = np.concatenate(lefts, axis=1)  # (rows, r), (rows, r') -> (rows, r + r')
    right = np.concatenate([right for _, right in pairs])  # (r, columns), (r', columns) -> (r + r', columns)
    scale = left.dtype.type(changes[0].scale if len(changes) == 1 else 1)

    def summed(row: int, raw: bytes) -> "Floats":
        base = widened(raw, weight.dtype).reshape(-1, right.shape[1])
        total: Floats = left[row : row + len(base)] @ right
        total *= scale
        total += base
        return total

    norm: Callable[[int, Floats], Any] | None = None
    if (magnitude := changes[0].magnitude) is not None:
        sums = (summed(row, raw) for row, raw in _raw(weight, part, changes[0].shape))
        norm = _dora(read(magnitude).reshape(-1), sums if changes[0].transposed else None)

    def merge(row: int, raw: bytes) -> bytes:
        total = summed(row, raw)
        if norm is not None:
            total *= norm(row, total)
        return rounded(total, dtype, weight)

    return merge


def _dora(magnitude: "Floats", transposed: "Iterator[Floats] | None") -> "Callable[[int, Floats], Any]":
    """By which a block [rows, columns] is multiplied; the norms of columns need all blocks of the matrix before."""
    import numpy as np

    if transposed is None:
        return lambda row, sums: (
            magnitude[row : row + len(sums), None] / np.sqrt(np.einsum("ij,ij->i", sums, sums))[:, None]
        )
    squares = np.zeros(len(magnitude), np.float64)
    for sums in transposed:
        squares += np.einsum("ij,ij->j", sums, sums)
    factors = (magnitude / np.sqrt(squares)).astype(np.float32)
    return lambda row, sums: factors


def _raw(weight: Stored, part: int, shape: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
    """The blocks of one part as stored: the row within the part, and bytes of whole rows."""
    rows, columns = shape
    row_bytes = columns * ITEM_BYTES[weight.dtype]
    step = max(1, _BLOCK_ELEMENTS // columns)
    with weight.file.path.open("rb") as file:
        file.seek(weight.tensor.start + part * rows * row_bytes)
        for row in range(0, rows, step):
            yield row, file.read(min(step, rows - row) * row_bytes)
