"""Where configuration values come from: a YAML or JSON file with its line numbers, and overrides."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tools.checkpoint.errors import CheckpointError

Fields = Mapping[str, frozenset[str]]  # group -> names of its fields; `training` is open and not among them

MANY = 20  # names that still make a readable line

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


@dataclass(frozen=True)
class Given:
    """A value that somebody wrote, and where: `FILE:LINE` or `override`."""

    value: Any
    origin: str


def read_file(path: Path, fields: Fields) -> dict[str, Given]:
    """The values of a YAML or JSON file, flat (`finetuning.r`), each with its line. Raises CheckpointError."""
    import yaml

    try:
        # Outside of strings, where JSON allows none, a tab is only white space: YAML's parser then reads JSON as well.
        text = path.read_text(encoding="utf-8")
        text = text.replace("\t", " ") if path.suffix == ".json" else text
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise CheckpointError(path, "not found") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CheckpointError(f"{path}:{line}", f"is not valid YAML: {error.problem}") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}:{error.lineno}", f"is not valid JSON: {error.msg}") from None
    given: dict[str, Given] = {}
    for group, line, group_node in _entries(tree, path):
        if group != "training" and group not in fields:
            raise unknown_key(group, f"{path}:{line}", fields)
        for key, line, _ in _entries(group_node, path):
            given[f"{group}.{key}"] = Given(values[group][key], f"{path}:{line}")
    return given


def _entries(node: Any, path: Path) -> list[tuple[str, int, Any]]:
    """Key, line (from 1) and value node of each entry of a mapping; an empty value has none."""
    import yaml

    if node is None or node.tag == "tag:yaml.org,2002:null":
        return []
    if not isinstance(node, yaml.MappingNode):
        raise CheckpointError(f"{path}:{node.start_mark.line + 1}", "is not a mapping of keys to values")
    seen: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise CheckpointError(f"{path}:{line}", f"{key.value} is given twice, first on line {seen[key.value]}")
        seen[key.value] = line
    return [(key.value, seen[key.value], value) for key, value in node.value]


def read_overrides(overrides: Sequence[str], fields: Fields, given: Mapping[str, Given]) -> dict[str, Given]:
    """The values of `group.key=value` texts; values are read as YAML. Raises CheckpointError."""
    import yaml

    values = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise CheckpointError(override, "is no override", "write group.key=value")
        if "." not in key:
            key = f"{_home(key, fields, given)}.{key}"
        try:
            values[key] = Given(yaml.safe_load(text), "override")
        except yaml.YAMLError:
            values[key] = Given(text, "override")
    return values


def _home(key: str, fields: Fields, given: Mapping[str, Given]) -> str:
    """The one group that a short key belongs to; trainer fields are looked up only when no other group knows it."""
    homes = [group for group, names in fields.items() if key in names]
    if f"training.{key}" in given:
        homes.append("training")
    if len(homes) > 1:
        raise CheckpointError(
            "override", f"{key} could be {' or '.join(f'{h}.{key}' for h in homes)}", "write the one you mean"
        )
    if not homes:
        from transformers import TrainingArguments

        trainer_fields = frozenset(TrainingArguments.__dataclass_fields__)
        if key not in trainer_fields:
            raise unknown_key(key, "override", {**fields, "training": trainer_fields})
        homes.append("training")
    return homes[0]


def unknown_key(dotted: str, origin: str, fields: Fields) -> CheckpointError:
    """The refusal of a key that nothing reads, naming the nearest one: of the same group if there is one."""
    group, _, key = dotted.rpartition(".")
    anywhere = {name: f"{place}.{name}" for place, names in fields.items() for name in sorted(names)}
    here = {name: f"{group}.{name}" for name in sorted(fields.get(group, ()))}
    if not group:
        here = {name: name for name in [*fields, "training"] if name != key}
    near = [key] if key in anywhere else get_close_matches(key, here, 1) or get_close_matches(key, anywhere, 1)
    problem = f"unknown key {dotted}"
    if near:
        return CheckpointError(origin, problem, f"did you mean {(anywhere | here)[near[0]]}?")
    if group in fields:
        return CheckpointError(origin, problem, f"{group} has {', '.join(here)}" if len(here) < MANY else "")
    return CheckpointError(origin, problem, f"the groups are {', '.join([*fields, 'training'])}")


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
