"""A plan that would lose a tensor, and a file that is not what was planned, end the step before and after."""

from pathlib import Path

import heads
import pytest
from snapshots import contents

from tools.checkpoint import staging
from tools.checkpoint.change import Change, TensorFile, stored
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.rewrite import rewrite


def _without(name: str):
    def plan(checkpoint: Checkpoint) -> Change:
        assert checkpoint.model
        tensors = {n: source for n, source in stored(checkpoint.model).items() if n != name}
        return Change("loses one", {"model.safetensors": TensorFile(tensors)})

    return plan


def test_fi_08_a_plan_that_loses_a_tensor_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    before = contents(path)
    for output in (None, tmp_path / "output"):
        with pytest.raises(AssertionError, match=r"model.norm.weight would be lost"):
            rewrite("test", path, _without("model.norm.weight"), output=output)
    assert contents(path) == before
    assert not (tmp_path / "output").exists()


def test_fi_08_an_output_that_is_not_what_was_planned_never_appears(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = heads.in_the_middle(tiny, tmp_path / "checkpoint")
    monkeypatch.setattr(staging, "_runs", lambda sources: iter(()))  # a header, and no tensor behind it
    with pytest.raises(Exception, match="cut short"):
        rewrite(
            "test",
            path,
            lambda c: Change("same", {"model.safetensors": TensorFile(stored(c.model))}),
            output=tmp_path / "o",
        )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint"]
