"""Where a run stands: RUN/.burnish/train.json, and the checkpoint from which it goes on."""

import json
import logging
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Literal

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.files import replace_synced
from tools.checkpoint.layout import Checkpoint, checkpoints_in
from tools.lora.adapters import INITIAL_ADAPTER

logger = logging.getLogger(__name__)

STATE_FILE = Path(".burnish") / "train.json"
# What the Trainer goes on with besides the weights; without one of them it begins anew there, and does not say so.
_GOES_ON_WITH = ("optimizer.pt", "scheduler.pt", "rng_state*.pth")


class TrainingStopped(CheckpointError):
    """Training was asked to stop: its last step is saved, and the same command goes on from there."""

    exit_code = 4
    label = "stopped"


@dataclass(frozen=True)
class TrainState:
    """What train.json holds. `started` is when the process `pid` began to train (ISO 8601, UTC)."""

    state: Literal["running", "stopped", "finished"]
    fingerprint: Mapping[str, str]
    steps: int
    pid: int
    started: str
    checkpoint: str | None

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def read_state(run: Path) -> TrainState | None:
    """The state of a run, None when it never started. Raises CheckpointError for a file that is no state."""
    from pydantic import TypeAdapter, ValidationError

    file = run / STATE_FILE
    try:
        return TypeAdapter(TrainState).validate_json(file.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join(map(str, (*first["loc"], first["msg"])))
        raise CheckpointError(
            file, f"not the state of a run ({reason})", "choose another output_dir, or remove this one"
        ) from None


def write_state(run: Path, state: TrainState) -> None:
    """Replace train.json as a whole: after a crash it is the old one or the new one."""
    replace_synced(run / STATE_FILE, json.dumps(asdict(state), indent=2).encode() + b"\n")


def running(fingerprint: Mapping[str, str], steps: int, checkpoint: Path | None) -> TrainState:
    """The state of a run that this process trains from now on."""
    name = checkpoint.name if checkpoint else None
    return TrainState("running", fingerprint, steps, os.getpid(), datetime.now(UTC).isoformat(), name)


def check_finished(run: Path, last: TrainState) -> None:
    """Raise CheckpointError when the checkpoint that a run ended with is not there any more, or not whole."""
    assert last.checkpoint is not None
    try:
        whole = Checkpoint.open(run / last.checkpoint).weights
    except CheckpointError as error:
        whole, problem = (), error.problem
    else:
        problem = "no weights"
    if not whole:
        remedy = f"put it back, choose another output_dir, or remove {STATE_FILE} to go on from what is there"
        raise CheckpointError(run, f"is finished, but its {last.checkpoint} is not whole ({problem})", remedy)


def check_startable(run: Path, last: TrainState | None, fingerprint: Mapping[str, str]) -> None:
    """Raise CheckpointError unless a run of this configuration may be in `run`, whose lock this process holds."""
    if last is None:
        if run.is_dir() and (found := checkpoints_in(run)):
            problem = f"holds {found[-1].name}, but not the {STATE_FILE} of a run of Burnish"
            raise CheckpointError(run, problem, "choose another output_dir, or move the checkpoints away")
        return
    if last.state == "running" and last.pid != os.getpid():
        logger.info("%s: process %d, which trained here, is gone; going on from what it saved", run, last.pid)
    keys = sorted(last.fingerprint.keys() | fingerprint.keys())
    differ = [key for key in keys if last.fingerprint.get(key) != fingerprint.get(key)]
    if differ and last.state != "finished" and not checkpoints_in(run):
        _set_aside(run / INITIAL_ADAPTER)  # nothing was trained from it that another configuration could spoil
    elif differ:
        both = [[_shown(prints.get(key)) for prints in (last.fingerprint, fingerprint)] for key in differ]
        changes = ", ".join(f"{key}: {then} -> {now}" for key, (then, now) in zip(differ, both, strict=True))
        remedy = "choose another output_dir, or set them back"
        raise CheckpointError(run, f"was started with another configuration ({changes})", remedy)


def _shown(value: str | None) -> str:
    return "its default" if value is None else f"{value[:15]}..." if value.startswith("sha256:") else value


def _set_aside(folder: Path) -> None:
    if folder.exists():
        kept = folder.with_name(f"{folder.name}.{datetime.now(UTC):%Y%m%dT%H%M%S}")
        folder.rename(kept)
        logger.info("%s: of another configuration, kept as %s", folder, kept.name)


def newest_complete(run: Path) -> Path | None:
    """The checkpoint with the highest number that is whole; each one that is not is named in the log with the reason.

    Whole means: trainer_state.json is there, every weight file has its full length, and optimizer, learning-rate
    schedule and random numbers can be gone on with.
    """
    for checkpoint in reversed(checkpoints_in(run) if run.is_dir() else ()):
        reason = _missing_part(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("%s is not resumed from: %s", checkpoint, reason)
    return None


def _missing_part(checkpoint: Path) -> str | None:
    try:
        opened = Checkpoint.open(checkpoint)
        if opened.read_json("trainer_state.json") is None:
            return "no trainer_state.json, so the save was cut short"
        if not opened.weights:
            return "no weights"
    except CheckpointError as error:
        return str(error)
    for name in (*_GOES_ON_WITH, "scaler.pt"):
        files = sorted(checkpoint.glob(name))
        if not files and name in _GOES_ON_WITH:
            return f"no {name.replace('*', '')}, so training could not go on as it was"
        if damaged := [file.name for file in files if not zipfile.is_zipfile(file)]:  # torch.save writes a zip file
            return f"{damaged[0]} is damaged"
    return None
