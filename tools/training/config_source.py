"""Where configuration values come from: a file with its line numbers, the environment, and overrides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.training.config_text import entries_of, parse, read_value

Fields = Mapping[str, frozenset[str]]  # group -> names of its fields; `training` is open and not among them

PREFIX = "BURNISH_"
MANY = 20  # names that still make a readable line


@dataclass(frozen=True)
class Given:
    """A value that somebody wrote, and where: `FILE:LINE` or `override`."""

    value: Any
    origin: str


def read_file(path: Path, fields: Fields) -> dict[str, Given]:
    """The values of a YAML or JSON file, flat (`finetuning.r`), each with its line. Raises CheckpointError."""
    given: dict[str, Given] = {}
    for name, line, node in parse(path):
        if name.startswith("x-"):  # holds anchors, for other groups to merge
            continue
        if name == "training" or name in fields:
            entries = {f"{name}.{key}": (line, value) for key, line, value in entries_of(node, path)}
        elif node.is_mapping:
            raise unknown_key(name, f"{path}:{line}", fields)
        else:
            entries = {f"{home_of(name, f'{path}:{line}', fields, given)}.{name}": (line, node)}
        for dotted, (line, value) in entries.items():
            if dotted in given:
                earlier = given[dotted].origin.removeprefix(f"{path}:")
                raise CheckpointError(f"{path}:{line}", f"{dotted} is given twice, first on line {earlier}")
            given[dotted] = Given(value.value, f"{path}:{line}")
    return given


def read_environment(environment: Mapping[str, str], fields: Fields) -> dict[str, Given]:
    """The values of variables such as `BURNISH_TRAINING__OUTPUT_DIR`, read as YAML. Raises CheckpointError."""
    values = {}
    for variable, text in sorted(environment.items()):
        group, divider, key = variable.removeprefix(PREFIX).lower().partition("__")
        if variable.startswith(PREFIX) and not divider:
            _refuse_undivided(variable, group, fields)
        elif variable.startswith(PREFIX):
            if group != "training" and group not in fields:
                raise unknown_key(group, variable, fields)
            values[f"{group}.{key}"] = Given(read_value(text, variable), f"environment {variable}")
    return values


def _refuse_undivided(variable: str, name: str, fields: Fields) -> None:
    """Raise CheckpointError for `BURNISH_SEED` and `BURNISH_TRAINING_SEED`; other names are not of a configuration."""
    from tools.training.schema import trainer_fields

    groups = {**fields, "training": trainer_fields()}
    for group, names in groups.items():
        key = name.removeprefix(f"{group}_")
        if key in names:
            meant = f"{PREFIX}{group.upper()}__{key.upper()}"
            raise CheckpointError(variable, "is not read: a group stands before two underscores", f"write {meant}")


def read_overrides(overrides: Sequence[str], fields: Fields, given: Mapping[str, Given]) -> dict[str, Given]:
    """The values of `group.key=value` texts; values are read as YAML. Raises CheckpointError."""
    values = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise CheckpointError(override, "is no override", "write group.key=value")
        if "." not in key:
            key = f"{home_of(key, 'override', fields, given)}.{key}"
        values[key] = Given(read_value(text, "override"), "override")
    return values


def home_of(key: str, origin: str, fields: Fields, given: Mapping[str, Given]) -> str:
    """The one group that a short key belongs to; trainer fields are looked up only when no other group knows it."""
    homes = [group for group, names in fields.items() if key in names]
    if f"training.{key}" in given:
        homes.append("training")
    if len(homes) > 1:
        raise CheckpointError(
            origin, f"{key} could be {' or '.join(f'{h}.{key}' for h in homes)}", "write the one you mean"
        )
    if not homes:
        from tools.training.schema import trainer_fields

        known = trainer_fields()
        if key not in known:
            raise unknown_key(key, origin, {**fields, "training": known})
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
    groups = dict.fromkeys([*fields, "training"])
    return CheckpointError(origin, problem, f"the groups are {', '.join(groups)}")
