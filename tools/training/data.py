"""From data files to the rows a trainer takes, with a report on what was read, cut and dropped."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tools.checkpoint.errors import CheckpointError
from tools.training.config import DataArguments
from tools.training.forms import PREFERENCE, SUPERVISED, Form, form_of, is_answered
from tools.training.lengths import histogram
from tools.training.masking import IGNORED, mark, tokenise
from tools.training.packing import Columns, pack
from tools.training.rows import Row
from tools.training.sources import read_source
from tools.training.templates import foreign_tokens, use_template

Split = Literal["train", "eval"]

_Places = defaultdict[str, set[str]]  # a note, and the places of the rows of which it is true
_CUT = "cut"
_SILENT = "dropped, for an answer is empty"
_BATCH = 1000  # rows tokenised in one call, which the tokenizer spreads over the cores
_HUB_SPLITS = {"train": "train", "eval": "validation"}


@dataclass(frozen=True)
class Tokenised:
    """A dataset, and how it came about: `rows` were read, `cut` of them shortened, `dropped` left out.

    A row may be learnt in several sequences. `longest` is the number of tokens of the longest, at `place`. `report`
    says it all in some lines for people, the first of which is `summary`.
    """

    dataset: Any  # datasets.Dataset
    rows: int
    cut: int
    dropped: int
    longest: int
    place: str
    report: tuple[str, ...]

    @property
    def summary(self) -> str:
        return self.report[0]


@dataclass(frozen=True)
class _Given:
    """The rows of a source, all of one form, and whether there is a template for conversations."""

    source: Path | str
    rows: list[Row]
    form: Form
    has_template: bool
    foreign: tuple[str, ...]  # tokens that the template writes and the tokenizer splits

    def examples(self) -> Iterator[tuple[str, Any]]:
        """The place of each row, and what it says."""
        return ((row.place, self.form.example(row, has_template=self.has_template)) for row in self.rows)


@dataclass(frozen=True)
class _Kept:
    """The columns of a sequence that is trained on, and where its row was read."""

    place: str
    columns: Columns

    @property
    def length(self) -> int:
        return max(map(len, self.columns.values()))


def load_sft(data: DataArguments, tokenizer: Any, split: Split = "train") -> Tokenised:
    """Rows for supervised fine-tuning: `input_ids`, `attention_mask`, `labels`, each [tokens] of int.

    Only the assistant's tokens are learnt, those that close its turns among them; all other labels are -100. Rows with
    an empty answer are dropped. Those longer than `max_length` lose their end, and are dropped when nothing to learn is
    left. With `packing` the rows to
    train on are put together: `input_ids`, `labels`, and `seq_lengths`, the length of each row in a sequence. Raises
    CheckpointError naming the row that is of no known form, and when no row is left.
    """
    given = _given(data, tokenizer, split, SUPERVISED)
    kept, places = [], _Places(set)
    examples = _answered(given.examples(), places)
    marked = ((place, each) for place, example in examples for each in mark(example, tokenizer, place))
    for batch in _batches(marked):
        encoded = tokenise([each for _, each in batch], tokenizer)
        for (place, each), (ids, labels) in zip(batch, encoded, strict=True):
            _note(places, place, each.notes, is_cut=len(ids) > data.max_length)
            ids, labels = ids[: data.max_length], labels[: data.max_length]
            if any(label != IGNORED for label in labels[1:]):  # the first token is predicted from nothing
                kept.append(_Kept(place, {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}))
    return _tokenised(kept, given, data, places, "no token to learn", packing=data.packing and split == "train")


def load_preferences(data: DataArguments, tokenizer: Any, split: Split = "train") -> Tokenised:
    """Pairs for a reward model: `chosen_input_ids` and `rejected_input_ids`, each [tokens] of int.

    Rows longer than `max_length` lose their end, and are dropped when both answers are then the same. Raises
    CheckpointError as `load_sft` does.
    """
    if data.packing:
        raise CheckpointError("data.packing", "packs rows of sft; a reward model scores each answer", "leave it out")
    given = _given(data, tokenizer, split, PREFERENCE)
    marked = ((place, [mark(answer, tokenizer, place)[-1] for answer in pair]) for place, pair in given.examples())
    kept, places = [], _Places(set)
    for batch in _batches(marked):
        encoded = [ids for ids, _ in tokenise([answer for _, pair in batch for answer in pair], tokenizer)]
        for (place, answers), pair in zip(batch, zip(encoded[::2], encoded[1::2], strict=True), strict=True):
            notes = frozenset.union(*(answer.notes for answer in answers))
            _note(places, place, notes, is_cut=any(len(ids) > data.max_length for ids in pair))
            chosen, rejected = (ids[: data.max_length] for ids in pair)
            if chosen != rejected:
                kept.append(_Kept(place, {"chosen_input_ids": chosen, "rejected_input_ids": rejected}))
    return _tokenised(kept, given, data, places, "two equal answers")


def _answered(examples: Iterable[tuple[str, Any]], places: _Places) -> Iterator[tuple[str, Any]]:
    """The examples from which more than silence is learnt; the others are noted."""
    for place, example in examples:
        if is_answered(example):
            yield place, example
        else:
            places[_SILENT].add(place)


def _note(places: _Places, place: str, notes: Iterable[str], *, is_cut: bool) -> None:
    for note in (*notes, *([_CUT] if is_cut else [])):
        places[note].add(place)


def _given(data: DataArguments, tokenizer: Any, split: Split, forms: Sequence[Form]) -> _Given:
    source = data.train_file if split == "train" else data.eval_file
    if source is None:
        raise CheckpointError("data.eval_file", "is not given", "evaluation needs rows")
    if not tokenizer.is_fast:
        problem = "the tokenizer does not say which characters a token stands for, so nothing can be masked"
        raise CheckpointError(tokenizer.name_or_path, problem, "convert it to tokenizer.json")
    if data.template is not None:
        use_template(tokenizer, data.template)
    rows = read_source(source, split=_HUB_SPLITS[split], subset=data.subset, limit=data.max_samples)
    foreign = tuple(foreign_tokens(tokenizer)) if data.template is not None else ()
    return _Given(source, rows, form_of(rows, forms), bool(tokenizer.chat_template), foreign)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def _tokenised(
    kept: list[_Kept], given: _Given, data: DataArguments, places: _Places, why: str, *, packing: bool = False
) -> Tokenised:
    from datasets import Dataset

    total, cut = len(given.rows), len(places.pop(_CUT, ()))
    rows = len({each.place for each in kept})
    if not kept:
        if len(places[_SILENT]) == total:
            raise CheckpointError(given.source, f"all {total} rows have an empty answer", "is it in another column?")
        problem = f"all {total} rows have {why} within {data.max_length} tokens"
        raise CheckpointError(given.source, problem, "raise data.max_length")
    columns = [row.columns for row in kept]
    longest = max(kept, key=lambda row: row.length)
    report = [
        f"{given.source}: {rows} rows, {cut} cut to {data.max_length} tokens, {total - rows} dropped ({why})",
        _recognised(given, data),
        *([f"the tokenizer splits {', '.join(given.foreign)}, which the template writes"] if given.foreign else []),
        *(f"{len(noted)} rows: {note}" for note, noted in sorted(places.items())),
        *([f"learnt in {len(kept)} sequences"] if len(kept) > rows else []),
        *_lengths([each.length for each in kept], longest.place, "row" if len(kept) == rows else "sequence"),
    ]
    if packing:
        columns = pack(columns, data.max_length)
        full = sum(len(row["input_ids"]) for row in columns) / len(columns) / data.max_length
        report.append(f"packed into {len(columns)} sequences of {data.max_length} tokens, {full:.0%} full")
    dataset = Dataset.from_list(columns)
    return Tokenised(dataset, total, cut, total - rows, longest.length, longest.place, tuple(report))


def _recognised(given: _Given, data: DataArguments) -> str:
    """What the rows were taken for, what renders them, and which of their columns nobody reads."""
    template = f"template {data.template}" if data.template else "the tokenizer's own template"
    reader = template if given.has_template else "no template"
    read = {*given.form.needs, *given.form.may_have}
    unread = sorted({column for row in given.rows for column in row.columns} - read)
    line = f"read as {given.form.name} ({given.form.columns}), {reader}"
    return f"{line}; not read: {', '.join(unread)}" if unread else line


def _lengths(lengths: list[int], longest: str, of: str) -> list[str]:
    middle = int(statistics.median(lengths))
    first = f"{min(lengths)} to {max(lengths)} tokens a {of}, {middle} in the middle; the longest is {longest}"
    return [first, *histogram(lengths)]
