"""Chat templates by name: those in this folder, and those that installed packages add.

A template is Jinja text, as in `tokenizer.chat_template`, so it is saved with the tokenizer into every checkpoint, and
whoever serves the model prompts it as it was trained. A package adds some by the entry points `burnish.templates`:
the name of each, and an object that is the text, or the path of a .jinja file.
"""

import re
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError

GROUP = "burnish.templates"
_HERE = Path(__file__).parent
_SPECIAL = re.compile(r"<[|｜][^<>|｜'\s]+[|｜]>|<(?:start|end)_of_\w+>")  # noqa: RUF001 - DeepSeek's bars are wide
_ASKED = [{"role": "user", "content": "?"}]


def template_names() -> tuple[str, ...]:
    """The names that `data.template` understands, ours first. No package is imported."""
    return (*sorted(file.stem for file in _HERE.glob("*.jinja")), *sorted(_added()))


def template_text(template: str | Path) -> str:
    """The Jinja text of a template: the name of one, or a .jinja file.

    Raises CheckpointError for an unknown name, with the nearest, and for a file that cannot be read.
    """
    if isinstance(template, Path):
        return _read(template)
    added = _added()
    if template in added:
        return _loaded(added[template])
    file = _HERE / f"{template}.jinja"
    if template in template_names():
        return _read(file)
    near = get_close_matches(template, template_names(), 1)
    remedy = f"did you mean {near[0]}?" if near else f"give a .jinja file, or one of {', '.join(template_names())}"
    raise CheckpointError("data.template", f"there is no template {template}", remedy)


def use_template(tokenizer: Any, template: str | Path) -> None:
    """Let the tokenizer render conversations by this template, here and wherever it is saved.

    Raises CheckpointError where `template_text` does, and for a text that is not valid Jinja, naming the line.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    tokenizer.chat_template = template_text(template)
    if not tokenizer.chat_template.strip():
        raise CheckpointError(template, "is empty", "write what a conversation looks like")
    try:
        tokenizer.apply_chat_template(_ASKED, tokenize=False, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"{template}:{error.lineno}", f"is not valid Jinja: {error.message}") from None
    except (TemplateError, TypeError, ValueError) as error:
        raise CheckpointError(template, f"cannot render a question of the user: {error}") from None


def foreign_tokens(tokenizer: Any) -> list[str]:
    """What looks like a special token in the tokenizer's template, and is several tokens to the tokenizer."""
    written = dict.fromkeys(_SPECIAL.findall(tokenizer.chat_template))
    return [token for token in written if len(tokenizer.encode(token, add_special_tokens=False)) > 1]


def _added() -> dict[str, EntryPoint]:
    """Templates of installed packages by name. Raises CheckpointError where one takes a name of ours."""
    added = {point.name: point for point in entry_points(group=GROUP)}
    for name, point in added.items():
        if (_HERE / f"{name}.jinja").exists():
            problem = f"{point.value} is entered under {GROUP} as {name}, a name that Burnish has"
            raise CheckpointError("data.template", problem, "enter it under another name")
    return added


def _loaded(point: EntryPoint) -> str:
    try:
        value = point.load()
    except (ImportError, AttributeError) as error:
        raise CheckpointError("data.template", f"{point.name} does not load from {point.value} ({error})") from error
    if isinstance(value, Path):
        return _read(value)
    if not isinstance(value, str):
        problem = f"{point.value} is {type(value).__name__}, not a template"
        raise CheckpointError("data.template", problem, "make it the Jinja text, or the path of a .jinja file")
    return value


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(file, "not found", "data.template names a .jinja file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(file, f"cannot be read ({error})") from None
