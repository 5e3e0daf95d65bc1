"""Any value as plain JSON types, records that strict JSON can hold, and nothing secret among them."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|password|passwd|secrets?|credentials?)($|_)"
    r"|^(?!(pad|eos|bos|unk|mask|sep|cls|image|video|audio)_).*(^|_)token$"
)


def plain(value: Any) -> Any:
    """Only None, bool, int, float, str, list and dict: sets sorted, configs as their fields, the rest as text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, type):
        return value.__qualname__
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    for method in ("model_dump", "to_dict", "tolist"):  # pydantic, transformers, numpy and torch
        if hasattr(value, method):
            return plain(getattr(value, method)())
    return str(value).removeprefix("torch.")  # paths, dtypes, devices


def strict(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record in plain types, each number that JSON does not have as null and its key listed in `non_finite`."""
    values: dict[str, Any] = plain(record)
    bad = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    return values | dict.fromkeys(bad) | ({"non_finite": bad} if bad else {})


def without_secrets(value: Any) -> Any:
    """The value without the keys, at any depth, that look like those of a secret."""
    if isinstance(value, dict):
        return {key: without_secrets(item) for key, item in value.items() if not SECRET.search(key.lower())}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value
