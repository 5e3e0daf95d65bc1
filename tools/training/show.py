"""A configuration as it is understood: every value, and where it came from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.training.callbacks.plain import SECRET
from tools.training.config import GROUPS, Resolved, load_config
from tools.training.config_rules import in_step
from tools.training.trainer_arguments import allowed, owner, trainer_arguments

COLUMN = 56  # where the origins stand, if the value leaves room

Line = tuple[str, Any, str]  # key, value, origin


def shown(config: Path, overrides: Sequence[str] = ()) -> dict[str, list[Line]]:
    """Each group with its keys, values and origins. Raises CheckpointError like `tools train`, and loads no model."""
    from tools.training.stages import load_stage

    resolved = load_config(config, overrides)
    stage = load_stage(resolved.config.finetuning.stage)
    arguments = trainer_arguments(resolved, stage.ARGUMENTS)
    groups = {name: list(_group(resolved, name)) for name in GROUPS}
    return {**groups, "training": list(_training(resolved, arguments, stage.ARGUMENTS))}


def as_yaml(groups: Mapping[str, Sequence[Line]]) -> str:
    """The same as YAML, the origins as comments: a configuration of its own, which says the same."""
    lines = []
    for name, entries in groups.items():
        lines.append(f"{name}:")
        for key, value, origin in entries:
            is_left_out = value is None and (key in DECIDED_LATER or SECRET.search(key))
            text = f"  # {key}" if is_left_out else f"  {key}: {_yaml(value)}"
            lines.append(f"{text:<{COLUMN}} # {origin}")
    return "\n".join(lines)


def _group(resolved: Resolved, name: str) -> Iterator[Line]:
    for key, value in getattr(resolved.config, name).model_dump(mode="json").items():
        yield key, value, resolved.origin(f"{name}.{key}")


def _training(resolved: Resolved, arguments: Mapping[str, Any], arguments_class: type) -> Iterator[Line]:
    """Fields that were given, that Burnish sets beside them, and the defaults of the libraries."""
    beside = in_step(arguments, resolved.config.data.eval_file is not None)
    for field in fields(arguments_class):
        if field.name in arguments and SECRET.search(field.name):
            yield field.name, None, f"{resolved.origin(f'training.{field.name}')}, a secret that is not shown"
        elif field.name in arguments:
            origin = resolved.origins.get(f"training.{field.name}", "set by Burnish: for early stopping")
            yield field.name, arguments[field.name], origin
        elif field.name in beside:
            yield field.name, beside[field.name], "set by Burnish: saving and evaluating are kept in step"
        elif field.name in DECIDED_LATER:
            yield field.name, None, f"set by Burnish: {DECIDED_LATER[field.name]}"
        elif field.name in allowed(arguments_class):
            yield field.name, _default(field), f"default ({_library(field.name, arguments_class)})"


# What depends on the machine on which the command runs.
DECIDED_LATER = {
    "bf16": "as model.dtype and the device allow",
    "fp16": "as model.dtype and the device allow",
    "use_cpu": "true where there is no accelerator",
    "disable_tqdm": "true where nobody looks",
    "log_level_replica": "error: of several processes the first warns",
    "ddp_timeout": "that of launch.timeout",
    "include_num_input_tokens_seen": "non_padding",
    "logging_nan_inf_filter": "false: a loss that is no number ends the training",
}


def _default(field: "Field[Any]") -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def _library(name: str, arguments_class: type) -> str:
    """The library whose class gives a field its default, such as `trl 1.16.0`."""
    library = owner(name, arguments_class).__module__.partition(".")[0]
    return f"{library} {version(library)}"


def _yaml(value: Any) -> str:
    """A value on one line of YAML."""
    import yaml

    plain = value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.strip().removesuffix("...").strip()
