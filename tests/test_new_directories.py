"""The laws of steps that make new directories of a checkpoint: one directory, or one for each of its models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import actor_critic
import heads
import pytest
from snapshots import contents, state
from test_laws import FAULTS, Injected

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.report import Report
from tools.postprocess.export_reward_model import export_reward_model
from tools.postprocess.split_actor_critic import split_actor_critic

Step = Callable[..., Report]
Case = tuple[Path, Step, tuple[str, ...]]


def _split(form: str) -> Callable[[Path, Path], Case]:
    def case(_: Path, folder: Path) -> Case:
        path = actor_critic.FORMS[form](actor_critic.build(), folder / "checkpoint")
        return path, split_actor_critic, ("policy", "critic")

    return case


def _reward(tiny: Path, folder: Path) -> Case:
    path = heads.sharded(tiny, folder / "checkpoint")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    return path, export_reward_model, (".",)


CASES = {
    **{f"split-actor-critic-{form}": _split(form) for form in ("aliased", "pickled", "sharded")},
    "export-reward-model": _reward,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Case:
    return CASES[request.param](tiny, tmp_path)


def test_a_report_tells_what_was_written_and_the_source_stays(case: Case, tmp_path: Path) -> None:
    checkpoint, step, parts = case
    before = state(checkpoint)
    report = step(checkpoint, output=tmp_path / "new" / "output")
    assert report.changed
    assert report.summary
    assert set(report.written) == contents(tmp_path / "new/output").keys()
    assert not report.edited
    assert not report.removed
    on_disk = sum((tmp_path / "new/output" / name).stat().st_size for name in report.written)
    assert report.bytes_written == on_disk
    assert state(checkpoint) == before
    for part in parts:
        assert Checkpoint.open(tmp_path / "new/output" / part).config


def test_second_run_changes_nothing(case: Case, tmp_path: Path) -> None:
    checkpoint, step, _ = case
    step(checkpoint, output=tmp_path / "output")
    before = state(tmp_path)
    for dry_run in (True, False):
        report = step(checkpoint, output=tmp_path / "output", dry_run=dry_run)
        assert not report.changed
        assert report.summary.endswith("nothing to do")
    assert state(tmp_path) == before


def test_dry_run_changes_nothing(case: Case, tmp_path: Path) -> None:
    checkpoint, step, _ = case
    before = state(tmp_path)
    report = step(checkpoint, output=tmp_path / "output", dry_run=True)
    assert not report.changed
    assert report.summary.startswith("would do: ")
    assert "plan" in str(report.details)
    assert state(tmp_path) == before


def test_a_foreign_output_is_refused(case: Case, tmp_path: Path) -> None:
    checkpoint, step, parts = case
    for part in parts:
        (tmp_path / "output" / part).mkdir(parents=True, exist_ok=True)
        (tmp_path / "output" / part / "mine.txt").write_text("keep me")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="exists and is not empty; choose another --output, or --overwrite"):
        step(checkpoint, output=tmp_path / "output")
    with pytest.raises(CheckpointError, match="was not made by --output, so it is not replaced"):
        step(checkpoint, output=tmp_path / "output", overwrite=True)
    assert contents(tmp_path) == before


def test_an_output_of_another_state_is_replaced_on_request_alone(case: Case, tmp_path: Path) -> None:
    checkpoint, step, parts = case
    step(checkpoint, output=tmp_path / "output")
    (checkpoint / "notes.txt").write_text("new")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        step(checkpoint, output=tmp_path / "output")
    step(checkpoint, output=tmp_path / "output", overwrite=True)
    assert (tmp_path / "output" / parts[0] / "notes.txt").read_text() == "new"


@pytest.mark.parametrize("where", [".", "inside"])
def test_an_output_never_lies_in_its_source(where: str, case: Case) -> None:
    checkpoint, step, _ = case
    before = contents(checkpoint)
    with pytest.raises(CheckpointError, match=r"which is read from|lies inside"):
        step(checkpoint, output=checkpoint / where, overwrite=True)
    assert contents(checkpoint) == before


def test_a_failure_at_any_file_operation_leaves_whole_directories_or_none(case: Case, tmp_path: Path) -> None:
    checkpoint, step, parts = case
    source = state(checkpoint)
    step(checkpoint, output=tmp_path / "whole")
    whole = {part: contents(tmp_path / "whole" / part) for part in parts}
    output = tmp_path / "place" / "output"
    failures = 0
    for call in range(1, 400):
        shutil.rmtree(output.parent, ignore_errors=True)
        try:
            with FAULTS.at(output.parent, call):
                step(checkpoint, output=output)
        except (CheckpointError, Injected):
            failures += 1
        if FAULTS.left > 0:
            break
        for part in parts:
            assert contents(output / part) in ({}, whole[part])
        step(checkpoint, output=output)
        assert {part: contents(output / part) for part in parts} == whole
    assert failures > 10
    assert state(checkpoint) == source
