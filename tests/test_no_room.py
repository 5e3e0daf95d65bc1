"""A target that is missing, closed or too small, and a kill in the middle: half an output never appears.

Needs Linux, root and strace, as all of tests/torture.
"""

from collections.abc import Iterator
from pathlib import Path

import heads
import pytest
from snapshots import contents
from torture.cases import all_cases
from torture.full import NOBODY, small_disk
from torture.kills import interrupt
from torture.laws import Subject
from torture.trace import Ended, Runner
from transformers import AutoModelForCausalLM

from tools.checkpoint.layout import Checkpoint

pytestmark = pytest.mark.strace


@pytest.fixture
def checkpoint(tiny: Path, tmp_path: Path) -> Path:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    path = heads.flat(tiny, tmp_path / "checkpoint")
    (path / "model.safetensors").chmod(0o644)
    return path


@pytest.fixture(scope="module")
def runner(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Everything is imported before a child drops its rights, who may not read Python's own library."""
    checkpoint = heads.flat(tiny, tmp_path_factory.mktemp("warm") / "checkpoint")
    with Runner() as started:
        started.warm(["fix-valuehead", str(checkpoint)])
        yield started


def refused(ended: Ended, *words: str) -> None:
    assert ended.code == 1
    assert ended.errors.startswith("error: ")
    assert all(word in ended.errors for word in words)
    assert "Traceback" not in ended.errors


def test_fi_19_parents_of_an_output_are_made(checkpoint: Path, tmp_path: Path, runner: Runner) -> None:
    output = tmp_path / "not" / "there" / "yet"
    assert runner.run(["fix-valuehead", str(checkpoint), "-o", str(output)]).code == 0
    AutoModelForCausalLM.from_pretrained(output)


def test_fi_19_a_target_that_may_not_be_written_is_named_first(
    checkpoint: Path, tmp_path: Path, runner: Runner
) -> None:
    before = contents(tmp_path)
    (tmp_path / "closed").mkdir(mode=0o555)
    in_place = ["fix-valuehead", str(checkpoint)]
    refused(runner.run(in_place, user=NOBODY), f"{checkpoint}: not writable; choose an --output")
    output = tmp_path / "closed" / "output"
    refused(runner.run([*in_place, "-o", str(output)], user=NOBODY), f"{output.parent}", "permission denied")
    assert contents(tmp_path) == before
    assert not any((tmp_path / "closed").iterdir())


@pytest.mark.parametrize("free_bytes", [4 << 10, 64 << 10])
def test_fi_19_a_small_disk_is_measured_before_anything_is_written(
    free_bytes: int, checkpoint: Path, tmp_path: Path, runner: Runner
) -> None:
    needed = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert needed > free_bytes
    before = contents(checkpoint)
    with small_disk(tmp_path / "small", free_bytes) as disk:
        ended = runner.run(["fix-valuehead", str(checkpoint), "-o", str(disk / "output")])
        refused(ended, "bytes, and ", " are free; free some, or choose an --output")
        assert not any(disk.iterdir())
    assert contents(checkpoint) == before
    AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("committed", [False, True])
def test_fi_19_a_kill_in_the_middle_leaves_a_model_that_loads(
    committed: bool, tiny: Path, tmp_path: Path, runner: Runner
) -> None:
    subject = Subject(all_cases(tiny)["fix-valuehead flat"](), tmp_path / "run", runner)
    interrupt(subject, committed=committed)
    opened = Checkpoint.open(subject.root / "checkpoint")
    assert opened.recovered
    assert bool(opened.head) == committed

    AutoModelForCausalLM.from_pretrained(opened.path)
