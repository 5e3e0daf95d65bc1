"""A step killed before every system call that changes or orders the tree, or failed at every one that touches it."""

from collections.abc import Iterator
from dataclasses import replace

from torture.cases import Case
from torture.image import read_image, visible
from torture.laws import Lost, Subject, fingerprint
from torture.server import CRASHED
from torture.trace import CHANGES, Call, Ended

# What each error can befall: a full disk those that write, a right that is missing those that name or lock a file.
_NEEDS_SPACE = {"openat", "write", "pwrite64", "copy_file_range", "rename", "link", "linkat", "mkdir", "ftruncate"}
_NEEDS_SPACE |= {"fsync", "symlink", "fallocate"}
_NAMES = {"openat", "rename", "link", "linkat", "mkdir", "rmdir", "unlink", "unlinkat", "chmod", "fchmodat", "flock"}
_NAMES |= {"newfstatat", "stat", "lstat", "statx", "access", "faccessat", "readlink", "statfs", "ftruncate"}
ERRORS = {"ENOSPC": _NEEDS_SPACE, "EACCES": _NAMES, "EIO": None}


def calls_of(subject: Subject) -> list[Call]:
    """The calls that the step makes on its tree, when nothing disturbs it."""
    subject.reset()
    ended, calls = subject.runner.calls(subject.arguments, subject.root)
    assert ended.code == 0, ended.errors
    return [call for call in calls if call.inside]


def kill_everywhere(subject: Subject, calls: list[Call]) -> tuple[int, list[str]]:
    """The number of kill points, and what each broken law says."""
    points = [call for call in calls if call.name in CHANGES]
    broken = []
    for call in points:
        subject.reset()
        ended = subject.runner.disturbed(subject.arguments, call, "signal=KILL")
        assert ended.code == -9, f"{subject.case.name}: not killed at {_told(call)}: {ended}"
        try:
            left = read_image(subject.root)
            subject.stops.setdefault(fingerprint(visible(left)), left)
            subject.refuse_mixture(left)
            subject.settle()
        except Lost as lost:
            broken.append(f"{subject.case.name}: killed before {_told(call)}: {lost}")
    return len(points), broken


def fail_everywhere(subject: Subject, calls: list[Call]) -> tuple[int, list[str]]:
    """The number of faults, and what each broken law says."""
    faults, broken = 0, []
    for call, error in _faults(calls):
        subject.reset()
        ended = subject.runner.disturbed(subject.arguments, call, f"error={error}")
        faults += 1
        try:
            _refuse_crash(ended, call)
            verdict = subject.settle()
            if ended.code == 0 and verdict == "old":
                raise Lost("ended with 0, and nothing is done")
        except Lost as lost:
            broken.append(f"{subject.case.name}: {error} at {_told(call)}: {lost}")
    return faults, broken


def interrupted(subject: Subject) -> Iterator[Case]:
    """The step again, on what a kill just before and just after its commit leaves: it begins with a recovery."""
    for committed, when in ((False, "before"), (True, "after")):
        interrupt(subject, committed=committed)
        name = f"{subject.case.name}, interrupted {when} its commit"
        yield replace(subject.case, name=name, before=read_image(subject.root))


def interrupt(subject: Subject, *, committed: bool) -> None:
    """Leave the tree as a kill just before or just after the commit leaves it."""
    subject.reset()
    _, calls = subject.runner.calls(subject.arguments, subject.root)
    commit = next(n for n, call in enumerate(calls) if call.name == "rename" and _is_commit(*call.arguments))
    if committed:
        commit = next(n for n in range(commit + 1, len(calls)) if calls[n].inside and calls[n].name in CHANGES)
    subject.reset()
    ended = subject.runner.disturbed(subject.arguments, calls[commit], "signal=KILL")
    assert ended.code == -9, ended


def _is_commit(_: object, to: object) -> bool:
    return isinstance(to, bytes) and to.endswith(b"/commit.json")


def _faults(calls: list[Call]) -> Iterator[tuple[Call, str]]:
    for error, names in ERRORS.items():
        for call in calls:
            asks_an_open_file = call.name in ("lseek", "fcntl", "fstat") or b"" in call.arguments
            if (names is None or call.name in names) and not asks_an_open_file:
                yield call, error


def _refuse_crash(ended: Ended, call: Call) -> None:
    if ended.code == CRASHED or "Traceback" in ended.errors:
        raise Lost("crashed: " + " | ".join(ended.errors.strip().splitlines()[-5:]))
    if ended.code == 2 and call.name == "access":
        return  # typer has refused a folder that it may not read
    if ended.code not in (0, 1) or (ended.code == 1 and not ended.errors.startswith("error: ")):
        raise Lost(f"ended with {ended.code}: {ended.errors}")


def _told(call: Call) -> str:
    shown = (each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in call.arguments)
    return f"{call.name} #{call.ordinal} ({', '.join(each[-60:] for each in shown)})"
