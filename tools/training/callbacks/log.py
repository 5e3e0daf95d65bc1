# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""LogCallback: the progress of a run as JSON lines."""

import logging
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import TrainerCallback

from tools.training.callbacks.json_lines import JsonLines, start
from tools.training.callbacks.memory import memory
from tools.training.callbacks.plain import strict
from tools.training.progress import describe

logger = logging.getLogger(__name__)

LOG_FILE = "train_log.jsonl"
# Name in the log <- names the trainers give it, the first that is there.
NAMES = {
    "loss": ("loss",),
    "eval_loss": ("eval_loss",),
    "reward": ("reward", "rewards/chosen", "eval_rewards/chosen"),
    "accuracy": (
        "rewards/accuracies",
        "eval_rewards/accuracies",
        "mean_token_accuracy",
        "eval_mean_token_accuracy",
        "eval_accuracy",
    ),
    "lr": ("learning_rate",),
    "epoch": ("epoch",),
}


class LogCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Writes one strict JSON object a line for all that the Trainer reports, off the training thread.

    Each row holds every metric as reported, and `current_steps`, `total_steps`, `percentage`, `elapsed_time` and
    `remaining_time` ("H:MM:SS", measured from the step training started or resumed at), `loss`, `eval_loss`, `reward`,
    `accuracy`, `lr`, `epoch` where known, `throughput` (tokens per second) and `total_tokens` where the Trainer counts
    tokens, `vram_allocated` and `vram_reserved` or `rss` (GiB), `run_id` and `time` (ISO 8601, UTC). Not-a-number and
    infinity become null, and `non_finite` lists their keys.

    History is never overwritten: a fresh start renames an old log, a resumed run moves the rows beyond its step to a
    file beside. Without `path` the log is `train_log.jsonl` in the output directory.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self.run_id = uuid.uuid4().hex[:12]
        self._rows: JsonLines | None = None
        self._began = monotonic()
        self._first_step = 0
        self._first_tokens = 0
        self._predicted = 0
        self._warned = False

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.path is None:
            self.path = Path(args.output_dir) / LOG_FILE

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = monotonic()
        self._first_step = state.global_step
        self._first_tokens = state.num_input_tokens_seen
        if not state.is_world_process_zero:
            return
        self.close()
        start(self.path or Path(args.output_dir) / LOG_FILE, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        self._write(args, state, logs or {})

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        """About twenty rows an evaluation or prediction: `predicted` of `predictions` batches."""
        self._predicted += 1
        total = _length(eval_dataloader)
        every = 20 if total is None else max(1, total // 20)
        if self._predicted % every == 0 or self._predicted == total:
            self._write(args, state, {"predicted": self._predicted, "predictions": total})

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        self._predicted = 0
        if not self._warned and not any(name.endswith("_loss") for name in metrics or {}):
            self._warned = True
            logger.warning("no eval_loss in evaluation metrics; check label_names")

    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """The Trainer logs no prediction, so its metrics are written here."""
        self._predicted = 0
        self._write(args, state, metrics or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Wait until every row is written; a later row opens the log again."""
        if self._rows:
            self._rows.close()
            self._rows = None

    def _write(self, args: Any, state: Any, metrics: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        if self._rows is None:
            self._rows = JsonLines(self.path or Path(args.output_dir) / LOG_FILE)
        found = {name: next((metrics[key] for key in keys if key in metrics), None) for name, keys in NAMES.items()}
        row = {
            **metrics,
            **self._progress(state),
            **{name: value for name, value in found.items() if value is not None},
            **memory(),
            "run_id": self.run_id,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        record = strict(row)
        self._rows.write(record)
        if "loss" in record and args.disable_tqdm:  # a progress bar says it otherwise
            logger.info(describe(record))

    def _progress(self, state: Any) -> dict[str, Any]:
        """Where the run stands; speed and remaining time come from the steps and tokens of this start alone."""
        elapsed = monotonic() - self._began
        done, total = state.global_step, state.max_steps
        steps, tokens = done - self._first_step, state.num_input_tokens_seen - self._first_tokens
        progress: dict[str, Any] = {"current_steps": done, "total_steps": total, "elapsed_time": _clock(elapsed)}
        if total > 0:
            progress["percentage"] = round(min(done / total, 1) * 100, 2)
        if total > 0 and steps > 0:
            progress["remaining_time"] = _clock(max(total - done, 0) * elapsed / steps)
        if state.num_input_tokens_seen:
            progress["total_tokens"] = state.num_input_tokens_seen
            progress["throughput"] = round(max(tokens, 0) / elapsed, 2) if elapsed else None
        return progress


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _length(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except TypeError:  # a stream has no length
        return None
