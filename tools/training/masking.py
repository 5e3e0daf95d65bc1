"""Which tokens of a text are learnt: the assistant's, and the token that closes its turn."""

from dataclasses import dataclass
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.training.forms import Conversation, Text

IGNORED = -100  # the label that PyTorch's cross-entropy leaves out of the loss


@dataclass(frozen=True)
class Marked:
    """A text as the model reads it, and the spans of characters that are learnt."""

    text: str
    learnt: tuple[tuple[int, int], ...]


def mark(example: Conversation | Text, tokenizer: Any, place: str) -> Marked:
    """Render an example and mark what is learnt of it. Raises CheckpointError naming the row at `place`.

    Works for any chat template in which a conversation begins with the rendering of its beginning: the assistant's
    turn is what appears between the prompt for it and the end of the conversation up to it.
    """
    if isinstance(example, Text):
        start = _opening(tokenizer) + example.prompt
        text = start + example.completion + (tokenizer.eos_token or "")
        return Marked(text, ((len(start), len(text)),))
    whole = _rendered(example, tokenizer, place)
    turns = [number for number, message in enumerate(example.messages) if message["role"] == "assistant"]
    return Marked(_closed(whole, tokenizer), tuple(_turn(example, at, whole, tokenizer, place) for at in turns))


def _turn(example: Conversation, at: int, whole: str, tokenizer: Any, place: str) -> tuple[int, int]:
    """The span in `whole` of the message with index `at`, without the header that prompts for it."""
    before = _rendered(Conversation(example.messages[:at]), tokenizer, place, prompt=True)
    upto = _rendered(Conversation(example.messages[: at + 1]), tokenizer, place)
    last_word = example.messages[at]["content"].split()[-1:]
    if not whole.startswith(upto):
        problem = f"the chat template changes the text up to message {at + 1} once more messages follow"
    elif not upto.startswith(before):
        problem = f"the chat template does not begin message {at + 1} as it prompts for it"
    elif last_word and last_word[0] not in upto[len(before) :]:
        problem = f"the chat template leaves out the text of message {at + 1}"
    else:
        return len(before), len(_closed(upto, tokenizer))
    raise CheckpointError(place, problem, "what is learnt cannot be marked; use a template without that")


def _rendered(conversation: Conversation, tokenizer: Any, place: str, *, prompt: bool = False) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        remedy = "train with instruction/output or prompt/completion rows, or add a chat template to the tokenizer"
        raise CheckpointError(place, "has messages, but the tokenizer has no chat template", remedy)
    try:
        text: str = tokenizer.apply_chat_template(conversation.messages, tokenize=False, add_generation_prompt=prompt)
    except TemplateError as error:
        raise CheckpointError(place, f"the chat template cannot render it: {error}") from None
    return text


def _closed(text: str, tokenizer: Any) -> str:
    """Without the white space that a template puts after the token that closes a turn: nothing follows that token."""
    special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    bare = text.rstrip()
    return bare if bare.endswith(special) else text


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
