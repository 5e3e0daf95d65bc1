"""A comparison: two commands run in turn as whole processes, and what their pairs say."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import struct_rusage

PAIRS = 5
TOOLS = Path(sys.executable).with_name("tools")


@dataclass(frozen=True)
class Command:
    """An argument list; `prepare` runs before each time it is started, outside the timing."""

    arguments: Sequence[str | Path]
    prepare: Callable[[], None]


@dataclass(frozen=True)
class Benchmark:
    """Our command against another one. `check` raises unless both did their work, and says what it found."""

    what: str
    against: str
    ours: Command
    theirs: Command
    check: Callable[[], str]


@dataclass(frozen=True)
class Run:
    """One process from start to exit: wall time, and peak resident memory of it and its children."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Result:
    """The runs of a benchmark, pair by pair, and what its check said."""

    benchmark: Benchmark
    pairs: tuple[tuple[Run, Run], ...]
    note: str

    def row(self) -> tuple[str, ...]:
        """The cells of the table under `HEADINGS`."""
        ratios = [ours.seconds / theirs.seconds for ours, theirs in self.pairs]
        sides = tuple(zip(*self.pairs, strict=True))
        seconds = (f"{statistics.median(run.seconds for run in side):.3f}" for side in sides)
        peaks = (f"{max(run.peak_bytes for run in side) / 1e6:.0f}" for side in sides)
        spread = f"{statistics.median(ratios):.3g} ({min(ratios):.3g}-{max(ratios):.3g})"
        return (self.benchmark.what, self.benchmark.against, spread, " / ".join(seconds), " / ".join(peaks), self.note)


HEADINGS = ("A", "B", "A / B (min-max)", "seconds A / B", "peak MB A / B", "checked")


def compare(benchmark: Benchmark, log: Path) -> Result:
    """Run A B A B ..., after one untimed pair that leaves files, libraries and bytecode in the page cache."""
    pairs = []
    for number in range(PAIRS + 1):
        pair = (_run(benchmark.ours, log), _run(benchmark.theirs, log))
        note = benchmark.check()
        pairs.append(pair)
        which = f"pair {number}" if number else "warm-up"
        what = f"{benchmark.what} / {benchmark.against}, {which}"
        print(f"{what}: {pair[0].seconds:.3f} / {pair[1].seconds:.3f} s", file=sys.stderr)
    return Result(benchmark, tuple(pairs[1:]), note)


def _run(command: Command, log: Path) -> Run:
    command.prepare()
    os.sync()  # what came before is on the disk, so that nobody waits for another's writes
    arguments = [str(argument) for argument in command.arguments]
    to_log = [
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    started = time.perf_counter()
    pid = os.posix_spawnp(arguments[0], arguments, os.environ, file_actions=to_log)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(arguments)} failed:\n{log.read_text()}")
    return Run(seconds, peak_bytes(usage))


def peak_bytes(usage: struct_rusage) -> int:
    """The greatest resident memory of a process; the system counts KiB on Linux, bytes on macOS."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def table(results: Sequence[Result]) -> str:
    """The results as aligned columns, one row each."""
    rows = [HEADINGS, *(result.row() for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
