"""A config that the trainer did not save is copied from where somebody says, and never made up."""

import json
from collections.abc import Callable
from pathlib import Path

import heads
import pytest
import torch
from snapshots import contents, state
from test_fix_valuehead import logits

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.undo import undo

Recorded = Callable[[str], Path]
CONFIGS = ("config.json", "generation_config.json")


def without_config(tiny: Path, path: Path) -> Path:
    heads.prefixed(tiny, path)
    for name in CONFIGS:
        (path / name).unlink()
    return path


def test_both_files_come_with_the_split(tiny: Path, tmp_path: Path) -> None:
    path = without_config(tiny, tmp_path / "checkpoint")
    before = contents(path)
    report = fix_valuehead(path, config_from=tiny)
    assert "config.json and generation_config.json copied from the base" in report.summary
    assert set(CONFIGS) <= set(report.written)
    assert all(contents(path)[name] == contents(tiny)[name] for name in CONFIGS)
    assert torch.equal(logits(path), logits(tiny))
    assert not fix_valuehead(path, config_from=tiny).changed
    undo(path)
    assert contents(path) == before


def test_without_it_the_report_says_what_is_missing(tiny: Path, tmp_path: Path) -> None:
    path = without_config(tiny, tmp_path / "checkpoint")
    report = fix_valuehead(path)
    assert "config.json is missing here: copy it with --config-from the base model" in report.summary
    assert not (path / "config.json").exists()
    later = fix_valuehead(path, config_from=tiny)
    assert set(later.written) == set(CONFIGS)
    assert torch.equal(logits(path), logits(tiny))


def test_a_config_that_is_there_stays(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    own = (path / "config.json").read_text() + "\n"
    (path / "config.json").write_text(own)
    (path / "generation_config.json").unlink()
    report = fix_valuehead(path, config_from=tiny)
    assert "generation_config.json copied from the base" in report.summary
    assert (path / "config.json").read_text() == own


def test_the_base_that_the_checkpoint_itself_names(tiny: Path, tmp_path: Path) -> None:
    path = without_config(tiny, tmp_path / "checkpoint")
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny)}))
    assert set(CONFIGS) <= set(fix_valuehead(path).written)
    path = without_config(tiny, tmp_path / "other")
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "of/a-hub"}))
    assert "config.json" not in fix_valuehead(path).written


def test_a_folder_without_a_config_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = without_config(tiny, tmp_path / "checkpoint")
    before = state(path)
    for folder in (tmp_path / "missing", path):
        with pytest.raises(CheckpointError, match=r"has no config.json; name the directory of the base model"):
            fix_valuehead(path, config_from=folder)
    assert state(path) == before


def test_an_adapter_needs_none(recorded: Recorded, tiny: Path) -> None:
    path = recorded("trl-valuehead-lora")
    fix_valuehead(path, config_from=tiny)
    assert not (path / "config.json").exists()
