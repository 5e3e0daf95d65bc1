"""Tensors of a merged model without a product of low rank: replaced, in whole or by rows, or with a vector added."""

from collections.abc import Iterator, Sequence

from tools.checkpoint.change import Computed, Source, Stored
from tools.lora.floats import widened
from tools.merging.floats import ITEM_BYTES, Matrices, matrix, rounded
from tools.merging.low_rank import Block

_BLOCK_BYTES = 1 << 18


def replaced(weight: Stored | None, source: Stored, dtype: str) -> Iterator[Block]:
    """The blocks of a tensor, None for a new one, that `source` takes the place of, each value rounded once."""
    step = _BLOCK_BYTES // 4
    before = raw_blocks(weight, step * ITEM_BYTES[weight.dtype]) if weight else iter(())
    for raw in raw_blocks(source, step * ITEM_BYTES[source.dtype]):
        yield next(before, b""), rounded(widened(raw, source.dtype).copy(), dtype, source)


def finite(source: Stored) -> Source:
    """The tensor as it is; raises CheckpointError when it is written and holds NaN or infinity."""
    if source.dtype not in ITEM_BYTES:
        return source

    def blocks() -> Iterator[bytes]:
        return (new for _, new in replaced(None, source, source.dtype))

    return Computed(source.dtype, source.shape, source.nbytes, blocks, (source,))


def raw_blocks(source: Stored, size: int) -> Iterator[bytes]:
    """The bytes of a stored tensor, `size` at a time."""
    with source.file.path.open("rb") as file:
        file.seek(source.tensor.start)
        for start in range(0, source.nbytes, size):
            yield file.read(min(size, source.nbytes - start))


def with_rows(weight: Stored, indices: Sequence[int], rows: Stored, dtype: str) -> Iterator[Block]:
    """The blocks of a matrix [n, hidden] in `dtype` after row `indices[i]` became row i of `rows`."""
    new = dict(zip(indices, matrix(rows), strict=True))
    hidden = weight.shape[1]
    step = max(1, _BLOCK_BYTES // (hidden * 4))
    blocks = raw_blocks(weight, step * hidden * ITEM_BYTES[weight.dtype])
    for first, raw in zip(range(0, weight.shape[0], step), blocks, strict=True):
        values = widened(raw, weight.dtype).reshape(-1, hidden).copy()
        for row in new.keys() & set(range(first, first + len(values))):
            values[row - first] = new[row]
        yield raw, rounded(values, dtype, weight)


def with_vectors(weight: Stored, vectors: Sequence[tuple[float, Stored]], read: Matrices) -> Iterator[Block]:
    """The one block of a bias to which these vectors are added, each times its number."""
    raw = weight.read()
    total = widened(raw, weight.dtype).copy()
    for scale, vector in vectors:
        total += total.dtype.type(scale) * read(vector)
    yield raw, rounded(total, weight.dtype, weight)
