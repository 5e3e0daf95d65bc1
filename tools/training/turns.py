"""The assistant's turns of a conversation: each as a chat template asks for it and has it answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.training.forms import Messages

KEPT = "the template leaves thoughts out; they are learnt as the row has them"
PARTED = (
    "the template prompts otherwise than it renders, as for thoughts that a row has not; learnt from where they part"
)
UNCLOSED = "the template writes nothing behind an answer, so nobody learns to end it; add eos_token there"

UNPROMPTED = "the template never prompts, so how an answer begins is learnt too; write that for add_generation_prompt"

_THOUGHTS, _THOUGHTS_END = "<think>", "</think>"
_MARK = "\ue000"  # a private-use character: no template writes it, and none changes it


@dataclass(frozen=True)
class Turn:
    """The text up to the end of a turn, where in it the assistant begins to speak, and what there is to know."""

    text: str
    start: int
    notes: frozenset[str] = frozenset()


def turns_of(messages: Messages, tokenizer: Any, place: str) -> list[Turn]:
    """Every turn of the assistant, in order. Raises CheckpointError where what it says cannot be found in the text."""
    template = _Template(tokenizer, place, _takes_text(tokenizer))
    spoken = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    return [_turn(messages[: at + 1], template) for at in spoken]


@dataclass(frozen=True)
class _Template:
    """The template of a tokenizer, for the row at `place`; that of a vision model takes a text as a list of parts."""

    tokenizer: Any
    place: str
    takes_text: bool

    def render(self, messages: Messages, *, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            remedy = "set data.template, or train with instruction/output or prompt/completion rows"
            raise CheckpointError(self.place, "has messages, but the tokenizer has no chat template", remedy)
        try:
            return _rendered(self.tokenizer, messages if self.takes_text else _in_parts(messages), prompt=prompt)
        except (TemplateError, TypeError, ValueError) as error:
            raise CheckpointError(self.place, f"the chat template cannot render it: {error}") from None

    def around(self, messages: Messages) -> tuple[str, str]:
        """What stands before and after the content of the last message."""
        head, found, tail = self.render([*messages[:-1], {**messages[-1], "content": _MARK}]).rpartition(_MARK)
        if not found:
            raise self.refused(f"leaves out the text of message {len(messages)}")
        return head, tail

    def refused(self, problem: str) -> CheckpointError:
        remedy = "what is learnt cannot be marked; use a template without that"
        return CheckpointError(self.place, f"the chat template {problem}", remedy)


def _turn(messages: Messages, template: _Template) -> Turn:
    """The last message, said by the assistant.

    It begins where the prompt for it ends. A template may prompt with more than it renders, as DeepSeek-R1's, which
    asks for thoughts and leaves them out of its texts: then it begins where the two part, before its content.
    """
    text, content = template.render(messages), messages[-1]["content"]
    prompt = template.render(messages[:-1], prompt=True) if messages[1:] else None
    thoughts, end, answer = content.rpartition(_THOUGHTS_END)
    start, notes = _begun(messages, text, prompt, template)
    rendered = _squeezed(text[start:])
    if _squeezed(answer) not in rendered:
        raise template.refused(f"leaves out the text of message {len(messages)}")
    if _squeezed(thoughts.removeprefix(_THOUGHTS)) not in rendered:
        return _with_thoughts(messages, prompt, template)
    notes = set() if end else notes
    last = answer.rstrip() or end
    is_unclosed = text.rstrip().endswith(last) if last else not rendered
    return Turn(text, start, frozenset(notes | ({UNCLOSED} if is_unclosed else set())))


def _begun(messages: Messages, text: str, prompt: str | None, template: _Template) -> tuple[int, set[str]]:
    """Where in `text` the assistant begins to speak, and what is to be said about it."""
    if prompt is not None and text.startswith(prompt):
        is_asked = "add_generation_prompt" in template.tokenizer.chat_template
        is_prompted = is_asked or template.around(messages)[0].rstrip() == prompt.rstrip()
        return len(prompt), set() if is_prompted else {UNPROMPTED}
    head, _ = template.around(messages)
    if prompt is None:  # the assistant speaks first: there is nothing to prompt with
        return _shared(head, text), set()
    start = _shared(prompt, head, text)
    goes_on = prompt.startswith(head) or head.startswith(prompt.rstrip())
    if not goes_on or start <= _shared(template.render(messages[:-1]), head):
        raise template.refused(f"does not begin message {len(messages)} as it prompts for it")
    return start, {PARTED}


def _with_thoughts(messages: Messages, prompt: str | None, template: _Template) -> Turn:
    """The turn as the model says it, thoughts first, where the template renders the answer alone."""
    head, tail = template.around(messages)
    asked, spoken = prompt or head, messages[-1]["content"]
    if asked.startswith(head) and (begun := asked[len(head) :].strip()):  # the prompt has begun the thoughts itself
        spoken = spoken.lstrip().removeprefix(begun).lstrip("\n")
    return Turn(asked + spoken + tail, len(asked), frozenset({KEPT}))


def _shared(*texts: str) -> int:
    """How many characters all these texts begin with."""
    for count, characters in enumerate(zip(*texts, strict=False)):
        if len(set(characters)) > 1:
            return count
    return min(map(len, texts))


def _squeezed(text: str) -> str:
    """Without white space, which templates trim and add."""
    return "".join(text.split())


def _takes_text(tokenizer: Any) -> bool:
    """Whether a message's content is text; if neither that nor parts are rendered, text, to fail with its words."""
    message: Messages = [{"role": "user", "content": _MARK}]
    return not tokenizer.chat_template or _shows(tokenizer, message) or not _shows(tokenizer, _in_parts(message))


def _shows(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> bool:
    from jinja2 import TemplateError

    try:
        return _MARK in _rendered(tokenizer, messages)
    except (TemplateError, TypeError, ValueError):
        return False


def _in_parts(messages: Messages) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    return text


def closed(text: str, tokenizer: Any) -> str:
    """Without the white space that a template puts after the token that closes a turn: nothing follows that token."""
    special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    bare = text.rstrip()
    return bare if bare.endswith(special) else text
