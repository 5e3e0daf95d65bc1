# ruff: noqa: TID253 - only code that trains imports this module
"""The `training` group, checked against the config class of the stage that will use it."""

from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tools.checkpoint.errors import CheckpointError, all_of
from tools.training.config import Resolved
from tools.training.config_errors import shown, wanted
from tools.training.config_rules import broken_training_rules
from tools.training.config_source import unknown_key
from tools.training.early_stopping import needed

_TOKENISED = "Burnish tokenises and masks the rows itself"
_PACKING = "write data.packing"
OWN = {
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
    "pad_token": _TOKENISED,
    "pad_to_multiple_of": _TOKENISED,
    "label_names": _TOKENISED,
    "remove_unused_columns": _TOKENISED,
    "use_cache": "the model says it in its config.json",
}
_LENIENT = ConfigDict(arbitrary_types_allowed=True)  # some fields hold objects that no text can give


def trainer_arguments(resolved: Resolved, arguments_class: type) -> dict[str, Any]:
    """The keyword arguments for the stage's config class: `training`, each value of the type its field declares.

    What early stopping needs is among them. The class is not instantiated. Raises CheckpointError, naming file and
    line, for a key the class does not have, for one that another group or Burnish itself decides, and for a value of
    the wrong type.
    """
    types = get_type_hints(arguments_class)
    names = allowed(arguments_class)
    arguments, errors = {}, []
    for key, value in resolved.config.training.items():
        dotted = f"training.{key}"
        origin = resolved.origin(dotted)
        if key in OWN:
            errors.append(CheckpointError(origin, f"{dotted} is not read from here", OWN[key]))
        elif key not in names:
            errors.append(unknown_key(dotted, origin, {"training": names}))
        else:
            try:
                arguments[key] = _typed(value, types[key])
            except ValueError as error:
                errors.append(CheckpointError(origin, f"{dotted} must be {error}"))
    arguments = needed(resolved.config.finetuning) | arguments
    if errors := errors or broken_training_rules(resolved, arguments):
        raise all_of(errors)
    return arguments


def allowed(arguments_class: type) -> frozenset[str]:
    """The fields of a config class that `training` may give."""
    return frozenset(field.name for field in fields(arguments_class) if field.init) - OWN.keys()


def owner(name: str, arguments_class: type) -> type:
    """The class, among the bases of a config class, that declares a field last."""
    return next(kind for kind in arguments_class.__mro__ if name in vars(kind).get("__annotations__", ()))


def choices(annotation: Any) -> list[str]:
    """What a field may be that has a fixed list of values, as `save_strategy` has."""
    enums = [kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, Enum)]
    return [str(member.value) for enum in enums for member in enum]


def _typed(value: Any, annotation: Any) -> Any:
    """The value as the annotation wants it. Raises ValueError saying what that is."""
    among = choices(annotation)
    if among and value is False and "no" in among:
        value = "no"  # YAML 1.1 reads a bare `no` as false
    if among and isinstance(value, str) and value not in among:
        near = get_close_matches(value, among, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"one of {', '.join(among)}, not {shown(value)}{meant}")
    try:
        if isinstance(value, bool) and not {bool, str, Any}.intersection(_kinds(annotation)):
            raise ValueError
        return TypeAdapter(annotation, config=_LENIENT).validate_python(value)
    except (ValidationError, ValueError):
        raise ValueError(f"{wanted(annotation)}, not {shown(value)}") from None


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)
