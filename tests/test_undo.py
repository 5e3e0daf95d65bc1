"""What a step changed in place comes back byte for byte, once or several times, and nothing newer is destroyed."""

import json
import os
from pathlib import Path

import heads
import pytest
from safetensors.torch import load_file, save_file
from snapshots import contents, state
from test_laws import CASES, FAULTS, Case, Injected, points
from typer.testing import CliRunner

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.cli import app
from tools.postprocess.bundle_processor import bundle_processor
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.forget import forget
from tools.postprocess.history import history
from tools.postprocess.undo import undo

PROCESSOR = Path(__file__).parent / "fixtures" / "hf-reward-model"


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Case:
    return CASES[request.param](tiny, tmp_path)


def test_undo_gives_every_byte_back_and_the_step_can_be_done_again(case: Case) -> None:
    checkpoint, step = case
    old = contents(checkpoint)
    links = {path.name: path.is_symlink() for path in checkpoint.iterdir() if path.name != ".burnish"}
    step(checkpoint)
    new = contents(checkpoint)
    assert undo(checkpoint).changed
    assert contents(checkpoint) == old
    assert {path.name: path.is_symlink() for path in checkpoint.iterdir() if path.name != ".burnish"} == links
    assert not list((checkpoint / ".burnish" / "undo").iterdir())
    step(checkpoint)
    assert contents(checkpoint) == new


@pytest.mark.parametrize("kill", [False, True], ids=["failure", "kill"])
@pytest.mark.parametrize("name", ["fix-valuehead-sharded", "fix-valuehead-at_start", "convert-pissa"])
def test_an_interrupted_undo_leaves_old_or_new(name: str, kill: bool, tiny: Path, tmp_path: Path) -> None:
    checkpoint, step = CASES[name](tiny, tmp_path)
    old = contents(checkpoint)
    step(checkpoint)
    new = contents(checkpoint)
    seen = set()
    for call, copy in points(checkpoint, tmp_path / "copy"):
        if kill:
            child = os.fork()
            if child == 0:
                FAULTS.kill = True
                with FAULTS.at(copy, call):
                    undo(copy)
                os._exit(0)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            FAULTS.left = 1 if ended == 0 else 0
        else:
            try:
                with FAULTS.at(copy, call):
                    undo(copy)
            except (CheckpointError, Injected):
                pass
        Checkpoint.open(copy)
        found = contents(copy)
        assert found in (old, new)
        seen.add(found == old)
        if found == new:
            undo(copy)
            assert contents(copy) == old
    assert seen == {True, False}


def test_several_steps_are_taken_back_in_turn(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    old = contents(path)
    fix_valuehead(path)
    split = contents(path)
    bundle_processor(path, source=PROCESSOR)
    undo(path)
    assert contents(path) == split
    undo(path)
    assert contents(path) == old
    with pytest.raises(CheckpointError, match="no step to undo"):
        undo(path)
    fix_valuehead(path)
    bundle_processor(path, source=PROCESSOR)
    undo(path, steps=2)
    assert contents(path) == old
    with pytest.raises(CheckpointError, match="no step to undo"):
        undo(path, steps=2)


def test_a_file_that_changed_since_is_not_destroyed(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    fix_valuehead(path)
    save_file(load_file(path / "value_head.safetensors"), path / "value_head.safetensors")
    before = state(path)
    with pytest.raises(
        CheckpointError, match=r"value_head.safetensors: has changed since fix-valuehead of .*destroy that"
    ):
        undo(path)
    assert state(path) == before


def test_what_was_freed_cannot_be_undone(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    fix_valuehead(path, copy=True)
    before = contents(path)
    freed = forget(path)
    assert freed.changed
    assert freed.summary == "freed 80.9 kB"
    assert not (path / ".burnish" / "undo").exists()
    assert contents(path) == before
    assert not forget(path).changed
    with pytest.raises(CheckpointError, match="was freed; it cannot be undone"):
        undo(path)
    bundle_processor(path, source=PROCESSOR)
    undo(path)
    assert contents(path) == before


def test_an_output_has_nothing_before_it(tiny: Path, tmp_path: Path) -> None:
    fix_valuehead(heads.flat(tiny, tmp_path / "checkpoint"), output=tmp_path / "out")
    with pytest.raises(CheckpointError, match="so there is nothing before it; remove the directory"):
        undo(tmp_path / "out")


def test_history_tells_each_step_and_its_state(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    assert history(path).summary == "no step has changed it"
    fix_valuehead(path)
    bundle_processor(path, source=PROCESSOR)
    undo(path)
    first, second, third = history(path).details.values()
    assert (first["step"], first["files"]) == ("fix-valuehead", ["model.safetensors", "value_head.safetensors"])
    assert first["state"].startswith("undo keeps 2.")
    assert (second["step"], second["state"]) == ("bundle-processor", "undone")
    assert third["state"] == "took back step 2"
    printed = json.loads(CliRunner().invoke(app, ["history", str(path), "--json"]).output)
    assert list(printed["details"]) == ["1", "2", "3"]
    assert history(fix_valuehead_output(tiny, tmp_path)).details["1"]["state"] == "made from other"


def fix_valuehead_output(tiny: Path, tmp_path: Path) -> Path:
    fix_valuehead(heads.flat(tiny, tmp_path / "other"), output=tmp_path / "out")
    return tmp_path / "out"
