"""Training, from a configuration to checkpoints: one run, stopped and resumed by the state of its directory."""

import contextlib
import dataclasses
import errno
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
    from tools.training.loading import Loaded
    from tools.training.ranks import Peers
    from tools.training.stages import Stage
    from tools.training.state import TrainState

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a configuration asks for, checked: its groups, its stage and the arguments of the stage's config class."""

    config: "TrainConfig"
    stage: "Stage"
    arguments: dict[str, Any]
    prints: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins: with the state `now`, from the checkpoint `resume`, or not at all, since it is `over`."""

    now: "TrainState"
    resume: Path | None = None
    over: bool = False


def train(config: Path, overrides: Sequence[str] = ()) -> Report:
    """Train a model as the configuration says; a run that was stopped or killed goes on from its last checkpoint."""
    began = time.monotonic()
    keep_quiet()
    from tools.training.launch import launched
    from tools.training.ranks import is_one_of_several, joined
    from tools.training.state import TrainingStopped, write_state

    plan = _plan(config, overrides)
    run, launch, connection = plan.config.run_dir, plan.config.launch, _connection(plan)
    if launch.processes > 1 and not is_one_of_several():
        return launched(config, overrides, run, launch.processes, cpu=connection["cpu"])
    with joined(run, launch.timeout, **connection) as peers, contextlib.ExitStack() as held:
        start = peers.decided(lambda: _start(plan, held), "the start of the run")
        if start.over:
            return _report(run, start.now, changed=False, summary="already trained; nothing to do")
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # stdout is for the report alone
            warnings.simplefilter("ignore", FutureWarning)  # of the libraries, to each other
            done, loss = _run(plan, start, peers)
        if peers.rank == 0:
            write_state(run, done)
    if done.state == "stopped":
        saved = f"{done.checkpoint} is saved" if done.checkpoint else "nothing was saved yet"
        stopped = TrainingStopped(run, f"stopped at step {done.steps}; {saved}", "the same command goes on from here")
        raise peers.told_once(stopped)
    before = f", the first {start.now.steps} of them before" if start.now.steps else ""
    summary = f"trained {done.steps} steps{before}, loss {loss:.4g}; {done.checkpoint}"
    return _report(run, done, changed=True, summary=summary, train_loss=loss, seconds=time.monotonic() - began)


def _plan(config: Path, overrides: Sequence[str]) -> Plan:
    """The configuration, read and checked. Raises CheckpointError for all that is wrong with it alone."""
    from tools.training import ranks
    from tools.training.config import load_config
    from tools.training.fingerprint import fingerprint
    from tools.training.stages import load_stage
    from tools.training.trainer_arguments import trainer_arguments

    resolved = load_config(config, overrides)
    stage = load_stage(resolved.config.finetuning.stage)
    arguments = trainer_arguments(resolved, stage.ARGUMENTS)
    return Plan(resolved.config, stage, arguments, fingerprint(resolved.config, stage.ARGUMENTS, ranks.world_size()))


def _connection(plan: Plan) -> dict[str, Any]:
    """How the tensors of several processes travel: as transformers would have it."""
    import torch

    return {
        "cpu": plan.arguments.get("use_cpu", not torch.accelerator.is_available()),
        "backend": plan.arguments.get("ddp_backend"),
        "collective_s": plan.arguments.get("ddp_timeout", plan.config.launch.timeout),
    }


def _start(plan: Plan, held: contextlib.ExitStack) -> Start:
    """Look at the directory of the run, whose lock is in `held` afterwards. Raises CheckpointError where it is taken,
    or of another run."""
    from tools.training import state

    run = plan.config.run_dir
    for source in (plan.config.model.model_name_or_path, plan.config.data.train_file, plan.config.data.eval_file):
        if source is not None and run.is_dir() and Path(source).is_dir() and run.samefile(source):
            problem = "is what the run is made from, and training would write into it"
            raise CheckpointError(run, problem, "choose another output_dir")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(run, (error.strerror or str(error)).lower(), "choose another output_dir") from error
    held.enter_context(lock(run))
    last = state.read_state(run)
    state.check_startable(run, last, plan.prints)
    if last and last.state == "finished":
        state.check_finished(run, last)
        return Start(last, over=True)
    resume = state.newest_complete(run)
    now = state.running(plan.prints, _progress(resume)[0] if resume else 0, resume)
    if resume and _is_over(resume):
        done = dataclasses.replace(now, state="finished", checkpoint=_best_of(resume, plan.config))
        state.write_state(run, done)
        return Start(done, over=True)
    return Start(now, resume)


def _run(plan: Plan, start: Start, peers: "Peers") -> tuple["TrainState", float]:
    """Load data and model, train, and say how it ended: the new state and the mean loss of the steps done here."""
    from transformers import PrinterCallback, set_seed

    from tools.training.callbacks.chosen import chosen
    from tools.training.loading import load, run_name
    from tools.training.state import write_state
    from tools.training.trainable import summary

    config, stage = plan.config, plan.stage
    loaded = peers.agreed(lambda: load(config, stage, plan.arguments, start.resume), "the model and the rows")
    args, tokenizer, datasets = loaded.args, loaded.tokenizer, (loaded.train_rows, loaded.eval_rows)
    if peers.rank == 0:
        write_state(config.run_dir, start.now)  # what was wrong so far leaves the directory free
    set_seed(args.seed)
    model = _prepared(config, loaded, start.resume, peers)
    logger.info("trained: %s", summary(model))
    with chosen(config, run_name(config), resumed=start.resume is not None) as told:
        model = stage.build_model(model, config.model)
        try:
            trainer = stage.build_trainer(model, args, *datasets, tokenizer, told.callbacks)
        except (ImportError, TypeError, ValueError) as error:
            raise CheckpointError("training", " ".join(str(error).split())) from error
        trainer.remove_callback(PrinterCallback)  # our log says it, in words
        result = _trained(trainer, start.resume)
    stopped = told.stop.reason is not None and result.global_step < trainer.state.max_steps
    done = dataclasses.replace(
        start.now,
        state="stopped" if stopped else "finished",
        steps=result.global_step,
        checkpoint=_last_checkpoint(trainer, stopped=stopped),
    )
    return done, result.training_loss


def _trained(trainer: Any, resume: Path | None) -> Any:
    """What the Trainer says at the end. Raises CheckpointError for settings of the libraries that do not go together,
    which they tell when they set themselves up, and for a disk that is full."""
    try:
        return trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except CheckpointError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if _is_full(error, said):
            raise _not_written(Path(trainer.args.output_dir), said) from error
        if trainer.optimizer is None or trainer.lr_scheduler is None:
            raise CheckpointError("training", said) from error
        raise


def _is_full(error: Exception, said: str) -> bool:
    """Whether a file could not grow: as Python says it, as libraries written in Rust do, and as torch.save does."""
    by_number = isinstance(error, OSError) and error.errno in _FULL
    by_torch = "PytorchStreamWriter" in said or ("inline_container" in said and "unexpected pos" in said)
    return by_number or by_torch or any(f"os error {number}" in said for number in _FULL)


def _not_written(run: Path, reason: str) -> CheckpointError:
    from tools.training.state import newest_complete

    whole = newest_complete(run)
    kept = f"{whole.name} is whole, and the same command goes on from it" if whole else "no checkpoint was saved yet"
    return CheckpointError(run, f"could not be written to ({reason})", f"make room; {kept}")


def _prepared(config: "TrainConfig", loaded: "Loaded", resume: Path | None, peers: "Peers") -> Any:
    """The decoder as it is trained. An init that changes the base is computed by the first process and kept; the others
    make theirs from what it has kept."""
    from tools.lora.adapters import INITIAL_ADAPTER, changes_base
    from tools.training.callbacks.initial_adapter import require
    from tools.training.loading import calibration
    from tools.training.model import prepare

    folder = config.run_dir / INITIAL_ADAPTER
    shown = calibration(config, loaded.train_rows, loaded.tokenizer)
    is_kept = config.finetuning.method == "lora" and changes_base(config.finetuning.init_lora_weights)

    def prepared() -> Any:
        if is_kept and peers.rank:
            require(folder)  # on a machine that does not see the directory of the run, it would be another one
        return prepare(loaded.decoder, config.finetuning, folder, calibration=shown, resume=resume)

    return (peers.in_turn if is_kept and not resume else peers.agreed)(prepared, "the adapter")


def _last_checkpoint(trainer: Any, *, stopped: bool) -> str | None:
    """The best checkpoint where the best was asked for, else that of the last step, saved now if it was not.

    Of a run that was stopped it is the newest, from which it will go on.
    """
    from tools.checkpoint.layout import checkpoints_in

    run = Path(trainer.args.output_dir)
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
        return Path(trainer.state.best_model_checkpoint).name
    if stopped:
        return next((path.name for path in reversed(checkpoints_in(run))), None)
    name = f"checkpoint-{trainer.state.global_step}"
    if not (run / name).is_dir():
        trainer.save_model(str(run / name))
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
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
