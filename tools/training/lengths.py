"""How long the rows of a dataset are: what is printed before training, and what a model cannot take."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tools.checkpoint.errors import CheckpointError

_BINS = 6
_BAR = 30  # characters of the longest bar


def histogram(lengths: Sequence[int]) -> list[str]:
    """Some lines of text: how many rows have how many tokens, in ranges that grow by powers of two."""
    top = max(lengths).bit_length()
    first = max(min(lengths).bit_length() - 1, top - _BINS, 0)
    bounds = [0, *(2**power for power in range(first + 1, top + 1))]
    counts = [sum(low < length <= high for length in lengths) for low, high in pairwise(bounds)]
    while len(counts) > 1 and not counts[-1]:
        counts.pop()
    widths = len(str(bounds[len(counts)])), len(str(max(counts)))
    return [
        f"{low + 1:>{widths[0]}}-{high:<{widths[0]}} tokens {count:>{widths[1]}} {'#' * _bar(count, counts)}".rstrip()
        for (low, high), count in zip(pairwise(bounds), counts, strict=False)
    ]


def _bar(count: int, counts: Sequence[int]) -> int:
    return -(-_BAR * count // max(counts))


def require_room(longest: int, place: str, model_config: Any) -> None:
    """Raise CheckpointError when a row of so many tokens has more than the model has positions."""
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        problem = f"has {longest} tokens, but the model has {positions} positions"
        raise CheckpointError(place, problem, f"set data.max_length={positions}, which cuts longer rows")
