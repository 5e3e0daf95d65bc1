"""A disk that is really full, and users who may not write."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torture.cases import Case
from torture.image import Blob, read_image, visible, write_image
from torture.kills import interrupt
from torture.laws import Lost, Subject
from torture.trace import Ended, Runner

NOBODY = 65534
_BLOCK = 4096


@contextmanager
def small_disk(place: Path, nbytes: int) -> Iterator[Path]:
    """A file system of its own with this many bytes, mounted at `place`; needs root."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def fill_everywhere(case: Case, place: Path, runner: Runner) -> tuple[int, list[str]]:
    """Run the step with 0, 1, 2... blocks of space left until it succeeds; the number of disks, and the broken laws."""
    subject = Subject(case, place, runner)
    used = sum(_BLOCK * -(-len(node.data) // _BLOCK) for node in case.before.values() if isinstance(node, Blob))
    broken = []
    for blocks in range(200):
        with small_disk(place, used + blocks * _BLOCK):
            _lay_out(case, place)
            ended = runner.run(subject.arguments)
            if ended.code == 0:
                break
            if ended.code != 1 or not ended.errors.startswith("error: ") or "Traceback" in ended.errors:
                broken.append(f"{case.name}: {blocks} blocks left: ended with {ended.code}: {ended.errors}")
            subprocess.run(["mount", "-o", f"remount,size={used + (64 << 20)}", place], check=True)
            try:
                subject.settle()
            except Lost as lost:
                broken.append(f"{case.name}: {blocks} blocks left: {lost}")
    else:
        broken.append(f"{case.name}: does not succeed with 200 blocks")
    return blocks, broken


def _lay_out(case: Case, place: Path) -> None:
    """`write_image` without removing the mount point."""
    write_image(case.before, place / "tree")
    for entry in (place / "tree").iterdir():
        entry.rename(place / entry.name)
    (place / "tree").rmdir()


def users_who_may_not_write(subject: Subject) -> tuple[int, list[str]]:
    """A read-only checkpoint, whole or with a committed step, in the hands of another user."""
    broken: list[str] = []

    def expect(what: str, ended: Ended, code: int, *words: str) -> None:
        if ended.code != code or not all(word in ended.errors for word in words) or "Traceback" in ended.errors:
            broken.append(f"{subject.case.name}: {what}: ended with {ended.code}: {ended.errors}")

    def as_nobody(*arguments: str) -> Ended:
        return subject.runner.run(list(arguments), user=NOBODY)

    checkpoint = str(subject.root / "checkpoint")
    subject.reset()
    expect("in place", as_nobody(*subject.arguments), 1, "error: ", "not writable")
    expect("inspect", as_nobody("inspect", checkpoint), 0)
    _refuse_change(subject, visible(subject.case.before), broken)
    for name in ("before the commit", "after the commit"):
        interrupt(subject, committed=name == "after the commit")
        left = read_image(subject.root)
        if name == "after the commit":
            awaits = "an interrupted step awaits completion"
            expect(f"{name}, in place", as_nobody(*subject.arguments), 1, "error: ", awaits)
            expect(f"{name}, inspect", as_nobody("inspect", checkpoint), 1, "error: ", awaits)
        else:
            expect(f"{name}, in place", as_nobody(*subject.arguments), 1, "error: ", "not writable")
            expect(f"{name}, inspect", as_nobody("inspect", checkpoint), 0)
        if read_image(subject.root).keys() != left.keys():
            broken.append(f"{subject.case.name}: {name}: another user has changed it")
        try:
            subject.settle()
        except Lost as lost:
            broken.append(f"{subject.case.name}: {name}: {lost}")
    return 6, broken


def _refuse_change(subject: Subject, wanted: dict[str, bytes | str], broken: list[str]) -> None:
    if visible(read_image(subject.root)) != wanted:
        broken.append(f"{subject.case.name}: another user has changed it")
