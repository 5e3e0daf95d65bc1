"""What determines the result of a run: whether two configurations are of the same one."""

import hashlib
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.training.sources import digest

if TYPE_CHECKING:
    from tools.training.config import TrainConfig

# Keys of `training` that change what is told about a run, or how fast it goes, and never what comes out of it.
WITHOUT_EFFECT = frozenset(
    [
        *("output_dir", "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "logging_strategy"),
        *("logging_steps", "logging_first_step", "logging_nan_inf_filter", "skip_memory_metrics", "ddp_timeout"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "per_device_eval_batch_size", "eval_accumulation_steps"),
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push"),
        *("hub_revision",),
    ]
)
_SAMPLE_BYTES = 1 << 20


def fingerprint(config: "TrainConfig", arguments_class: type, processes: int = 1) -> dict[str, str]:
    """What determines the result of a run, flat: `{"finetuning.r": "4", "data.train_file": "sha256:...", ...}`.

    A value that is the default of its field, in `training` that of `arguments_class`, is left out: whether it was
    written down makes no difference. Files count by content, and `processes` when there are several, each of which
    takes its part of every batch. `generating`, `report`, the output directory and what only concerns logging are left
    out. Raises CheckpointError when a data file is not there.
    """
    prints = {}
    for group in ("model", "data", "finetuning"):
        values = getattr(config, group)
        for key, field in type(values).model_fields.items():
            value = getattr(values, key)
            if _canonical(value) != _canonical(field.default):
                prints[f"{group}.{key}"] = digest(value) if isinstance(value, Path) else _canonical(value)
    model = Path(config.model.model_name_or_path)
    if model.is_dir():
        prints["model.model_name_or_path"] = _sampled(model)
    defaults = {field.name: field.default for field in fields(arguments_class)}
    for key, value in sorted(config.training.items()):
        if key not in WITHOUT_EFFECT and _canonical(value) != _canonical(defaults.get(key, MISSING)):
            prints[f"training.{key}"] = _canonical(value)
    return prints | ({"launch.processes": str(processes)} if processes > 1 else {})


def _sampled(model: Path) -> str:
    """SHA-256 of config.json and of size, first and last MB of each weight file: to read it all would take minutes."""
    total = hashlib.sha256()
    files = [path for pattern in ("*.safetensors", "*.bin") for path in sorted(model.glob(pattern))]
    for file in (path for path in (model / "config.json", *files) if path.is_file()):
        size = file.stat().st_size
        with file.open("rb") as opened:
            total.update(f"{file.name} {size}".encode() + opened.read(_SAMPLE_BYTES))
            opened.seek(max(0, size - _SAMPLE_BYTES))
            total.update(opened.read())
    return f"sha256:{total.hexdigest()}"


def _canonical(value: Any) -> str:
    """The same text for 2, 2.0 and "2.0": YAML reads `1e-4` as text and `1.0e-4` as a number."""
    value = getattr(value, "value", value)  # of an Enum
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    try:
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    except (TypeError, ValueError, OverflowError):
        return str(value)
