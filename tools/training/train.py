"""Training, from a configuration to checkpoints: one process, stopped and resumed by the state of its directory."""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.journal import lock
from tools.checkpoint.report import Report

if TYPE_CHECKING:
    from tools.training.callbacks import StopCallback
    from tools.training.config import TrainConfig
    from tools.training.stages import Stage
    from tools.training.state import TrainState

logger = logging.getLogger(__name__)


def train(config: Path, overrides: Sequence[str] = ()) -> Report:
    """Train a model as the configuration says; a run that was stopped or killed goes on from its last checkpoint."""
    began = time.monotonic()
    _keep_quiet()
    from tools.training import state
    from tools.training.config import fingerprint, load_config
    from tools.training.stages import load_stage
    from tools.training.trainer_arguments import trainer_arguments

    resolved = load_config(config, overrides)
    stage = load_stage(resolved.config.finetuning.stage)
    arguments = trainer_arguments(resolved, stage.ARGUMENTS)
    run, prints = resolved.config.run_dir, fingerprint(resolved.config)

    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(run, (error.strerror or str(error)).lower(), "choose another output_dir") from error
    with lock(run):
        last = state.read_state(run)
        state.check_startable(run, last, prints)
        if last and last.state == "finished":
            return _report(run, last, changed=False, summary="already trained; nothing to do")
        resume = state.newest_complete(run)
        now = state.running(prints, _progress(resume)[0] if resume else 0, resume)
        if resume and _is_last_step(resume):
            done, loss = dataclasses.replace(now, state="finished"), None
        else:
            with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # stdout is for the report alone
                warnings.simplefilter("ignore", FutureWarning)  # of the libraries, to each other
                done, loss = _run(resolved.config, stage, arguments, resume, now)
        state.write_state(run, done)
    if done.state == "stopped":
        saved = f"{done.checkpoint} is saved" if done.checkpoint else "nothing was saved yet"
        raise state.TrainingStopped(run, f"stopped at step {done.steps}; {saved}", "the same command goes on from here")
    if loss is None:
        return _report(run, done, changed=False, summary="already trained; nothing to do")
    summary = f"trained {done.steps} steps, loss {loss:.4g}; {done.checkpoint}"
    return _report(run, done, changed=True, summary=summary, train_loss=loss, seconds=time.monotonic() - began)


def _run(
    config: "TrainConfig", stage: "Stage", arguments: dict[str, Any], resume: Path | None, now: "TrainState"
) -> tuple["TrainState", float]:
    """Load data and model, train, and say how it ended: the new state and the mean loss of the steps done here."""
    from transformers import PrinterCallback, set_seed

    from tools.checkpoint.adapters import INITIAL_ADAPTER, changes_base
    from tools.training.callbacks.initial_adapter import require
    from tools.training.lengths import require_room
    from tools.training.model import chosen_dtype, load_tokenizer, prepare
    from tools.training.state import write_state

    if resume and changes_base(config.finetuning.init_lora_weights):
        require(config.run_dir / INITIAL_ADAPTER)
    dtype = chosen_dtype(config.model.dtype)
    args = _trainer_args(config, stage, arguments, dtype)
    tokenizer = load_tokenizer(config.model)
    train_rows, eval_rows = _rows(config, stage, args, tokenizer)
    decoder = stage.load_decoder(config.model, dtype).to(args.device)
    for rows in filter(None, (train_rows, eval_rows)):
        require_room(rows.longest, rows.place, decoder.config)
    args.use_cache = decoder.config.use_cache  # or the Trainer would write its own into config.json

    write_state(config.run_dir, now)  # what was wrong so far leaves the directory free
    set_seed(args.seed)
    model = prepare(decoder, config.finetuning, config.run_dir / INITIAL_ADAPTER)
    with _callbacks(config) as (callbacks, stop):
        datasets = train_rows.dataset, eval_rows and eval_rows.dataset
        trainer = stage.build_trainer(stage.build_model(model, config.model), args, *datasets, tokenizer, callbacks)
        trainer.remove_callback(PrinterCallback)  # our log says it, in words
        result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    stopped = stop.reason is not None and result.global_step < trainer.state.max_steps
    done = dataclasses.replace(
        now,
        state="stopped" if stopped else "finished",
        steps=result.global_step,
        checkpoint=_last_checkpoint(trainer, save=not stopped),
    )
    return done, result.training_loss


