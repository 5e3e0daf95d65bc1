"""Runs of a step under strace: its system calls as values, and one of them made to kill or to fail."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from codecs import escape_decode
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

# Every call that can change a tree or order its changes, and those that move the position of a file.
CHANGES = (
    *("openat", "open", "creat", "write", "pwrite64", "writev", "pwritev", "copy_file_range", "sendfile"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "unlink", "unlinkat", "mkdir"),
    *("mkdirat", "rmdir", "truncate", "ftruncate", "fallocate", "fsync", "fdatasync", "sync_file_range", "flock"),
    *("chmod", "fchmod", "fchmodat", "chown", "fchown", "fchownat", "utimensat", "setxattr", "fsetxattr"),
)
READS = (
    *("read", "pread64", "lseek", "close", "getdents64", "stat", "lstat", "newfstatat", "fstat", "statx", "access"),
    *("faccessat", "faccessat2", "readlink", "readlinkat", "statfs", "fstatfs", "mmap", "fcntl"),
)
_CALL = re.compile(rb"\d+ +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+|\?)(?P<rest>.*)")
_ARGUMENT = re.compile(
    rb'"(?P<text>(?:[^"\\]|\\.)*)"|(?P<fd>AT_FDCWD|\d+)<[^>]*>(?:\(deleted\))?|\[(?P<place>\d+)[^\]]*\]|\{[^}]*\}|(?P<word>[^,\s]+)'
)


@dataclass(frozen=True)
class Call:
    """One system call: its name, which one of that name it was in this run, its arguments and its result."""

    name: str
    ordinal: int
    arguments: tuple[bytes | int | str, ...]
    result: int
    inside: bool  # whether it names something under the tree


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code (negative: a signal), what it said on stderr, the callers of fsync."""

    code: int
    errors: str
    sites: tuple[str, ...] = ()


class Runner:
    """Runs commands in children of one warm server; with `strace`, watched or disturbed in the kernel."""

    def __init__(self, *, torch: bool = False) -> None:
        if shutil.which("strace") is None:
            raise RuntimeError("strace is not installed, and nothing can be proven without it")
        self.always: tuple[str, ...] = ()  # options of every strace
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py")), *(["torch"] if torch else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait()

    def warm(self, arguments: list[str]) -> None:
        """Run the command in the server itself, so that every later child has all modules loaded."""
        code = self._ask({"arguments": arguments, "warm": True})["code"]
        assert code == 0, f"{arguments} ended with {code}"

    def run(self, arguments: list[str], strace: list[str] | None = None, **options: Any) -> Ended:
        """Run a command in a child; `strace` are options for a strace that is attached before its first call."""
        request = {"arguments": arguments, "stop": strace is not None, **options}
        answer = self._ask(request)
        if strace is not None:
            watch = subprocess.Popen(
                ["strace", "-f", "-p", str(answer["pid"]), *self.always, *strace],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            assert watch.stderr
            attached = watch.stderr.readline()
            assert b"attached" in attached, f"strace: {attached!r}"
            os.kill(answer["pid"], signal.SIGCONT)
            answer = self._answer()
            watch.communicate()
        return Ended(answer["code"], answer["errors"], tuple(answer["sites"]))

    def calls(self, arguments: list[str], root: Path, *, sites: bool = False) -> tuple[Ended, list[Call]]:
        """Run a command, and every file-system call it made; with `sites`, who called each fsync."""
        with tempfile.NamedTemporaryFile() as out:
            names = f"trace={','.join(f'?{name}' for name in CHANGES + READS)}"
            options = ["-y", "-s", str(1 << 28), "-o", out.name, "-e", names, "-e", "signal=none"]
            ended = self.run(arguments, options, sites=sites)
            return ended, parse(Path(out.name).read_bytes(), root)

    def disturbed(self, arguments: list[str], call: Call, how: str) -> Ended:
        """Run a command with the one call disturbed: `signal=KILL` before it, or `error=ENOSPC` instead of it."""
        inject = f"inject={call.name}:{how}:when={call.ordinal}"
        return self.run(arguments, ["-o", os.devnull, "-e", f"trace=?link,linkat,{call.name}", "-e", inject])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._server.stdin
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout
        line = self._server.stdout.readline()
        assert line, "the server has died"
        answer: dict[str, Any] = json.loads(line)
        return answer


def parse(trace: bytes, root: Path) -> list[Call]:
    """The calls of a trace made with `-y`, in their order."""
    calls, count = [], Counter[str]()
    for line in trace.splitlines():
        match = _CALL.fullmatch(line)
        if match is None:
            assert b"+++" in line or b"---" in line, f"not understood: {line[:200]!r}"
            continue
        name = match["name"].decode()
        count[name] += 1
        arguments = tuple(_argument(found) for found in _ARGUMENT.finditer(match["arguments"]))
        result = int(match["result"]) if match["result"] != b"?" else 0
        paths = arguments if name not in ("write", "pwrite64", "read", "pread64") else ()
        inside = b"<" + os.fsencode(root) in line or any(
            isinstance(each, bytes) and each.startswith(os.fsencode(root)) for each in paths
        )
        calls.append(Call(name, count[name], arguments, result, inside))
    return calls


def _argument(found: re.Match[bytes]) -> bytes | int | str:
    if found["text"] is not None:
        return escape_decode(found["text"])[0]
    number = found["fd"] or found["place"] or found["word"]
    if number and number.isdigit():
        return int(number)
    return number.decode() if number else found[0].decode()
