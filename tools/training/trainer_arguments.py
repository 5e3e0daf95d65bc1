# ruff: noqa: TID253 - only code that trains imports this module
"""The `training` group, checked against the config class of the stage that will use it."""

from dataclasses import fields
from enum import Enum
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tools.checkpoint.errors import CheckpointError, all_of
from tools.training.config import Resolved
from tools.training.config_source import unknown_key, wanted

_TOKENISED = "Burnish tokenises and masks the rows itself"
_PACKING = "write data.packing"
_OWN = {
    "report_to": "write report.report_to",
    "run_name": "write report.run_name",
    "project": "write report.project",
    "max_length": "write data.max_length",
    "trust_remote_code": "write model.trust_remote_code",
    "model_init_kwargs": "write the fields of model",
    "resume_from_checkpoint": "an unfinished run is resumed by itself",
    "dataset_text_field": _TOKENISED,
    "dataset_kwargs": _TOKENISED,
    "dataset_num_proc": _TOKENISED,
    "chat_template_path": _TOKENISED,
    "eos_token": _TOKENISED,
    "truncation_mode": _TOKENISED,
    "assistant_only_loss": _TOKENISED,
    "completion_only_loss": _TOKENISED,
    "packing": _PACKING,
    "packing_strategy": _PACKING,
    "eval_packing": _PACKING,
    "padding_free": _PACKING,
}
_LENIENT = ConfigDict(arbitrary_types_allowed=True)  # some fields hold objects that no text can give


def trainer_arguments(resolved: Resolved, arguments_class: type) -> dict[str, Any]:
    """The keyword arguments for the stage's config class: `training`, each value of the type its field declares.

    The class is not instantiated. Raises CheckpointError, naming file and line, for a key the class does not have, for
    one that another group or Burnish itself decides, and for a value of the wrong type.
    """
    types = get_type_hints(arguments_class)
    names = frozenset(field.name for field in fields(arguments_class) if field.init) - _OWN.keys()
    arguments, errors = {}, []
    for key, value in resolved.config.training.items():
        dotted = f"training.{key}"
        origin = resolved.origins.get(dotted, "training")
        if key in _OWN:
            errors.append(CheckpointError(origin, f"{dotted} is not read from here", _OWN[key]))
        elif key not in names:
            errors.append(unknown_key(dotted, origin, {"training": names}))
        else:
            wanted_type = TypeAdapter(types[key], config=_LENIENT)
            try:
                arguments[key] = wanted_type.validate_python("no" if value is False and _says_no(types[key]) else value)
            except ValidationError:
                errors.append(CheckpointError(origin, f"{dotted} must be {wanted(types[key])}, not {value!r}"))
    if errors:
        raise all_of(errors)
    return arguments


def _says_no(annotation: Any) -> bool:
    """Whether `no` is a value of the field, as of `save_strategy`; YAML 1.1 reads a bare `no` as false."""
    return any(
        isinstance(kind, type) and issubclass(kind, Enum) and "no" in {m.value for m in kind}
        for kind in _kinds(annotation)
    )


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)
