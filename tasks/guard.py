"""The process between a run and its child: passes one SIGTERM on, and never lets the child outlive the run.

Run as a file, in a session of its own: `python guard.py PARENT_PID GRACE_S COMMAND...`. It exits with the child's
code, or with 128 + N where signal N killed the child, as a shell does.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

POLL_S = 0.2


def main(parent: int, grace_s: float, command: list[str]) -> int:
    """Run `command` to its end; on SIGTERM, or once `parent` is gone, stop it, and its whole group after `grace_s`.

    SIGTERM is for the command alone: its workers must live while it saves.
    """
    asked = False

    def on_sigterm(*_: object) -> None:
        nonlocal asked
        asked = True

    # A handler and not SIG_IGN, which the child would inherit.
    signal.signal(signal.SIGTERM, on_sigterm)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    stopping_since: float | None = None
    while (code := _poll(child)) is None:
        if stopping_since is None and (asked or os.getppid() != parent):
            stopping_since = time.monotonic()
            child.send_signal(signal.SIGTERM)
        if stopping_since is not None and time.monotonic() - stopping_since > grace_s:
            os.killpg(0, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _poll(child: "subprocess.Popen[bytes]") -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=POLL_S)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
