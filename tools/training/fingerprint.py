"""What determines the result of a run: whether two configurations are of the same one."""

import json
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
        *("dataloader_prefetch_factor",),
    ]
)


def fingerprint(config: "TrainConfig", processes: int = 1) -> dict[str, str]:
    """What determines the result of a run, flat: `{"finetuning.r": "8", "data.train_file": "sha256:...", ...}`.

    Data files count by content, and `processes` when there are several, each of which takes its part of every batch.
    `generating`, `report`, the output directory and what only concerns logging are left out. Raises CheckpointError
    when a data file is not there.
    """
    prints = {}
    for group in ("model", "data", "finetuning"):
        for key, value in getattr(config, group):
            prints[f"{group}.{key}"] = digest(value) if isinstance(value, Path) else _canonical(value)
    for key, value in sorted(config.training.items()):
        if key not in WITHOUT_EFFECT:
            prints[f"training.{key}"] = _canonical(value)
    return prints | ({"launch.processes": str(processes)} if processes > 1 else {})


def _canonical(value: Any) -> str:
    """The same text for 2, 2.0 and "2.0": YAML reads `1e-4` as text and `1.0e-4` as a number."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    try:
        return f"{float(value):.17g}"
    except (TypeError, ValueError, OverflowError):
        return str(value)
