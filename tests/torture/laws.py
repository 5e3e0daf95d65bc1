"""What must hold of a tree after any interruption: the old or the new one, and nothing lost or left behind."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from tools.checkpoint.layout import Checkpoint
from torture.cases import Case
from torture.image import RECORDS, Blob, Image, Node, read_image, under, visible, write_image
from torture.mixture import loaded
from torture.trace import Runner


class Lost(AssertionError):
    """A law that an interruption broke."""


@dataclass
class Subject:
    """A case that runs at one place, with the trees before and after it."""

    case: Case
    root: Path
    runner: Runner
    after: Image = field(default_factory=dict)
    stops: dict[str, Image] = field(default_factory=dict)  # the different trees that kills have left
    _completed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.runner.always = ("-e", "inject=?link,linkat:error=EPERM") if self.case.no_links else ()
        self.reset()
        self.runner.warm(self.arguments)
        self.reset()
        ended = self.runner.run(self.arguments)
        assert ended.code == 0, ended.errors
        self.after = read_image(self.root)
        assert visible(self.after) != visible(self.case.before)
        self.judge(self.after, finished=True)

    @property
    def arguments(self) -> list[str]:
        return self.case.command(self.root)

    def reset(self) -> None:
        """Lay out the tree as it was before the step."""
        write_image(self.case.before, self.root)

    def open(self) -> None:
        """What the next command does first: open the checkpoint, and the output if there is one."""
        Checkpoint.open(self.root / "checkpoint")
        if self.case.is_output and (self.root / self.case.target).exists():
            Checkpoint.open(self.root / self.case.target)

    def judge(self, image: Image, *, finished: bool = False) -> str:
        """`old` or `new`; raises Lost when an opened tree is neither, or something is left over or gone."""
        seen = visible(image)
        found = {"old": visible(self.case.before), "new": visible(self.after)}
        verdict = next((name for name in ("new", "old") if seen == found[name]), None)
        if verdict is None and self.case.is_output:
            # For an instant an output that is overwritten has no name at all; it is complete under a hidden one.
            rest = {path: data for path, data in found["old"].items() if not path.startswith(f"{self.case.target}/")}
            verdict = "old" if seen == rest else None
        if verdict is None:
            known = found["old"] | found["new"]
            names = sorted({p for p in known.keys() | seen.keys() if seen.get(p) not in _both(found, p)})
            raise Lost(f"neither old nor new: {names}")
        self._refuse_debris(image)
        if verdict == "new":
            self._refuse_lost(image)
        if finished:
            hidden = [path for path in image if re.search(r"\.burnish-(partial|old)(/|$)", path)]
            if verdict != "new" or hidden:
                raise Lost(f"finished, but {hidden or 'still old'}")
        return verdict

    def _refuse_debris(self, image: Image) -> None:
        for folder in {"checkpoint", self.case.target}:
            records = under(image, f"{folder}/{RECORDS}")
            known = {"receipts.jsonl", "undo", *(f"undo/{number}" for number in _receipts(under(image, folder)))}
            debris = {path for path in records if not path.startswith(tuple(f"{each}/" for each in known - {"undo"}))}
            if debris - known:
                raise Lost(f"left over in {folder}/{RECORDS}: {sorted(debris - known)}")

    def refuse_mixture(self, image: Image) -> None:
        """Raise Lost when a loader, before anything is repaired, would load neither the old nor the new model."""
        if self.case.is_output and self.case.target not in image:
            return
        found = loaded(under(image, self.case.target))
        trees = (self.case.before, self.after)
        if found is not None and found not in [loaded(under(tree, self.case.target)) for tree in trees]:
            raise Lost("a loader would load a mixture of old and new")

    def settle(self) -> str:
        """Open the interrupted tree, judge it, complete the step, judge it again; says what it was after opening."""
        try:
            self.open()
        except Exception as error:
            raise Lost(f"cannot be opened: {type(error).__name__}: {error}") from error
        image = read_image(self.root)
        verdict = self.judge(image)
        key = fingerprint(image)
        if key not in self._completed:
            ended = self.runner.run(self.arguments)
            refused = self.case.undoes and verdict == "new" and ended.code == 1 and "no step to undo" in ended.errors
            if ended.code != 0 and not refused:
                raise Lost(f"cannot be completed: {ended.code}: {ended.errors}")
            self.judge(read_image(self.root), finished=True)
            self._completed.add(key)
        return verdict

    def _refuse_lost(self, image: Image) -> None:
        """Raise Lost unless there is one more receipt, and each file of before is here or kept for undo, whole."""
        before, after = under(self.case.before, self.case.target), under(image, self.case.target)
        known = [] if self.case.is_output else _receipts(before)
        number = max(known, default=0) + 1
        if _receipts(after) != [*known, number]:
            raise Lost(f"not one new receipt: {_receipts(after)}")
        if self.case.undoes or self.case.is_output:
            return
        for path in before:
            ours = path.startswith(RECORDS) and not path.startswith(f"{RECORDS}/undo/")
            if not ours and not _is_kept(path, before, after, f"{RECORDS}/undo/{number}/{path}"):
                raise Lost(f"{path} is neither as it was nor kept for undo")


def _both(found: dict[str, dict[str, bytes | str]], path: str) -> list[bytes | str | None]:
    return [tree.get(path) for tree in found.values()]


def _receipts(image: Image) -> list[int]:
    receipts = image.get(f"{RECORDS}/receipts.jsonl")
    return [json.loads(line)["id"] for line in receipts.data.splitlines()] if isinstance(receipts, Blob) else []


def _is_kept(path: str, before: Image, after: Image, kept: str) -> bool:
    old, new = before[path], after.get(path)
    head, tail = after.get(f"{kept}.head"), after.get(f"{kept}.tail")
    if isinstance(new, Blob) and isinstance(head, Blob) and isinstance(tail, Blob):
        whole = head.data + new.data[len(head.data) :] + tail.data
        return isinstance(old, Blob) and old.data == whole
    return any(_same(old, each) for each in (new, after.get(kept)))


def _same(one: object, other: object) -> bool:
    return (one.data if isinstance(one, Blob) else one) == (other.data if isinstance(other, Blob) else other)


def fingerprint(image: Mapping[str, Node | bytes]) -> str:
    """Equal for trees that differ in nothing but times, process numbers and inode numbers."""
    nodes = ((path, node.data if isinstance(node, Blob) else node) for path, node in sorted(image.items()))
    return repr([(path, _digest(node) if isinstance(node, bytes) else node) for path, node in nodes])


@lru_cache(1 << 12)
def _digest(data: bytes) -> str:
    return sha256(re.sub(rb'"(time|since)": "[^"]*"|"(mtime_ns|pid)": \d+', b"", data)).hexdigest()
