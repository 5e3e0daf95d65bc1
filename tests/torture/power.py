"""A step cut from power between any two of its system calls, and with each of its flushes left out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torture.disk import Disk
from torture.image import RECORDS, Image, write_image
from torture.laws import Lost, Subject, fingerprint
from torture.trace import Call


@dataclass
class Power:
    """The recorded calls of one case, and what is known of the trees that a power cut can leave."""

    subject: Subject
    calls: list[Call]
    sites: tuple[str, ...]
    _known: dict[tuple[str, bool], str | None] = field(default_factory=dict)

    @classmethod
    def record(cls, subject: Subject) -> "Power":
        subject.reset()
        ended, calls = subject.runner.calls(subject.arguments, subject.root, sites=True)
        assert ended.code == 0, ended.errors
        assert len(ended.sites) == sum(call.name == "fsync" for call in calls)
        return cls(subject, calls, ended.sites)

    def cut_everywhere(self, without: int | None = None) -> Iterator[str]:
        """Every broken law, one line each, when the power fails at any point; `without` leaves one fsync out."""
        disk, differs = Disk(self.subject.case.before, self.subject.root), without is None
        for call in self.calls:
            if call.name == "fsync" and call.ordinal - 1 == without:
                differs = True
            elif disk.do(call) and differs:
                yield from self._broken(disk, f"power cut after {call.name} #{call.ordinal}", False)
        yield from self._broken(disk, "power cut after the end", True)

    def _broken(self, disk: Disk, when: str, ended: bool) -> Iterator[str]:
        for image in disk.remains():
            key = (fingerprint(image), ended)
            if key not in self._known:
                self._known[key] = self._law_broken_by(image, ended)
            if self._known[key]:
                yield f"{self.subject.case.name}: {when}: {self._known[key]}"

    def _law_broken_by(self, image: Image, ended: bool) -> str | None:
        write_image(image, self.subject.root)
        try:
            self.subject.refuse_mixture(image)
            if ended and f"{self.subject.case.target}/{RECORDS}/commit.json" in image:
                raise Lost("had ended, and a reader that may not write is told that it awaits completion")
            if self.subject.settle() == "old" and ended:
                raise Lost("had ended, and is undone")
        except Lost as lost:
            return str(lost)
        return None

    def needed_flushes(self) -> Iterator[tuple[str, bool]]:
        """For each fsync of the step, where the code calls it, and whether some law breaks when it is left out."""
        for number, site in enumerate(self.sites):
            yield self._place(site), next(self.cut_everywhere(without=number), None) is not None

    def _place(self, site: str) -> str:
        """`journal.py commit: .burnish/stage` for a folder, `staging.py write_content: a file` for a file."""
        callers, _, target = site.partition(" | ")
        caller = next(
            each for each in callers.split(" < ") if not each.startswith("files.py:") or "write_synced" in each
        )
        file, function = caller.split(":")[0], caller.split()[-1]
        if "fsync_folder" not in callers:
            return f"{file} {function}: a file"
        folder = Path(target).relative_to(self.subject.root).as_posix()
        return f"{file} {function}: {re.sub(r'undo/[0-9]+$', 'undo/N', folder)}"

    @property
    def states(self) -> int:
        """How many different trees were checked."""
        return len(self._known)
