"""Training, from a configuration to checkpoints: one process, stopped and resumed by the state of its directory."""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.journal import lock
from tools.checkpoint.report import Report

if TYPE_CHECKING:
    from tools.training.config import TrainConfig
    from tools.training.precision import Precision
    from tools.training.stages import Stage
    from tools.training.state import TrainState

logger = logging.getLogger(__name__)


def train(config: Path, overrides: Sequence[str] = ()) -> Report:
    """Train a model as the configuration says; a run that was stopped or killed goes on from its last checkpoint."""
    began = time.monotonic()
    keep_quiet()
    from tools.training import state
    from tools.training.config import load_config
    from tools.training.fingerprint import fingerprint
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
        if resume and _is_over(resume):
            done, loss = dataclasses.replace(now, state="finished", checkpoint=_best_of(resume, resolved.config)), None
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

    from tools.lora.adapters import INITIAL_ADAPTER, changes_base
    from tools.training.callbacks.chosen import chosen
    from tools.training.callbacks.initial_adapter import require
    from tools.training.lengths import require_room
    from tools.training.model import check_quantization, load_tokenizer, prepare
    from tools.training.precision import chosen_precision
    from tools.training.state import write_state
    from tools.training.trainable import summary

    if resume and changes_base(config.finetuning.init_lora_weights):
        require(config.run_dir / INITIAL_ADAPTER)
    check_quantization(config.model.quantization)
    precision = chosen_precision(config)
    logger.info("precision: %s", precision)
    args = trainer_args(config, stage, arguments, precision)
    tokenizer = load_tokenizer(config.model)
    train_rows, eval_rows = _rows(config, stage, args, tokenizer)
    decoder = stage.load_decoder(config.model, precision.weights)
    if not config.model.quantization:
        decoder = decoder.to(args.device)
    for rows in filter(None, (train_rows, eval_rows)):
        require_room(rows.longest, rows.place, decoder.config.get_text_config())
    args.use_cache = decoder.config.get_text_config().use_cache  # or the Trainer would write its own into config.json

    write_state(config.run_dir, now)  # what was wrong so far leaves the directory free
    set_seed(args.seed)
    shown = _calibration(config, train_rows.dataset, tokenizer)
    model = prepare(decoder, config.finetuning, config.run_dir / INITIAL_ADAPTER, calibration=shown, resume=resume)
    logger.info("trained: %s", summary(model))
    with chosen(config, _run_name(config), resumed=resume is not None) as told:
        datasets = train_rows.dataset, eval_rows and eval_rows.dataset
        model = stage.build_model(model, config.model)
        trainer = stage.build_trainer(model, args, *datasets, tokenizer, told.callbacks)
        trainer.remove_callback(PrinterCallback)  # our log says it, in words
        result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    stopped = told.stop.reason is not None and result.global_step < trainer.state.max_steps
    done = dataclasses.replace(
        now,
        state="stopped" if stopped else "finished",
        steps=result.global_step,
        checkpoint=_last_checkpoint(trainer, save=not stopped),
    )
    return done, result.training_loss


def trainer_args(config: "TrainConfig", stage: "Stage", arguments: dict[str, Any], precision: "Precision") -> Any:
    """The stage's own config object: what the user wrote, over our defaults."""
    import torch

    from tools.training.config_rules import in_step

    defaults = {
        "bf16": precision.bf16 and not arguments.get("fp16"),
        "fp16": precision.fp16 and not arguments.get("bf16"),
        "use_cpu": not torch.accelerator.is_available(),
        "disable_tqdm": not sys.stderr.isatty(),
        "include_num_input_tokens_seen": "non_padding",
        "logging_nan_inf_filter": False,
        **in_step(arguments, config.data.eval_file is not None),
    }
    fixed = {**stage.DEFAULTS, "report_to": "none", "run_name": _run_name(config), "project": config.report.project}
    try:
        return stage.ARGUMENTS(**defaults | arguments | fixed)
    except (ValueError, OverflowError) as error:
        raise CheckpointError("training", " ".join(str(error).split())) from error


def _calibration(config: "TrainConfig", rows: Any, tokenizer: Any) -> Any:
    """The rows that the adapter's init looks at, if it looks at any."""
    from tools.training.config import FROM_DATA

    if config.finetuning.method == "full" or config.finetuning.init_lora_weights not in FROM_DATA:
        return None
    from tools.training.calibration import Calibration

    return Calibration(rows, tokenizer.pad_token_id, config.finetuning.calibration_rows)


def _rows(config: "TrainConfig", stage: "Stage", args: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The rows to train on and to evaluate on, the second None when no evaluation is asked for; reported in the log."""
    is_evaluated = config.data.eval_file is not None or args.eval_strategy != "no"
    loaded = [stage.load_rows(config.data, tokenizer, split) for split in ("train", "eval")[: 1 + is_evaluated]]
    for split, rows in zip(("train", "eval"), loaded, strict=False):
        for line in rows.report:
            logger.info("%s: %s", split, line)
    return loaded[0], loaded[1] if is_evaluated else None


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


def _is_over(checkpoint: Path) -> bool:
    """Whether training ended with this checkpoint: resumed from there, the Trainer would do one step too many."""
    from tools.training.early_stopping import has_ended

    done, planned = _progress(checkpoint)
    return done >= planned or has_ended(checkpoint)


def _best_of(checkpoint: Path, config: "TrainConfig") -> str:
    """The checkpoint that a run ends with, as its last one tells: the best where the best was asked for."""
    written = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    asked = config.finetuning.early_stopping_patience or config.training.get("load_best_model_at_end")
    best = Path(written["best_model_checkpoint"] or checkpoint).name
    return best if asked and (checkpoint.parent / best).is_dir() else checkpoint.name


def _report(
    run: Path, done: "TrainState", *, changed: bool, summary: str, train_loss: float | None = None, seconds: float = 0.0
) -> Report:
    details: dict[str, Any] = {"state": done.state, "steps": done.steps, "checkpoint": done.checkpoint}
    if train_loss is not None:
        details["train_loss"] = round(train_loss, 6)
    return Report("train", str(run), changed, summary, details=details, seconds=round(seconds, 3))


def keep_quiet() -> None:
    """No usage statistics to the Hugging Face hub, and no progress bars where nobody sees them."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # read when huggingface_hub is imported
    import huggingface_hub.constants
    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # if it was imported before
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
        disable_progress_bars()
