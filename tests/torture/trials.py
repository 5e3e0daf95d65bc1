"""The kinds of trial, and what is tried on which case."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torture import full, kills, loaders
from torture.cases import Case
from torture.laws import Subject
from torture.power import Power
from torture.trace import Runner


@dataclass
class Result:
    """What one kind of trial on one case found: how many trials of which name, what broke, which flushes are needed."""

    kind: str
    case: str
    count: int
    broken: list[str]
    told: str = ""
    flushes: dict[str, bool] = field(default_factory=dict)
    seconds: float = 0


def _kills(subject: Subject) -> Result:
    count, broken = kills.kill_everywhere(subject, kills.calls_of(subject))
    return Result("kill points", subject.case.name, count, broken)


def _kills_of_recovery(subject: Subject) -> Result:
    total, broken = 0, list[str]()
    for case in kills.interrupted(subject):
        again = Subject(case, subject.root, subject.runner)
        count, lost = kills.kill_everywhere(again, kills.calls_of(again))
        total, broken = total + count, broken + lost + list(Power.record(again).cut_everywhere())
    return Result("kill points in recoveries", subject.case.name, total, broken)


def _faults(subject: Subject) -> Result:
    count, broken = kills.fail_everywhere(subject, kills.calls_of(subject))
    return Result("faults", subject.case.name, count, broken)


def _power(subject: Subject) -> Result:
    power = Power.record(subject)
    broken = list(power.cut_everywhere())
    return Result("states after a power cut", subject.case.name, power.states, broken)


def _flushes(subject: Subject) -> Result:
    power, flushes = Power.record(subject), dict[str, bool]()
    for place, needed in power.needed_flushes():
        flushes[place] = flushes.get(place, False) or needed
    return Result("flushes left out", subject.case.name, len(power.sites), [], flushes=flushes)


def _loads(subject: Subject) -> Result:
    kills.kill_everywhere(subject, kills.calls_of(subject))
    count, loads, broken = loaders.load_at_every_stop(subject)
    return Result("loads of half-changed checkpoints", subject.case.name, count, broken, f"{loads} succeed, none mixed")


def _full_disks(subject: Subject) -> Result:
    count, broken = full.fill_everywhere(subject.case, subject.root.with_name("disk"), subject.runner)
    return Result("full disks", subject.case.name, count, broken)


def _users(subject: Subject) -> Result:
    count, broken = full.users_who_may_not_write(subject)
    return Result("refusals to other users", subject.case.name, count, broken)


# Together these reach every call of fsync in the code.
_FLUSHED = (
    *("fix-valuehead flat", "fix-valuehead sharded", "fix-valuehead after bundle-processor", "convert-pissa"),
    *("fix-valuehead lora_pickled", "fix-valuehead flat --output", "fix-valuehead flat --output --overwrite"),
    *("undo fix-valuehead flat", "undo convert-pissa"),
)
# Each way in which several files, or one that every loader reads, change.
_LOADED = (
    *("fix-valuehead sharded", "fix-valuehead sharded_prefixed", "fix-valuehead head_in_a_shard_of_its_own"),
    *("fix-valuehead prefixed", "convert-pissa"),
)


def trials(name: str) -> Iterator[Callable[[Subject], Result]]:
    """What is tried on the case of this name."""
    yield _faults
    yield _power
    yield _kills
    if "--output" not in name and not name.startswith("undo"):  # an undo that was completed is refused when repeated
        yield _kills_of_recovery
    if not any(word in name for word in ("--output", "--copy", "undo")):
        yield _users
    if name in _FLUSHED:
        yield _flushes
    if name in _LOADED:
        yield _loads
    if name.removeprefix("fix-valuehead ") in ("flat", "flat --output", "sharded --copy", "convert-pissa"):
        yield _full_disks


def attempt(trial: Callable[[Subject], Result], case: Case) -> Result:
    """One trial of one case, in a folder of its own."""
    started = time.perf_counter()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=memory))
    folder.chmod(0o755)
    try:
        with Runner(torch=case.torch) as runner:
            result = trial(Subject(case, folder / "run", runner))
    except Exception as error:  # one trial that breaks down fails the run, and not the others
        result = Result(trial.__name__.strip("_"), case.name, 0, [f"{case.name}: {type(error).__name__}: {error}"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.seconds = time.perf_counter() - started
    return result
