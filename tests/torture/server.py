"""A process that has imported and run the step once, and forks a child for each further run.

One JSON object a line comes in: `arguments` of the `tools` command, and whether the child shall `stop` before it starts
(so that strace can be attached), name the caller of each fsync (`sites`), or drop its rights (`user`). One goes out
when the child has stopped, `{"pid": ...}`, and one when it has ended: `{"code": ..., "errors": ..., "sites": ...}`.
"""

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

CRASHED = 70


def main() -> None:
    """Serve until the other side closes its end."""
    if "torch" in sys.argv:
        import torch  # noqa: F401
    import tools.cli  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")  # stdout itself is where steps print their reports
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("warm"):
            with tempfile.TemporaryFile() as nowhere:
                print(json.dumps({"code": _run(request["arguments"], nowhere)}), file=answers, flush=True)
            gc.freeze()
            continue
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as sites:
            pid = os.fork()
            if pid == 0:
                _child(request, errors, sites)
            if request.get("stop"):
                os.waitpid(pid, os.WUNTRACED)
                print(json.dumps({"pid": pid}), file=answers, flush=True)
            _, status = os.waitpid(pid, 0)
            told = [file.read().decode() for file in (errors, sites) if file.seek(0) == 0]
            answer = {"code": os.waitstatus_to_exitcode(status), "errors": told[0], "sites": told[1].splitlines()}
            print(json.dumps(answer), file=answers, flush=True)


def _child(request: dict[str, Any], errors: BinaryIO, sites: BinaryIO) -> None:
    os.dup2(1, 0)
    os.dup2(errors.fileno(), 2)
    callers = _name_callers() if request.get("sites") else []
    if request.get("user"):
        os.setgroups([])
        os.setgid(request["user"])
        os.setuid(request["user"])
    if request.get("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    code = _run(request["arguments"], errors)
    sites.write("\n".join(callers).encode())
    sites.flush()
    os._exit(code)


def _run(arguments: list[str], errors: BinaryIO) -> int:
    """The exit code of the command; CRASHED when anything but an error line would have ended it."""
    from tools.cli import app

    try:
        app(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:
        errors.write(traceback.format_exc().encode())
        errors.flush()
        return CRASHED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _name_callers() -> list[str]:
    """A list that grows by a line for each os.fsync: who called it, innermost first, and for what."""
    flush, callers = os.fsync, list[str]()

    def fsync(target: int) -> None:
        frame: FrameType | None = sys._getframe(1)
        names: list[str] = []
        while frame and len(names) < 4:
            names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        callers.append(f"{' < '.join(names)} | {Path(f'/proc/self/fd/{target}').readlink()}")
        flush(target)

    os.fsync = fsync  # type: ignore[assignment]
    return callers


if __name__ == "__main__":
    main()
