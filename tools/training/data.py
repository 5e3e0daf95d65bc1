"""From a data file to the rows a trainer takes, with a count of what was cut and what was dropped."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tools.checkpoint.errors import CheckpointError
from tools.training.config import DataArguments
from tools.training.forms import preference, supervised
from tools.training.masking import IGNORED, mark, tokenise
from tools.training.rows import read_rows

Split = Literal["train", "eval"]

_BATCH = 1000  # rows tokenised in one call, which the tokenizer spreads over the cores


@dataclass(frozen=True)
class Tokenised:
    """A dataset, and how it came about: `rows` were read, `cut` of them shortened, `dropped` left out."""

    dataset: Any  # datasets.Dataset
    rows: int
    cut: int
    dropped: int
    summary: str


def load_sft(data: DataArguments, tokenizer: Any, split: Split = "train") -> Tokenised:
    """Rows for supervised fine-tuning: `input_ids`, `attention_mask`, `labels`, each [tokens] of int.

    Only the assistant's tokens are learnt, those that close its turns among them; all other labels are -100. Rows
    longer than `max_length` lose their end, and are dropped when nothing to learn is left. Raises CheckpointError
    naming the row that is of no known form, and when no row is left.
    """
    file, has_template = _file(data, split), _has_template(tokenizer)
    rows = read_rows(file, data.max_samples)
    marked = (mark(supervised(row, has_template=has_template), tokenizer, row.place) for row in rows)
    kept, total, cut = [], 0, 0
    for batch in _batches(marked):
        for ids, labels in tokenise(batch, tokenizer):
            total += 1
            cut += len(ids) > data.max_length
            ids, labels = ids[: data.max_length], labels[: data.max_length]
            if any(label != IGNORED for label in labels[1:]):  # the first token is predicted from nothing
                kept.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return _tokenised(kept, file, data, total, cut, "no token to learn")


def load_preferences(data: DataArguments, tokenizer: Any, split: Split = "train") -> Tokenised:
    """Pairs for a reward model: `chosen_input_ids` and `rejected_input_ids`, each [tokens] of int.

    Rows longer than `max_length` lose their end, and are dropped when both answers are then the same. Raises
    CheckpointError as `load_sft` does.
    """
    file, has_template = _file(data, split), _has_template(tokenizer)
    rows = read_rows(file, data.max_samples)
    pairs = ((row.place, preference(row, has_template=has_template)) for row in rows)
    marked = ([mark(answer, tokenizer, place) for answer in pair] for place, pair in pairs)
    kept, total, cut = [], 0, 0
    for batch in _batches(marked):
        encoded = [ids for ids, _ in tokenise([answer for pair in batch for answer in pair], tokenizer)]
        for pair in zip(encoded[::2], encoded[1::2], strict=True):
            total += 1
            cut += any(len(ids) > data.max_length for ids in pair)
            chosen, rejected = (ids[: data.max_length] for ids in pair)
            if chosen != rejected:
                kept.append({"chosen_input_ids": chosen, "rejected_input_ids": rejected})
    return _tokenised(kept, file, data, total, cut, "two equal answers")


def _file(data: DataArguments, split: Split) -> Path:
    file = data.train_file if split == "train" else data.eval_file
    if file is None:
        raise CheckpointError("data.eval_file", "is not given", "evaluation needs rows")
    return file


def _has_template(tokenizer: Any) -> bool:
    if not tokenizer.is_fast:
        problem = "the tokenizer does not say which characters a token stands for, so nothing can be masked"
        raise CheckpointError(tokenizer.name_or_path, problem, "convert it to tokenizer.json")
    return bool(tokenizer.chat_template)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def _tokenised(
    kept: list[dict[str, list[int]]], file: Path, data: DataArguments, total: int, cut: int, why: str
) -> Tokenised:
    from datasets import Dataset

    dropped = total - len(kept)
    if not kept:
        problem = f"all {total} rows have {why} within {data.max_length} tokens" if total else "has no rows"
        raise CheckpointError(file, problem, "raise data.max_length" if total else "")
    summary = f"{file}: {len(kept)} rows, {cut} cut to {data.max_length} tokens, {dropped} dropped ({why})"
    return Tokenised(Dataset.from_list(kept), total, cut, dropped, summary)
