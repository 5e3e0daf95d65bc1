# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""ReporterCallback: every argument of a run, on the page of the run in Weights & Biases and the like."""

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tools.training.callbacks.plain import plain

logger = logging.getLogger(__name__)

Groups = dict[str, Any]
SECRET = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|password|passwd|secrets?|credentials?)($|_)"
    r"|^(?!(pad|eos|bos|unk|mask|sep|cls|image|video|audio)_).*(^|_)token$"
)


class ReporterCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Sends argument groups, such as `{"model": ..., "data": ...}`, to each tracker that has a run, once, from the main
    process: as plain JSON types, and without keys that look like a secret.

    Trackers are those in `report_to`, by default that of the training arguments, and any other with a run of its own in
    this process. One that has no run yet at train begin is asked again at the first step. A tracker that is missing,
    has no run or fails costs one warning, and never the training.
    """

    def __init__(self, groups: Mapping[str, Any], report_to: Sequence[str] | None = None):
        self.groups: Groups = without_secrets(plain(groups))
        self.report_to = report_to
        self._waiting: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        expected = [name for name in self._expected(args) if name in SENDERS]
        self._waiting = [name for name in expected if not self._send(name, args)]
        for name in SENDERS.keys() - set(expected):
            if name in sys.modules and name != "tensorboard":  # that one is imported by many and has no run
                self._send(name, args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        waiting, self._waiting = self._waiting, []
        for name in waiting:
            if not self._send(name, args):
                logger.warning("%s has no run; the arguments were not reported to it", name)

    def _expected(self, args: Any) -> Sequence[str]:
        return args.report_to if self.report_to is None else self.report_to

    def _send(self, name: str, args: Any) -> bool:
        """False when the tracker has no run yet. A failure is final, so it counts as sent."""
        try:
            return SENDERS[name](self.groups, args)
        except Exception as error:  # whatever a tracker raises, a report is not worth the training
            logger.warning("%s: the arguments were not reported (%s: %s)", name, type(error).__name__, error)
            return True


def without_secrets(value: Any) -> Any:
    """The value without the keys, at any depth, that look like those of a secret."""
    if isinstance(value, dict):
        return {key: without_secrets(item) for key, item in value.items() if not SECRET.search(key.lower())}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _to_wandb(groups: Groups, args: Any) -> bool:
    import wandb

    if wandb.run is None:
        return False
    wandb.run.config.update(groups, allow_val_change=True)
    return True


def _to_swanlab(groups: Groups, args: Any) -> bool:
    import swanlab

    if not swanlab.has_run():
        return False
    swanlab.config.update(groups)
    return True


def _to_trackio(groups: Groups, args: Any) -> bool:
    import trackio

    if trackio.context_vars.current_run.get() is None:
        return False
    trackio.config.update(groups)
    return True


def _to_tensorboard(groups: Groups, args: Any) -> bool:
    from torch.utils.tensorboard import SummaryWriter

    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir) / "runs"
    with SummaryWriter(log_dir=str(Path(folder) / "arguments")) as writer:
        for name, group in groups.items():
            writer.add_text(name, f"```json\n{json.dumps(group, indent=2)}\n```")
    return True


def _to_mlflow(groups: Groups, args: Any) -> bool:
    import mlflow

    if mlflow.active_run() is None:
        return False
    flat = {f"{group}.{key}": str(value)[:500] for group, values in groups.items() for key, value in values.items()}
    items = list(flat.items())
    for start in range(0, len(items), 100):  # as many as MLflow takes at once
        mlflow.log_params(dict(items[start : start + 100]))
    return True


SENDERS: dict[str, Callable[[Groups, Any], bool]] = {
    "wandb": _to_wandb,
    "swanlab": _to_swanlab,
    "trackio": _to_trackio,
    "tensorboard": _to_tensorboard,
    "mlflow": _to_mlflow,
}
