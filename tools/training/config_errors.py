# ruff: noqa: TID253 - only code that trains imports this module
"""Wrong values of a configuration, each as one line in the user's words, at the place where it was given."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from tools.checkpoint.errors import CheckpointError
from tools.training.config_source import Given

LONGEST = 80  # characters of a wrong value that are shown

WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "a mapping",
    list: "a list",
    NoneType: "null",
}


def explained(
    error: ValidationError, groups: Mapping[str, type[BaseModel]], given: Mapping[str, Given], path: Path
) -> list[CheckpointError]:
    """What pydantic found, one error for each value; a value that is missing is missed in the file."""
    found: dict[str, CheckpointError] = {}
    for detail in error.errors():
        dotted = ".".join(map(str, detail["loc"][:2]))
        group, _, key = dotted.partition(".")
        origin = given[dotted].origin if dotted in given else str(path)
        if detail["type"] == "missing":
            found[dotted] = CheckpointError(path, f"{dotted} is missing", f"add {key} under {group}:")
        elif detail["type"] == "value_error":
            found[dotted] = CheckpointError(origin, f"{dotted} {detail['ctx']['error']}")
        elif detail["type"].startswith(("greater_", "less_")) or detail["type"] == "finite_number":
            must = detail["msg"].removeprefix("Input should be ")
            found[dotted] = CheckpointError(origin, f"{dotted} must be {must}, not {shown(detail['input'])}")
        elif dotted not in found:  # of several types that a value could be, the first that it nearly is tells most
            inside, wrong, kind = _place(
                detail["loc"][2:], given[dotted].value, groups[group].model_fields[key].annotation
            )
            found[dotted] = CheckpointError(origin, f"{dotted}{inside} must be {wanted(kind)}, not {shown(wrong)}")
    return list(found.values())


def _place(path: Sequence[int | str], value: Any, annotation: Any) -> tuple[str, Any, Any]:
    """Where in a mapping or a list the wrong value is, that value, and the type that it should be of."""
    step = path[0] if path else None
    for kind in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]:
        if get_origin(kind) is dict and isinstance(value, dict) and step in value:
            return f".{step}", value[step], get_args(kind)[1]
        if get_origin(kind) is list and isinstance(value, list) and isinstance(step, int):
            return f"[{step}]", value[step], get_args(kind)[0]
    return "", value, annotation


def shown(value: Any) -> str:
    """A value as it was written, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number of that size"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def wanted(annotation: Any) -> str:
    """A type in a user's words: `int | None` is "a whole number or null"."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return wanted(arguments[0])
    if kind is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if kind in (Union, UnionType):
        return " or ".join(wanted(argument) for argument in arguments)
    return WORDS.get(kind or annotation, getattr(annotation, "__name__", str(annotation)))
