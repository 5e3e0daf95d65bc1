"""What a row says: the forms of instruction and preference data, told apart by their columns.

Every form means what it means where it comes from. Messages, ShareGPT conversations and alpaca instructions are
conversations, rendered by the chat template; prompt/completion and prompt/chosen/rejected are plain text when they are
strings (as in TRL) and conversations when they are lists of messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.training.rows import Row

Messages = list[dict[str, str]]

_ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}  # ShareGPT's names


@dataclass(frozen=True)
class Conversation:
    """Messages with role and content, for the chat template."""

    messages: Messages


@dataclass(frozen=True)
class Text:
    """Plain text that no template touches; only the completion is learnt."""

    prompt: str
    completion: str


Example = Conversation | Text


@dataclass(frozen=True)
class Form:
    """A form of row: its name, the columns it must have and those it may have, and the example in such a row."""

    name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    example: Callable[..., Any]  # (row, *, has_template) -> Example, or the chosen and the rejected one

    @property
    def columns(self) -> str:
        return "/".join(self.needs)


def is_answered(example: Example) -> bool:
    """Whether every answer in it says something."""
    if isinstance(example, Text):
        return bool(example.completion.strip())
    return all(message["content"].strip() for message in example.messages if message["role"] == "assistant")


def form_of(rows: Sequence[Row], forms: Sequence[Form]) -> Form:
    """The one form that all these rows have, by their columns; of several that fit, the first in the list.

    Raises CheckpointError naming the first row that has none, or another one than the rows before it.
    """
    form = _form_of(rows[0], forms)
    for row in rows:
        if (own := _form_of(row, forms)) is not form:
            problem = f"is a row of {own.columns}, but the rows from {rows[0].place} on are of {form.columns}"
            raise row.refused(problem, "put rows of one form into one file")
    return form


def _form_of(row: Row, forms: Sequence[Form]) -> Form:
    for form in forms:
        if all(column in row.columns for column in form.needs):
            return form
    known = ", ".join(form.columns for form in forms)
    raise row.refused(f"has {', '.join(sorted(row.columns)) or 'no columns'}", f"forms are: {known}")


def _from_messages(row: Row, *, has_template: bool) -> Example:
    messages = _conversation(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise row.refused("has no message of the assistant, so nothing to learn")
    return Conversation(messages)


def _from_instruction(row: Row, *, has_template: bool) -> Example:
    """Without a template an instruction becomes the plain text of Alpaca."""
    return _answered(row, _instruction(row, has_template=has_template), "output")


def _from_prompt(row: Row, *, has_template: bool) -> Example:
    return _answered(row, _prompt(row), "completion")


def _from_text(row: Row, *, has_template: bool) -> Example:
    return Text("", _text(row, "text"))


def _pair_of_prompt(row: Row, *, has_template: bool) -> tuple[Example, Example]:
    return _pair(row, _prompt(row))


def _pair_of_instruction(row: Row, *, has_template: bool) -> tuple[Example, Example]:
    return _pair(row, _instruction(row, has_template=has_template))


def _pair_of_conversation(row: Row, *, has_template: bool) -> tuple[Example, Example]:
    return _pair(row, _conversation(row))


def _pair_alone(row: Row, *, has_template: bool) -> tuple[Example, Example]:
    """The prompt is implicit: what both conversations begin with."""
    return _pair(row, "")


def _pair(row: Row, asked: Messages | str) -> tuple[Example, Example]:
    chosen, rejected = _answered(row, asked, "chosen"), _answered(row, asked, "rejected")
    if isinstance(chosen, Conversation) and isinstance(rejected, Conversation):
        _check_same_prompt(row, chosen.messages, rejected.messages)
    elif type(chosen) is not type(rejected):
        raise row.refused("has a text and messages as chosen and rejected", "write both in one way")
    return chosen, rejected


def _check_same_prompt(row: Row, chosen: Messages, rejected: Messages) -> None:
    """Both go on with the assistant where they part: what it was asked is the same."""
    alike = 0
    while chosen[alike : alike + 1] == rejected[alike : alike + 1] != []:
        alike += 1
    parted = {message["role"] for message in (*chosen[alike : alike + 1], *rejected[alike : alike + 1])}
    if not parted <= {"assistant"}:
        problem = f"has a chosen and a rejected answer to different prompts: message {alike + 1} differs"
        raise row.refused(problem, "write answers to one prompt")


_ALPACA = ("input", "system", "history")
SUPERVISED = (
    Form("messages", ("messages",), ("system",), _from_messages),
    Form("ShareGPT", ("conversations",), ("system",), _from_messages),
    Form("alpaca", ("instruction", "output"), _ALPACA, _from_instruction),
    Form("prompt and completion", ("prompt", "completion"), (), _from_prompt),
    Form("plain text", ("text",), (), _from_text),
)
PREFERENCE = (
    Form("explicit prompt", ("prompt", "chosen", "rejected"), (), _pair_of_prompt),
    Form("alpaca", ("instruction", "chosen", "rejected"), _ALPACA, _pair_of_instruction),
    Form("messages", ("messages", "chosen", "rejected"), ("system",), _pair_of_conversation),
    Form("ShareGPT", ("conversations", "chosen", "rejected"), ("system",), _pair_of_conversation),
    Form("implicit prompt", ("chosen", "rejected"), (), _pair_alone),
)


def _answered(row: Row, asked: Messages | str, column: str) -> Conversation | Text:
    """What was asked, followed by the answer in a column: a text, a message, or messages that may repeat the prompt."""
    answer = row.columns[column]
    if isinstance(answer, str):
        if isinstance(asked, str):
            return Text(asked, answer)
        return Conversation([*asked, {"role": "assistant", "content": answer}])
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}] if asked else []
    said = _messages(row, [answer] if isinstance(answer, dict) else answer, column)
    if said[-1]["role"] != "assistant":
        raise row.refused(f"{column} ends with a message of the {said[-1]['role']}, not of the assistant")
    return Conversation(said if said[: len(asked)] == asked else [*asked, *said])


def _prompt(row: Row) -> Messages | str:
    prompt = row.columns["prompt"]
    return prompt if isinstance(prompt, str) else _messages(row, prompt, "prompt")


def _conversation(row: Row) -> Messages:
    column = "messages" if "messages" in row.columns else "conversations"
    if row.columns.get("tools"):
        raise row.refused("has tools, which are not rendered", "leave such rows out")
    return [*_system(row), *_messages(row, row.columns[column], column)]


def _instruction(row: Row, *, has_template: bool) -> Messages | str:
    """An alpaca row without its output: messages, or the prompt of Stanford Alpaca where there is no template."""
    instruction, given = _text(row, "instruction"), _text(row, "input")
    history = row.columns.get("history") or []
    if not isinstance(history, list):
        raise row.refused(f"history is {type(history).__name__}, not a list", "write pairs: [instruction, output]")
    if has_template:
        messages = _system(row)
        for turn in history:
            if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(said, str) for said in turn):
                raise row.refused(f"history has {turn!r}", "write pairs: [instruction, output]")
            messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        return [*messages, {"role": "user", "content": f"{instruction}\n{given}" if given else instruction}]
    if history or row.columns.get("system"):
        raise row.refused("has a system text or a history, but the tokenizer has no chat template to render them")
    task = "Below is an instruction that describes a task"
    task += ", paired with an input that provides further context. " if given else ". "
    context = f"### Input:\n{given}\n\n" if given else ""
    return (
        f"{task}Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}\n\n{context}### Response:\n"
    )


def _system(row: Row) -> Messages:
    system = _text(row, "system")
    return [{"role": "system", "content": system}] if system else []


def _text(row: Row, column: str) -> str:
    text = row.columns.get(column, "")
    if not isinstance(text, str):
        raise row.refused(f"{column} is {type(text).__name__}, not text")
    return text


def _messages(row: Row, turns: Any, column: str) -> Messages:
    """Messages under role/content or under ShareGPT's from/value, in the names of chat templates.

    Thoughts kept apart, as `reasoning_content`, go before the content in the form that templates know.
    """
    if not isinstance(turns, list):
        raise row.refused(f"{column} is {type(turns).__name__}, not a list of messages")
    if not turns:
        raise row.refused(f"{column} has no messages")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise row.refused(f"message {number} of {column} is {type(turn).__name__}", "write role and content")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role not in _ROLES or not isinstance(content, str):
            has = f"role {role!r} and content of type {type(content).__name__}"
            raise row.refused(
                f"message {number} of {column} has {has}", f"roles are {', '.join(_ROLES)}, content is text"
            )
        if turn.get("tool_calls"):
            raise row.refused(f"message {number} of {column} has tool_calls, which are not rendered")
        if isinstance(thoughts := turn.get("reasoning_content"), str) and thoughts:
            content = f"<think>\n{thoughts}\n</think>\n\n{content}"
        messages.append({"role": _ROLES[role], "content": content})
    return messages
