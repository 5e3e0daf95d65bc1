"""Tensors of a merged model without a product of low rank: cast, with rows replaced, with a vector added."""

from collections.abc import Iterator, Sequence

from tools.checkpoint.change import Computed, Source, Stored
from tools.lora.floats import widened
from tools.merging.floats import ITEM_BYTES, Matrices, matrix, require_floats, rounded
from tools.merging.low_rank import Block

_BLOCK_BYTES = 1 << 18


def cast(source: Stored, dtype: str) -> Source:
    """The tensor in this dtype, each value rounded once; the stored one where it has it."""
    if source.dtype == dtype:
        return source
    require_floats(source)

    def blocks() -> Iterator[bytes]:
        for raw in raw_blocks(source, _BLOCK_BYTES):
            yield rounded(widened(raw, source.dtype).copy(), dtype)

    nbytes = source.tensor.elements * ITEM_BYTES[dtype]
    return Computed(dtype, source.shape, nbytes, blocks, (source,))


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
        yield raw, rounded(values, dtype)


def with_vectors(weight: Stored, vectors: Sequence[tuple[float, Stored]], read: Matrices) -> Iterator[Block]:
    """The one block of a bias to which these vectors are added, each times its number."""
    raw = weight.read()
    total = widened(raw, weight.dtype).copy()
    for scale, vector in vectors:
        total += total.dtype.type(scale) * read(vector)
    yield raw, rounded(total, weight.dtype)
