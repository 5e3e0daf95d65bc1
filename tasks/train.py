"""Training as a task: `tools train` in a child process, its output in the run's log, its end as the task's state."""

import json
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks import child
from tasks.progress import Progress
from tools.checkpoint.errors import CheckpointBusy, CheckpointError
from tools.checkpoint.report import Report
from tools.training.state import TrainingStopped

COMMAND = (sys.executable, "-m", "tools", "train")
TRACEBACK = "Traceback (most recent call last):"
LAST_LINES, LINE_LENGTH = 3, 200


class TrainingFailed(CheckpointError):
    """The child ended without finishing the run."""


# Neither cached nor persisted: whether a run is finished is written in the run itself, and only the child, which
# reads configuration and data, can tell whether it is this run. It says so in seconds, whatever Prefect remembers.
@task(name="train", task_run_name="train {run}", cache_policy=NO_CACHE, persist_result=False)
def train(config: Path, overrides: Sequence[str] = (), *, run: Path) -> Report:
    """Train as `config` says into the directory `run`, or go on where it was stopped; nothing to do when finished.

    Call it from the main thread, so that cancelling the flow reaches it. What training writes to stderr is in the log
    of the run and in `run`/train.out. Raises TrainingStopped, CheckpointBusy, or TrainingFailed with the error or the
    last lines of the child.
    """
    logger = get_run_logger()
    progress = Progress(run / "train_log.jsonl", logger)
    printed: list[str] = []
    written: deque[str] = deque(maxlen=20)

    def on_stdout(line: str) -> None:
        """The report is the one JSON object; what a library prints beside it belongs to the log."""
        if line.startswith("{"):
            printed.append(line)
        else:
            on_stderr(line)

    def on_stderr(line: str) -> None:
        written.append(line)
        logger.info(line)

    run.mkdir(parents=True, exist_ok=True)
    code = child.run(
        [*COMMAND, str(config), *overrides, "--json"],
        log=run / "train.out",
        on_stdout=on_stdout,
        on_stderr=on_stderr,
        on_tick=progress.update,
    )
    if code:
        raise _failure(code, run, list(written))
    report = Report(**json.loads(printed[-1]))
    logger.info("%s: %s", report.path, report.summary)
    return report


def _failure(code: int, run: Path, written: Sequence[str]) -> CheckpointError:
    """What the exit code of the child means, in the child's own words where it has said them."""
    kind = {CheckpointBusy.exit_code: CheckpointBusy, TrainingStopped.exit_code: TrainingStopped}.get(
        code, TrainingFailed
    )
    signal = child.killed_by(code)
    if not signal and (errors := _errors(written, f"{kind.label}: ")):
        first, *others = [line.partition(": ")[::2] for line in errors]
        return kind(*first, others=tuple(CheckpointError(*each) for each in others))
    end = f"was killed by {signal}" if signal else f"ended with exit code {code}"
    said = " | ".join(line.strip()[:LINE_LENGTH] for line in written[-LAST_LINES:])
    return kind(run, f"training {end}; its last lines: {said}", f"see {run / 'train.out'}")


def _errors(written: Sequence[str], label: str) -> list[str]:
    """The last lines in a row that begin with `label`, unless a traceback follows them: those are of a library."""
    errors: list[str] = []
    for line, before in zip(written, ("", *written), strict=False):
        if line == TRACEBACK or (line.startswith(label) and not before.startswith(label)):
            errors = []
        if line.startswith(label):
            errors.append(line.removeprefix(label))
    return errors
