"""YAML and JSON as text: keys, lines and values, and every mistake in it as one line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from yaml import MappingNode, SafeLoader

MOST_VALUES = 100_000  # in one value of a configuration
Entry = tuple[str, int, "Node"]  # key, line (from 1), value


@dataclass(frozen=True)
class Node:
    """One value of a file: what it is, and for a mapping also the entries in it with their lines."""

    value: Any
    line: int
    entries: tuple[Entry, ...] = ()
    is_mapping: bool = False


def parse(path: Path) -> list[Entry]:
    """The entries of a file, the last of two levels with their lines. Raises CheckpointError naming file and line."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise CheckpointError(path, "not found") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    is_json = path.suffix == ".json"
    with _in_one_line(path):
        values = json.loads(text) if is_json else {}
        # Outside of strings, where JSON allows none, a tab is only white space: YAML's parser then reads JSON as well.
        loader = yaml.SafeLoader(text.replace("\t", " ") if is_json else text)
        try:
            node = loader.get_single_node()
            top = [] if node is None else _entries(node, None if is_json else loader, path, depth=2)
        finally:
            loader.dispose()
        return [(key, line, _as_json(value, values[key], path)) for key, line, value in top] if is_json else top


def entries_of(node: Node, path: Path) -> tuple[Entry, ...]:
    """The entries of a mapping; an empty value has none. Raises CheckpointError for any other value."""
    if not node.is_mapping and node.value is not None:
        raise CheckpointError(f"{path}:{node.line}", "is not a mapping of keys to values")
    return node.entries


def read_value(text: str, place: str) -> Any:
    """The value of an override: YAML, or the text itself where it is none."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    _check(value, place)
    return value


def _entries(node: Any, loader: "SafeLoader | None", path: Path, depth: int) -> list[Entry]:
    """The entries of a mapping node, merge keys resolved: what a mapping says itself wins over what it merges.

    Without loader the keys and lines alone, as of JSON, whose values its own parser reads.
    """
    import yaml

    if node.tag == "tag:yaml.org,2002:null":
        return []
    if not isinstance(node, yaml.MappingNode):
        raise CheckpointError(f"{path}:{node.start_mark.line + 1}", "is not a mapping of keys to values")
    own = _own_keys(node, path)
    if loader:
        loader.flatten_mapping(node)
    found: dict[str, Entry] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise CheckpointError(f"{path}:{key.start_mark.line + 1}", "a key must be a name")
        line = own.get(key.value, key.start_mark.line + 1)
        found[key.value] = (key.value, line, _node(value, loader, path, depth - 1))
    return list(found.values())


def _own_keys(node: "MappingNode", path: Path) -> dict[str, int]:
    import yaml

    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise CheckpointError(f"{path}:{line}", "a key must be a name")
        if key.value in lines:
            raise CheckpointError(f"{path}:{line}", f"{key.value} is given twice, first on line {lines[key.value]}")
        lines[key.value] = line
    return lines


def _node(node: Any, loader: "SafeLoader | None", path: Path, depth: int) -> Node:
    import yaml

    line = node.start_mark.line + 1
    is_mapping = isinstance(node, yaml.MappingNode)
    if is_mapping and depth:
        return Node(None, line, tuple(_entries(node, loader, path, depth)), is_mapping)
    if loader is None:
        return Node(None, line, (), is_mapping)
    with _in_one_line(path, line):
        value = loader.construct_object(node, deep=True)
    _check(value, f"{path}:{line}")
    return Node(value, line, (), is_mapping)


def _as_json(node: Node, value: Any, path: Path) -> Node:
    """The node with the value that JSON has there: `1e-4` is a number in JSON, and text in YAML."""
    if not node.entries:
        _check(value, f"{path}:{node.line}")
        return Node(value, node.line, (), node.is_mapping)
    return Node(None, node.line, tuple((k, at, _as_json(n, value[k], path)) for k, at, n in node.entries), True)


def _check(value: Any, place: str) -> None:
    """Refuse what no file can hold: NUL, half of a surrogate pair, and aliases that unfold without end."""
    waiting, seen = [value], 0
    while waiting:
        item = waiting.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise CheckpointError(place, f"has more than {MOST_VALUES:,} values", "is an alias inside itself?")
        if isinstance(item, str) and ("\0" in item or any(0xD800 <= ord(character) <= 0xDFFF for character in item)):
            raise CheckpointError(place, "has a character that no file name and no text can have")
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, (list, tuple, set)):
            waiting += item


@contextmanager
def _in_one_line(path: Path, line: int = 1) -> Iterator[None]:
    """What a parser has to say, as a CheckpointError at its place."""
    import yaml

    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else line
        raise CheckpointError(f"{path}:{line}", f"is not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise CheckpointError(path, f"is not valid YAML: {str(error).partition(chr(10))[0]}") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}:{error.lineno}", f"is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise CheckpointError(path, "is nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}:{line}", f"has a value that cannot be read: {error}") from None
