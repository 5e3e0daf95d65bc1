"""The laws that every step obeys, on every layout it changes."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import adapters
import heads
import pytest
from snapshots import contents, state

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.report import Report
from tools.postprocess.bundle_processor import bundle_processor
from tools.postprocess.convert_pissa import convert_pissa
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.join_valuehead import join_valuehead

Step = Callable[..., Report]
Case = tuple[Path, Step]


def _valuehead(layout: str) -> Callable[[Path, Path], Case]:
    return lambda tiny, folder: (heads.LAYOUTS[layout](tiny, folder / "checkpoint"), fix_valuehead)


def _joined(layout: str) -> Callable[[Path, Path], Case]:
    return lambda tiny, folder: (heads.split(layout, tiny, folder / "checkpoint"), join_valuehead)


def _pissa(tiny: Path, folder: Path) -> Case:
    run = adapters.train(tiny, folder)

    def step(checkpoint: Path, **options: Any) -> Report:
        return convert_pissa(checkpoint, init=run.init, **options)

    return run.adapter, step


def _pissa_less_rank(tiny: Path, folder: Path) -> Case:
    run = adapters.train(tiny, folder)

    def step(checkpoint: Path, **options: Any) -> Report:
        return convert_pissa(checkpoint, init=run.init, max_rank=4, **options)

    return run.adapter, step


def _pissa_of_two_bases(tiny: Path, folder: Path) -> Case:
    run = adapters.train(tiny, folder)
    shutil.rmtree(run.init)

    def step(checkpoint: Path, **options: Any) -> Report:
        return convert_pissa(checkpoint, base=str(tiny), residual=run.residual, **options)

    return run.adapter, step


def _bundle(tiny: Path, folder: Path) -> Case:
    def step(checkpoint: Path, **options: Any) -> Report:
        return bundle_processor(checkpoint, source=Path(__file__).parent / "fixtures" / "hf-reward-model", **options)

    return heads.flat(tiny, folder / "checkpoint"), step


CASES = {
    **{f"fix-valuehead-{layout}": _valuehead(layout) for layout in heads.LAYOUTS},
    **{f"join-valuehead-{layout}": _joined(layout) for layout in ("flat", "at_start", "sharded", "pickled")},
    "convert-pissa": _pissa,
    "convert-pissa --max-rank": _pissa_less_rank,
    "convert-pissa --residual": _pissa_of_two_bases,
    "bundle-processor": _bundle,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Case:
    return CASES[request.param](tiny, tmp_path)


def test_a_report_tells_what_changed(case: Case) -> None:
    checkpoint, step = case
    before = contents(checkpoint)
    report = step(checkpoint)
    after = contents(checkpoint)
    assert report.changed
    assert report.summary
    assert report.bytes_written > 0
    assert set(report.written) | set(report.edited) == {n for n in after if after[n] != before.get(n)}
    assert set(report.removed) == before.keys() - after.keys()


def test_second_run_changes_nothing(case: Case) -> None:
    checkpoint, step = case
    step(checkpoint)
    before = state(checkpoint)
    report = step(checkpoint)
    assert not report.changed
    assert "nothing to do" in report.summary
    assert state(checkpoint) == before


def test_output_leaves_the_source_alone_and_equals_the_result_in_place(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    before = state(checkpoint)
    report = step(checkpoint, output=tmp_path / "new" / "output")
    assert report.changed
    assert state(checkpoint) == before
    assert all(
        path.stat().st_nlink == 1 and not path.is_symlink()
        for path in (tmp_path / "new/output").iterdir()
        if path.is_file()
    )
    step(checkpoint)
    ours = Checkpoint.open(tmp_path / "new" / "output")
    theirs = Checkpoint.open(checkpoint)
    assert contents(ours.path).keys() == contents(theirs.path).keys()
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        assert {n: (t.dtype, t.shape) for n, t in one.tensors.items()} == {
            n: (t.dtype, t.shape) for n, t in other.tensors.items()
        }


def test_an_output_made_from_the_same_source_is_nothing_to_do(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    step(checkpoint, output=tmp_path / "output")
    before = state(tmp_path / "output")
    for dry_run in (True, False):
        report = step(checkpoint, output=tmp_path / "output", dry_run=dry_run)
        assert not report.changed
        assert report.summary.endswith("; nothing to do")
    assert state(tmp_path / "output") == before


def test_a_foreign_output_is_refused(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mine.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="exists and is not empty; choose another --output, or --overwrite"):
        step(checkpoint, output=tmp_path / "output")
    (tmp_path / "output" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="was not made by --output, so it is not replaced; remove it yourself"):
        step(checkpoint, output=tmp_path / "output", overwrite=True)
    assert (tmp_path / "output" / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize("where", [".", "..", "inside"])
def test_an_output_never_replaces_what_is_read(where: str, case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    output = checkpoint / where
    for target in (output, output.resolve()):
        (target / ".burnish").mkdir(parents=True, exist_ok=True)
        receipt = {
            "id": 1,
            "step": "x",
            "version": "1",
            "time": "",
            "options": {},
            "source": {"files": {}},
            "files": {},
        }
        (target / ".burnish" / "receipts.jsonl").write_text(json.dumps(receipt) + "\n")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"which is read from|lies inside"):
        step(checkpoint, output=output, overwrite=True)
    assert contents(tmp_path) == before


def test_an_output_needs_a_name_of_its_own(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    before = state(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match="not the name of a directory that can be made; name one below it"):
            step(checkpoint, output=tmp_path / "new/folder/..", dry_run=dry_run)
    assert state(tmp_path) == before


def test_an_output_of_another_state_is_replaced_on_request_alone(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    step(checkpoint, output=tmp_path / "output")
    (checkpoint / "notes.txt").write_text("new")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        step(checkpoint, output=tmp_path / "output")
    step(checkpoint, output=tmp_path / "output", overwrite=True)
    assert (tmp_path / "output" / "notes.txt").read_text() == "new"
    (tmp_path / "output" / "notes.txt").unlink()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        step(checkpoint, output=tmp_path / "output")


def test_a_kill_between_the_two_renames_of_an_overwrite_loses_nothing(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    step(checkpoint, output=tmp_path / "output")
    whole = contents(tmp_path / "output")
    (tmp_path / "output").rename(tmp_path / ".output.burnish-old")
    assert not step(checkpoint, output=tmp_path / "output").changed
    assert contents(tmp_path / "output") == whole
    shutil.copytree(tmp_path / "output", tmp_path / ".output.burnish-old")
    step(checkpoint, output=tmp_path / "output")
    assert not (tmp_path / ".output.burnish-old").exists()


def test_dry_run_changes_nothing(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    before = state(tmp_path)
    report = step(checkpoint, dry_run=True)
    assert not report.changed
    assert report.details["plan"]
    assert state(tmp_path) == before


def test_nothing_is_lost(case: Case) -> None:
    """What a step replaced or removed is kept, byte for byte, under .burnish/undo."""
    checkpoint, step = case
    before = {name: (checkpoint / name).read_bytes() for name in contents(checkpoint)}
    report = step(checkpoint)
    kept = checkpoint / ".burnish" / "undo" / "1"
    for name in (*report.written, *report.removed):
        if name in before:
            assert (kept / name).read_bytes() == before[name]
    for name in report.edited:
        head, tail = (kept / f"{name}.head").read_bytes(), (kept / f"{name}.tail").read_bytes()
        now = (checkpoint / name).read_bytes()
        assert head + now[len(head) :] + tail == before[name]


class Injected(OSError):
    """The fault of a disk, in the middle of a step."""


class Faults:
    """Counts file-system calls under a folder and makes one of them fail, or kills the process at it."""

    events = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"})

    def __init__(self) -> None:
        self.folder: str | None = None
        self.left = 0
        self.kill = False
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event not in self.events or self.folder not in str(arguments[0]):
            return
        self.left -= 1
        if self.left == 0:
            if self.kill:
                os._exit(9)
            raise Injected(28, "no space left on device", str(arguments[0]))

    @contextmanager
    def at(self, folder: Path, call: int) -> Iterator[None]:
        self.folder, self.left = str(folder), call
        try:
            yield
        finally:
            self.folder = None


FAULTS = Faults()


def points(checkpoint: Path, copy: Path) -> Iterator[tuple[int, Path]]:
    """A fresh copy of the checkpoint for each file-system call the step makes, until it makes no more."""
    for call in range(1, 400):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkpoint, copy, symlinks=True)
        yield call, copy
        if FAULTS.left > 0:
            return
    raise AssertionError("the step does not end")


def test_a_failure_at_any_file_operation_leaves_old_or_new(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    old = contents(checkpoint)
    failures = 0
    for call, copy in points(checkpoint, tmp_path / "copy"):
        try:
            with FAULTS.at(copy, call):
                step(copy)
        except (CheckpointError, Injected):
            failures += 1
            Checkpoint.open(copy)
        found = contents(copy)
        if found != old:
            new = found
            assert not step(copy).changed
        else:
            assert step(copy).changed
            new = contents(copy)
        assert sorted(p.name for p in (copy / ".burnish").iterdir()) == ["receipts.jsonl", "undo"]
        assert Checkpoint.open(copy).recovered is None
    assert failures > 10
    assert new != old


# torch writes a `.bin`, and a process that runs torch is not forked.
@pytest.mark.parametrize("case", [name for name in CASES if not name.endswith("-pickled")], indirect=True)
def test_a_kill_at_any_file_operation_leaves_old_or_new(case: Case, tmp_path: Path) -> None:
    checkpoint, step = case
    old, finished = contents(checkpoint), set()
    for call, copy in points(checkpoint, tmp_path / "copy"):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            FAULTS.kill = True
            with FAULTS.at(copy, call):
                step(copy)
            os.write(writing, str(FAULTS.left).encode())
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        FAULTS.left = int(os.read(reading, 20) or 0)
        os.close(reading)
        assert os.waitstatus_to_exitcode(status) in (0, 9)
        opened = Checkpoint.open(copy)
        found = contents(opened.path)
        finished.add(tuple(found.items()))
        step(copy)
        assert contents(copy) != old
    assert len(finished) == 2
    assert tuple(old.items()) in finished
