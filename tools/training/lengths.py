"""How long the rows of a dataset are: what is printed before training, and what a model cannot take."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tools.checkpoint.errors import CheckpointError

_RANGES = 6
_BAR = 30  # characters of the longest bar


def histogram(lengths: Sequence[int]) -> list[str]:
    """Some lines of text: how many rows have how many tokens, in ranges that grow by one factor."""
    low, high = min(lengths), max(lengths)
    bounds = [low - 1, *sorted({round(low * (high / low) ** (step / _RANGES)) for step in range(1, _RANGES + 1)})]
    counts = [sum(under < length <= upto for length in lengths) for under, upto in pairwise(bounds)]
    widths = len(str(high)), len(str(max(counts)))
    return [
        f"{under + 1:>{widths[0]}}-{upto:<{widths[0]}} tokens {count:>{widths[1]}} {'#' * _bar(count, counts)}".rstrip()
        for (under, upto), count in zip(pairwise(bounds), counts, strict=True)
    ]


def _bar(count: int, counts: Sequence[int]) -> int:
    return -(-_BAR * count // max(counts))


def require_room(longest: int, place: str, model_config: Any) -> None:
    """Raise CheckpointError when a row of so many tokens has more than the model has positions."""
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        problem = f"has {longest} tokens, but the model has {positions} positions"
        raise CheckpointError(place, problem, f"set data.max_length={positions}, which cuts longer rows")
