# ruff: noqa: TID253 - imported only by the stages, when they train
"""Batches: tokenised rows, packed ones or not, padded on the right to the longest of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tools.training.masking import IGNORED

Row = Mapping[str, Sequence[int]]


def pad(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Rows of different length as one int64 tensor [rows, longest], filled up with `value`."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def mask_of(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """1 on tokens and 0 on padding, int64 [rows, longest]."""
    return pad([[1] * len(row) for row in rows], 0)


@dataclass(frozen=True)
class RowCollator:
    """Rows with `input_ids` and `labels` to `input_ids`, `attention_mask` and `labels`, each int64 [rows, longest].

    Rows with `seq_lengths` are packed: `position_ids`, in the same shape, begin at 0 with every text in them. In one
    `single` row, int64 [1, tokens], for attention that finds packed texts in one row only.
    """

    pad_token_id: int
    single: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        if self.single and "seq_lengths" in rows[0]:
            rows = [{name: [value for row in rows for value in row[name]] for name in rows[0]}]
        tokens = [row["input_ids"] for row in rows]
        batch = {
            "input_ids": pad(tokens, self.pad_token_id),
            "attention_mask": mask_of(tokens),
            "labels": pad([row["labels"] for row in rows], IGNORED),
        }
        if "seq_lengths" in rows[0]:
            positions = [[at for length in row["seq_lengths"] for at in range(length)] for row in rows]
            batch["position_ids"] = pad(positions, 0)  # each token of padding is a text of its own
        return batch


@dataclass(frozen=True)
class PairCollator:
    """Preference pairs to one batch of int64 [2 * pairs, longest]: first every chosen answer, then every rejected."""

    pad_token_id: int

    def __call__(self, pairs: Sequence[Row]) -> dict[str, torch.Tensor]:
        tokens = [pair[side] for side in ("chosen_input_ids", "rejected_input_ids") for pair in pairs]
        return {"input_ids": pad(tokens, self.pad_token_id), "attention_mask": mask_of(tokens)}