def _trainer_args(config: "TrainConfig", stage: "Stage", arguments: dict[str, Any], dtype: str) -> Any:
    """The stage's own config object: what the user wrote, over our defaults. Computes in the dtype of the weights."""
    import torch

    if dtype == "float16" and config.finetuning.method == "full":
        raise CheckpointError(
            "model.dtype", "float16 weights cannot be trained in full", "use float32 with training.fp16=true"
        )
    defaults = {
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "use_cpu": not torch.accelerator.is_available(),
        "disable_tqdm": not sys.stderr.isatty(),
        "include_num_input_tokens_seen": "non_padding",
    }
    fixed = {**stage.DEFAULTS, "report_to": "none", "run_name": _run_name(config), "project": config.report.project}
    try:
        return stage.ARGUMENTS(**defaults | arguments | fixed)
    except (ValueError, OverflowError) as error:
        raise CheckpointError("training", " ".join(str(error).split())) from error


def _rows(config: "TrainConfig", stage: "Stage", args: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The rows to train on and to evaluate on, the second None when no evaluation is asked for; reported in the log."""
    is_evaluated = config.data.eval_file is not None or args.eval_strategy != "no"
    loaded = [stage.load_rows(config.data, tokenizer, split) for split in ("train", "eval")[: 1 + is_evaluated]]
    for split, rows in zip(("train", "eval"), loaded, strict=False):
        for line in rows.report:
            logger.info("%s: %s", split, line)
    return loaded[0], loaded[1] if is_evaluated else None


@contextlib.contextmanager
def _callbacks(config: "TrainConfig") -> Iterator[tuple[list[Any], "StopCallback"]]:
    """What belongs to every run, and what only some need; log and signal handlers are put in order when it ends.

    None of them repairs a checkpoint: they keep what nobody could compute later.
    """
    from tools.checkpoint.adapters import changes_base
    from tools.training.callbacks import (
        InitialAdapterCallback,
        LogCallback,
        ReporterCallback,
        StopCallback,
        TrainedLogitsCallback,
    )
    from tools.training.callbacks.trackers import tracker_callbacks

    trackers = tracker_callbacks(config.report.report_to, config.report.project, _run_name(config))
    reporter = ReporterCallback(config.model_dump(), report_to=[tracker.name for tracker in trackers])
    is_changed = config.finetuning.method == "lora" and changes_base(config.finetuning.init_lora_weights)
    keepers = [*([InitialAdapterCallback()] if is_changed else []), TrainedLogitsCallback()]
    with contextlib.closing(LogCallback()) as log, contextlib.closing(StopCallback()) as stop:
        yield [*trackers, log, reporter, *keepers, stop], stop


def _run_name(config: "TrainConfig") -> str:
    return config.report.run_name or config.run_dir.name


def _last_checkpoint(trainer: Any, *, save: bool) -> str | None:
    """The best checkpoint where the best was asked for, else the newest; saved now when none was, unless stopped."""
    from tools.checkpoint.layout import checkpoints_in

    run = Path(trainer.args.output_dir)
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
        return Path(trainer.state.best_model_checkpoint).name
    if found := checkpoints_in(run):
        return found[-1].name
    if not save:
        return None
    name = f"checkpoint-{trainer.state.global_step}"
    trainer.save_model(str(run / name))
    return name


def _progress(checkpoint: Path) -> tuple[int, int]:
    """Steps done and steps planned, as the checkpoint's trainer_state.json has them."""
    written = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return written["global_step"], written["max_steps"]


def _is_last_step(checkpoint: Path) -> bool:
    """Resumed from there, the Trainer would do one step too many."""
    done, planned = _progress(checkpoint)
    return done >= planned


def _report(
    run: Path, done: "TrainState", *, changed: bool, summary: str, train_loss: float | None = None, seconds: float = 0.0
) -> Report:
    details: dict[str, Any] = {"state": done.state, "steps": done.steps, "checkpoint": done.checkpoint}
    if train_loss is not None:
        details["train_loss"] = round(train_loss, 6)
    return Report("train", str(run), changed, summary, details=details, seconds=round(seconds, 3))


def _keep_quiet() -> None:
    """No usage statistics to the Hugging Face hub, and no progress bars where nobody sees them."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # read when huggingface_hub is imported
    import huggingface_hub.constants
    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # if it was imported before
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
        disable_progress_bars()
