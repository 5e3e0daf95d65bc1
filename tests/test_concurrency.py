"""Two processes on one checkpoint: one changes it, and who reads meanwhile gets the old, the new or an error."""

import contextlib
import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from safetensors import SafetensorError, safe_open
from snapshots import contents

from tools.checkpoint import journal
from tools.checkpoint.change import Change, Computed, TensorFile, stored
from tools.checkpoint.errors import CheckpointBusy, CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.receipts import read_receipts
from tools.checkpoint.rewrite import rewrite
from tools.heads.wrappers import strip_wrappers
from tools.postprocess.fix_valuehead import fix_valuehead

LAYOUTS = ("flat", "at_start_prefixed", "in_the_middle", "sharded")
ROUNDS = 50
FORK = multiprocessing.get_context("fork")  # warm: what this process has imported, its children have
START = FORK.Barrier(2)
DONE = FORK.Event()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: the order of events is of interest here, not the disk."""
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="burnish-", dir=shared) as folder:
        yield Path(folder)


@pytest.fixture
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=FORK) as made:
        yield made


def fresh(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def step_at_once(path: Path) -> str:
    """Run the step when the other process does, too."""
    START.wait(30)
    try:
        report = fix_valuehead(path)
        return "changed" if report.changed else report.summary
    except CheckpointBusy:
        return "busy"
    except Exception:
        return traceback.format_exc()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_two_processes_one_changes_the_checkpoint(
    layout: str, tiny: Path, memory: Path, pool: ProcessPoolExecutor
) -> None:
    source = heads.LAYOUTS[layout](tiny, memory / "source")
    new = fresh(source, memory / "new")
    fix_valuehead(new)
    seen: Counter[str] = Counter()
    for _ in range(ROUNDS):
        path = fresh(source, memory / "checkpoint")
        one, other = sorted(pool.map(step_at_once, [path, path]), key=lambda said: said != "changed")
        seen[other] += 1
        assert one == "changed"
        assert other in {"busy", "the value head is in value_head.safetensors already; nothing to do"}
        assert contents(path) == contents(new)
        assert sorted(entry.name for entry in (path / ".burnish").iterdir()) == ["receipts.jsonl", "undo"]
        assert len(read_receipts(path)) == 1


def read(path: Path) -> dict[str, str]:
    """SHA-256 of every tensor by name, as Burnish finds them and safetensors reads them."""
    known = {}
    for weights in Checkpoint.open(path).weights:
        for file in weights.files:
            with safe_open(file.path, "pt") as opened:
                for name in file.tensors:
                    data = opened.get_tensor(name).view(torch.uint8).numpy().tobytes()
                    known[name] = hashlib.sha256(data).hexdigest()
    return known


def decoder(tensors: dict[str, str]) -> dict[str, str]:
    """What a step that splits the head leaves as it is, under its names without wrappers."""
    return {strip_wrappers(name): known for name, known in tensors.items() if not name.startswith("v_head.")}


def read_until_done(path: Path, old: dict[str, str], new: dict[str, str]) -> Counter[str]:
    """How often the old and the new checkpoint, a mixture or an error was met while the other process works."""
    seen: Counter[str] = Counter()
    START.wait(30)
    while not DONE.is_set():
        before = journal.generation(path)
        try:
            found = read(path)
        except (CheckpointError, SafetensorError, FileNotFoundError, RuntimeError) as error:
            seen[type(error).__name__] += 1
            continue
        if decoder(found) != decoder(old):
            seen["a mixture"] += 1
        elif before is None or journal.generation(path) != before:
            seen["changed meanwhile"] += 1
        else:
            seen["old" if found == old else "new" if found == new else "a mixture"] += 1
    return seen


def step_meanwhile(path: Path) -> int:
    """Run the step until it is through; returns how often a reader held the lock just then."""
    START.wait(30)
    try:
        for busy in range(1000):
            with contextlib.suppress(CheckpointBusy):
                fix_valuehead(path)
                return busy
        raise AssertionError("readers never let the step through")
    finally:
        DONE.set()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reader_gets_the_old_the_new_or_an_error(
    layout: str, tiny: Path, memory: Path, pool: ProcessPoolExecutor
) -> None:
    """Also a reader that had opened a file before its header was edited; only of a head that goes it may read anything.

    One that compares the generation before and after knows whether that befell it.
    """
    source = heads.LAYOUTS[layout](tiny, memory / "source")
    new = fresh(source, memory / "new")
    fix_valuehead(new)
    seen: Counter[str] = Counter()
    for _ in range(ROUNDS):
        path = fresh(source, memory / "checkpoint")
        DONE.clear()
        reader = pool.submit(read_until_done, path, read(source), read(new))
        writer = pool.submit(step_meanwhile, path)
        seen["busy"] += writer.result(60)
        seen += reader.result(60)
        assert read(path) == read(new)
    assert not seen["a mixture"]
    assert seen["old"]


def hold(path: Path, ready: Any) -> None:
    with journal.lock(path):
        ready.set()
        signal.pause()


def test_a_dead_holder_blocks_nobody(tiny: Path, memory: Path) -> None:
    path = heads.flat(tiny, memory / "checkpoint")
    for _ in range(20):
        ready = FORK.Event()
        holder = FORK.Process(target=hold, args=(path, ready))
        holder.start()
        assert ready.wait(30)
        with pytest.raises(CheckpointBusy, match=rf"process {holder.pid} \(since .*\) is changing it"):
            fix_valuehead(path)
        holder.kill()
        holder.join()
        assert Checkpoint.open(path).recovered is None
        with journal.lock(path):
            pass
        assert not (path / ".burnish").exists()
    assert fix_valuehead(path).changed


def test_readers_are_not_kept_out_while_a_step_prepares(tiny: Path, memory: Path) -> None:
    path = heads.flat(tiny, memory / "checkpoint")
    with journal.lock(path), journal.staging(path):
        assert Checkpoint.open(path).recovered is None
        assert (path / ".burnish" / "stage").is_dir()


def test_a_reader_reads_again_when_a_step_ends_meanwhile(
    tiny: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = heads.sharded(tiny, memory / "checkpoint")
    read_once = Checkpoint.read
    reads = []

    def read_slowly(path: Path, **options: Any) -> Checkpoint:
        found = read_once(path, **options)
        reads.append(found)
        if len(reads) == 1:
            FORK.Process(target=fix_valuehead, args=(path,)).start()
            multiprocessing.active_children()[0].join()
        return found

    monkeypatch.setattr(Checkpoint, "read", read_slowly)
    opened = Checkpoint.open(path)
    assert len(reads) == 2
    assert reads[0].head is None
    assert opened.head is not None


def test_an_output_is_never_made_of_two_states(tiny: Path, memory: Path) -> None:
    """A step of another process ends while the source is copied: here, when one of its tensors is asked for."""
    path = heads.at_start(tiny, memory / "checkpoint")

    def plan(checkpoint: Checkpoint) -> Change:
        assert checkpoint.model
        first, *others = stored(checkpoint.model).items()

        def read_late() -> list[bytes]:
            fix_valuehead(path)
            return [first[1].read()]

        late = Computed(first[1].dtype, first[1].shape, first[1].nbytes, read_late, (first[1],))
        return Change("copied", {"model.safetensors": TensorFile({first[0]: late, **dict(others)})})

    with pytest.raises(CheckpointBusy, match="changed it while it was copied"):
        rewrite("test", path, plan, output=memory / "output")
    assert not (memory / "output").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(
    number: int, tiny: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = heads.flat(tiny, memory / "checkpoint")
    before = contents(path)

    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(CheckpointError, match="this file system has no working locks"):
        fix_valuehead(path)
    assert contents(path) == before
    assert not (path / ".burnish").exists()
    assert Checkpoint.open(path).kind == "model"
    assert fix_valuehead(path, dry_run=True).details["plan"]
