"""Training in several processes of this machine: started together, stopped together, ended together."""

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.report import Report
from tools.training.ranks import RankGone, RankHangs, of_rank, plain
from tools.training.state import TrainingStopped
from tools.training.stderr import log_to_stderr

logger = logging.getLogger(__name__)

POLL_S = 0.2
# After the first error, until the others have noticed it and have ended by themselves.
GRACE_S = 30.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Outcome:
    """How one process has ended: with a report, or with an error and the traceback of one that is no user's."""

    rank: int
    report: Report | None = None
    error: CheckpointError | None = None
    traceback: str = ""


def launched(config: Path, overrides: Sequence[str], run: Path, processes: int, *, cpu: bool) -> Report:
    """Train in so many processes of this machine, and return or raise what one process would.

    A signal is passed on: the first lets all of them save and stop, a second ends them at once. The configuration must
    have been checked. Raises CheckpointError, naming it, when a process is killed.
    """
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore

    if not cpu:
        _require_devices(processes)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = mp.get_context("spawn").SimpleQueue()
    level = logging.getLogger("tools").getEffectiveLevel()
    arguments = (processes, store.port, level, config, list(overrides), run, outcomes)
    with _without_interrupts():
        started = mp.start_processes(_train, arguments, processes, join=False, start_method="spawn").processes
    try:
        with _passed_on(started) as asked:
            heard, killed = _followed(started, outcomes)
    finally:
        for process in started:
            process.kill()
            process.join()
    return _result(run, heard, killed, asked)


def _followed(started: Sequence[Any], outcomes: Any) -> tuple[list[Outcome], dict[int, str]]:
    """Wait for the end of all: what they have reported, in order, and which signals have ended which of them."""
    heard: list[Outcome] = []
    ended: set[int] = set()  # by us, each of which the others need not wait for
    deadline: float | None = None
    while alive := [process for process in started if process.is_alive()]:
        connection.wait([process.sentinel for process in alive], timeout=POLL_S)
        heard += _drained(outcomes)
        failed = any(one.error and not isinstance(one.error, TrainingStopped) for one in heard)
        if deadline is None and (failed or any(process.exitcode for process in started)):
            deadline = monotonic() + GRACE_S
        reported = {outcome.rank for outcome in heard}
        hangs = any(isinstance(outcome.error, RankHangs) for outcome in heard)
        is_late = deadline is not None and monotonic() > deadline
        for number, process in enumerate(started):
            if process.is_alive() and (is_late or (hangs and number not in reported)):
                process.kill()
                ended.add(number)
    codes = {number: process.exitcode for number, process in enumerate(started) if number not in ended}
    return heard + list(_drained(outcomes)), {n: signal.Signals(-code).name for n, code in codes.items() if code < 0}


def _drained(outcomes: Any) -> Iterator[Outcome]:
    while not outcomes.empty():
        yield outcomes.get()


def _result(run: Path, heard: Sequence[Outcome], killed: dict[int, str], asked: Sequence[int]) -> Report:
    """The one end that the ends of all processes make."""
    for outcome in heard:
        if outcome.report:
            return outcome.report
    first = next((outcome for outcome in heard if outcome.error), None)
    follows = first is None or first.traceback or isinstance(first.error, RankGone)  # of what befell another process
    if asked and follows:
        _end_by(asked[0])
    named = [f"rank {number} was killed by {name}" for number, name in killed.items() if not first or name != "SIGABRT"]
    if named and follows:
        remedy = "did the memory run out? The same command goes on from the last checkpoint"
        raise CheckpointError(run, ", ".join(named), remedy)
    if first is None or first.error is None:
        raise CheckpointError(run, "training has ended without a report", "its last lines say why")
    if first.traceback:
        logger.error("%s", first.traceback)
    raise first.error


def _end_by(number: int) -> None:
    """What the signal does to one process that has nothing to save."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started within take no Ctrl-C of the terminal: it is this one that passes it on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _passed_on(started: Sequence[Any]) -> Iterator[list[int]]:
    """Signals that this process gets within, each passed on to the others."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for process in started:
            process.kill() if len(asked) > 1 else process.terminate()

    previous = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _train(
    rank: int, processes: int, port: int, level: int, config: Path, overrides: list[str], run: Path, outcomes: Any
) -> None:
    """One of the processes, from its first line to its last."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # the report is printed by the process that was called
    os.environ.update(_environment(rank, processes, port))
    log_to_stderr(level)
    import torch

    from tools.training.train import train

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        report = train(config, overrides)
    except (CheckpointError, OSError) as error:
        outcomes.put(Outcome(rank, error=of_rank(plain(error), rank)))
        sys.exit(1)
    except Exception as error:
        problem = f"training ended with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        told = of_rank(CheckpointError(run, problem, "its traceback is above"), rank)
        outcomes.put(Outcome(rank, error=told, traceback=traceback.format_exc()))
        sys.exit(1)
    if rank == 0:
        outcomes.put(Outcome(rank, report))


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun tells each process; the store at `port` is that of the process that was called."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def _end_with_parent() -> None:
    """However the process that was called ends, its own go with it."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _require_devices(processes: int) -> None:
    """Raise CheckpointError when there are GPUs, but fewer than processes: two cannot share one."""
    import torch

    found = torch.cuda.device_count()
    if 0 < found < processes:
        remedy = f"write launch.processes: {found}, or training.use_cpu: true"
        raise CheckpointError("launch.processes", f"is {processes}, but this machine has {found} GPUs", remedy)
