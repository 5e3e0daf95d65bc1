"""Packing against padding on a CPU: tokens per second of processor time, on the demo's rows and model.

`python benchmarks/packing.py` trains every weight on the same rows, padded and packed in turn, and prints by how much
packing is faster. What it can gain is the padding it leaves out: padded tokens / real tokens.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.training.collate import RowCollator
from tools.training.config import DataArguments, ModelArguments
from tools.training.data import load_sft
from tools.training.isolation import isolate
from tools.training.model import load_decoder, load_tokenizer
from tools.training.packing import pack

PAIRS = 3
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """Batches of one kind, and how many of their tokens are real."""

    batches: list[Batch]

    @property
    def real(self) -> int:
        return sum(int(batch["attention_mask"].sum()) for batch in self.batches)

    @property
    def all(self) -> int:
        return sum(batch["input_ids"].numel() for batch in self.batches)

    def tokens_per_second(self, model: Any) -> float:
        """Forward and backward over every batch, as the Trainer runs them."""
        began = time.process_time()
        for batch in self.batches:
            model(**batch, use_cache=False).loss.backward()
            model.zero_grad()
        return self.real / (time.process_time() - began)


def main() -> None:
    """Measure alternating pairs, after one untimed; print the ratio and what it could be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=".demo/model")
    parser.add_argument("--data", type=Path, default=Path("examples/data/instructions.jsonl"))
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="rows in a padded batch; a packed one has as many tokens")
    parser.add_argument("--batches", type=int, default=2, help="padded batches in each measurement")
    given = parser.parse_args()
    model = load_decoder(ModelArguments(model_name_or_path=given.model), "float32").train()
    padded, packed = sides(given, single=isolate(model))
    pairs = [(packed.tokens_per_second(model), padded.tokens_per_second(model)) for _ in range(PAIRS + 1)][1:]
    ratios = [fast / slow for fast, slow in pairs]
    could = padded.all / padded.real
    print(f"padded: {padded.real} of {padded.all} tokens are real; packed: {packed.real} of {packed.all}")
    print(
        f"packing is {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) times as fast, {PAIRS} pairs"
    )
    print(f"padded / real tokens is {could:.3f}: {statistics.median(ratios) / could:.2f} of what there is to gain")


def sides(given: argparse.Namespace, *, single: bool) -> tuple[Side, Side]:
    """The same rows, in the order of a shuffled epoch, as padded batches and as packed ones."""
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=given.model))
    data = DataArguments(train_file=given.data, max_length=given.max_length)
    rows = list(load_sft(data, tokenizer).dataset.shuffle(seed=0).select(range(given.batch * given.batches)))
    collator = RowCollator(tokenizer.pad_token_id, single=single)
    sequences = pack(rows, given.max_length)
    longest = max(len(row["input_ids"]) for row in rows)
    together = max(1, given.batch * longest // given.max_length)
    return Side(batched(rows, given.batch, collator)), Side(batched(sequences, together, collator))


def batched(rows: list[Any], size: int, collator: RowCollator) -> list[Batch]:
    """Rows in batches of this size."""
    return [collator(rows[at : at + size]) for at in range(0, len(rows), size)]


if __name__ == "__main__":
    main()
