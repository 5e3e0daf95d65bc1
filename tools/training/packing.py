"""Packing: several rows in one sequence of `max_length`, so that little of a batch is padding."""

from bisect import bisect_left, insort
from collections.abc import Sequence

from tools.training.masking import IGNORED

Columns = dict[str, list[int]]


def pack(rows: Sequence[Columns], max_length: int) -> list[Columns]:
    """Sequences of at most `max_length` tokens: `input_ids` and `labels` [tokens], `seq_lengths` [rows in it].

    Whole rows only, each put where it fills a sequence best, the longest first. The first token of a row has no label:
    what stands before it belongs to another one.
    """
    return [_joined([rows[index] for index in group]) for group in _fitted([_length(row) for row in rows], max_length)]


def _length(row: Columns) -> int:
    return len(row["input_ids"])


def _joined(rows: Sequence[Columns]) -> Columns:
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in (IGNORED, *row["labels"][1:])],
        "seq_lengths": [_length(row) for row in rows],
    }


def _fitted(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit, decreasing: groups of indices whose lengths add up to `capacity` at most."""
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is free in a group, and its number; sorted
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        at = bisect_left(room, (length, 0))
        if at < len(room):
            free, number = room.pop(at)
        else:
            free, number = capacity, len(groups)
            groups.append([])
        groups[number].append(index)
        if free > length:
            insort(room, (free - length, number))
    return groups
