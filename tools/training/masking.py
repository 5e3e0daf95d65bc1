"""Which tokens of a text are learnt: the assistant's, and the token that closes its turn."""

from dataclasses import dataclass
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.training.forms import Conversation, Example, Text
from tools.training.turns import Turn, closed, turns_of

IGNORED = -100  # the label that PyTorch's cross-entropy leaves out of the loss
REWRITTEN = "the template changes a turn once more follow; what it was is learnt in a sequence of its own"


@dataclass(frozen=True)
class Marked:
    """A text as the model reads it, the spans of characters that are learnt, and what there is to know about it."""

    text: str
    learnt: tuple[tuple[int, int], ...]
    notes: frozenset[str] = frozenset()


def mark(example: Example, tokenizer: Any, place: str) -> list[Marked]:
    """Render an example and mark what is learnt of it. Raises CheckpointError naming the row at `place`.

    Every turn of the assistant is learnt as it is asked for: behind the text that prompts for it. One text is enough
    where the template only ever appends. One that changes earlier turns, leaving out their thoughts perhaps, gives a
    text for each turn that reads otherwise later; the last one ends with the last turn.
    """
    texts = _of_text(example, tokenizer) if isinstance(example, Text) else _of_turns(example, tokenizer, place)
    try:
        for each in texts:
            each.text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            place, f"holds {error.object[error.start]!a}, half a character, which is no text"
        ) from None
    return texts


def _of_text(example: Text, tokenizer: Any) -> list[Marked]:
    start = _opening(tokenizer) + example.prompt
    end = tokenizer.eos_token or ""
    text = start + example.completion + ("" if example.completion.endswith(end) else end)
    return [Marked(text, ((len(start), len(text)),))]


def _of_turns(example: Conversation, tokenizer: Any, place: str) -> list[Marked]:
    turns = turns_of(example.messages, tokenizer, place)
    texts: list[Marked] = []
    while turns:
        whole = turns[-1].text
        inside = [turn for turn in turns if whole.startswith(turn.text)]
        turns = [turn for turn in turns if not whole.startswith(turn.text)]
        texts.insert(0, _marked(whole, inside, tokenizer, is_rewritten=bool(texts)))
    return texts


def _marked(whole: str, turns: list[Turn], tokenizer: Any, *, is_rewritten: bool) -> Marked:
    spans = tuple((turn.start, len(closed(turn.text, tokenizer))) for turn in turns)
    notes = frozenset({REWRITTEN} if is_rewritten else ()).union(*(turn.notes for turn in turns))
    return Marked(closed(whole, tokenizer), spans, notes)


def _opening(tokenizer: Any) -> str:
    """The beginning-of-text token, where the tokenizer puts one before plain text; templates write their own."""
    ids = tokenizer("").input_ids
    return tokenizer.bos_token if ids and ids[0] == tokenizer.bos_token_id else ""


def tokenise(marked: list[Marked], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """`input_ids` and `labels` of each text, both [tokens]; the label of a token that is not learnt is -100.

    A token that reaches into a learnt span belongs to it.
    """
    batch = tokenizer([each.text for each in marked], add_special_tokens=False, return_offsets_mapping=True)
    rows = []
    for each, ids, offsets in zip(marked, batch["input_ids"], batch["offset_mapping"], strict=True):
        labels = [
            token if any(begin < stop and max(end, begin + 1) > start for start, stop in each.learnt) else IGNORED
            for token, (begin, end) in zip(ids, offsets, strict=True)
        ]
        rows.append((ids, labels))
    return rows
