"""A child process whose output is followed line by line and which is stopped, whole group, when the run is.

The child writes to files and not to pipes: it never waits for a slow reader, and when the run is killed it can still
say what it does during its last save. `tasks/guard.py` stands between the two.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.2
# Prefect kills a cancelled run after 30 s; the guard then goes on waiting for the last save.
GRACE_S = 300.0


class Tail:
    """The lines a growing file has gained since the last look; a line without its end waits for it."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.rest = b""

    def lines(self, *, last: bool = False) -> list[str]:
        """The new lines; with `last`, also what follows the last line end."""
        *whole, self.rest = (self.rest + self.file.read()).replace(b"\r", b"\n").split(b"\n")
        if last:
            whole.append(self.rest)
        return [line.decode(errors="replace") for line in whole if line.strip()]


def run(
    command: Sequence[str],
    *,
    log: Path,
    on_stdout: Callable[[str], object],
    on_stderr: Callable[[str], object],
    on_tick: Callable[[], object] = lambda: None,
    grace_s: float = GRACE_S,
) -> int:
    """Run `command` to its end and return its exit code, 128 + N if signal N killed it.

    Its stderr is appended to `log`. Each line of either stream reaches its function within half a second, and
    `on_tick` is called as often. Whatever is raised meanwhile (a cancelled flow, Ctrl-C, a time-out) first stops the
    child: SIGTERM, up to `grace_s` for a last save, SIGKILL for its whole group.
    """
    with (
        log.open("ab") as stderr,
        log.open("rb") as written,
        tempfile.NamedTemporaryFile() as stdout,
        Path(stdout.name).open("rb") as printed,
    ):
        written.seek(0, os.SEEK_END)
        streams = [(Tail(printed), on_stdout), (Tail(written), on_stderr)]
        guarded = [sys.executable, "-IS", str(GUARD), str(os.getpid()), str(grace_s), *command]
        process = subprocess.Popen(
            guarded, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            while process.poll() is None:
                _pass_on(streams)
                on_tick()
                time.sleep(POLL_S)
        except BaseException:
            _stop(process, grace_s, streams)
            raise
        finally:
            _kill_group(process)
        _pass_on(streams, last=True)
        on_tick()
        return process.returncode if process.returncode >= 0 else 128 - process.returncode


def killed_by(code: int) -> str | None:
    """`SIGKILL` for the exit code 137, and so on; None where no signal ended the process."""
    with contextlib.suppress(ValueError):
        return signal.Signals(code - 128).name
    return None


Streams = Sequence[tuple[Tail, Callable[[str], object]]]


def _pass_on(streams: Streams, *, last: bool = False) -> None:
    for tail, on_line in streams:
        for line in tail.lines(last=last):
            on_line(line)


def _stop(process: "subprocess.Popen[bytes]", grace_s: float, streams: Streams) -> None:
    process.terminate()
    deadline = time.monotonic() + grace_s + 5
    while process.poll() is None and time.monotonic() < deadline:
        _pass_on(streams)
        time.sleep(POLL_S)
    _pass_on(streams, last=True)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the group: a child past its grace, or workers that a killed child left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
