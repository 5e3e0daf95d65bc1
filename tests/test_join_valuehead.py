"""The value head goes back into the weights, and is what the trainer left there."""

import json
from collections.abc import Callable
from pathlib import Path

import heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import contents, state
from test_frameworks import tensors

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import read_header
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.join_valuehead import join_valuehead
from tools.postprocess.undo import undo

Recorded = Callable[[str], Path]
RECORDED = ["trl-valuehead-single", "trl-valuehead-sharded", "trl-valuehead-lora", "trl-valuehead-t5"]
LAYOUTS = ["flat", "at_start", "in_the_middle", "sharded", "pickled", "hard_linked", "linked"]


@pytest.mark.parametrize("name", [*RECORDED, "trl-valuehead-bf16", "hf-trainer-valuehead", "hf-trainer-valuehead-lora"])
def test_vh_05_what_a_trainer_wrote_is_there_again(name: str, recorded: Recorded) -> None:
    path = recorded(name)
    before, files = tensors(path), contents(path).keys()
    fix_valuehead(path)
    split = tensors(path)
    report = join_valuehead(path)
    assert report.changed
    assert (tensors(path), contents(path).keys()) == (before, files)
    assert fix_valuehead(path).changed
    assert tensors(path) == split


def test_vh_05_a_flat_checkpoint_of_a_zero_3_save(tiny: Path, tmp_path: Path) -> None:
    path = heads.prefixed(tiny, tmp_path / "checkpoint")
    wrapped = tensors(path)
    fix_valuehead(path)
    fix_valuehead(path, output=tmp_path / "split")
    join_valuehead(path)
    flat = load_file(path / "model.safetensors")
    assert flat.keys() == load_file(tiny / "model.safetensors").keys() | heads.HEAD.keys()
    assert all(torch.equal(flat[name], tensor) for name, tensor in heads.HEAD.items())
    assert all(torch.equal(flat[name], tensor) for name, tensor in load_file(tiny / "model.safetensors").items())
    join_valuehead(path, wrapper="pretrained_model.")
    assert tensors(path) == wrapped
    join_valuehead(tmp_path / "split", wrapper="pretrained_model.")
    assert tensors(tmp_path / "split") == wrapped


@pytest.mark.parametrize("layout", LAYOUTS)
def test_undo_takes_both_back_to_the_byte(layout: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.LAYOUTS[layout](tiny, tmp_path / "checkpoint")
    before = contents(path)
    fix_valuehead(path)
    split = contents(path)
    join_valuehead(path)
    joined = contents(path)
    fix_valuehead(path)
    for expected in (joined, split, before):
        undo(path)
        assert contents(path) == expected


def test_only_the_last_shard_and_the_index_are_written(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    index = path / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    fix_valuehead(path)
    before = {name: ((path / name).stat().st_ino, digest) for name, digest in contents(path).items()}
    report = join_valuehead(path)
    assert set(report.written) == {"model-00003-of-00003.safetensors", index.name}
    assert report.removed == ("value_head.safetensors",)
    for name in contents(path).keys() - set(report.written):
        assert ((path / name).stat().st_ino, contents(path)[name]) == before[name]
    assert json.loads(index.read_text()) == {**original, "weight_map": dict(sorted(original["weight_map"].items()))}


def test_the_head_lies_where_it_leaves_by_an_edit_of_the_header(tiny: Path, tmp_path: Path) -> None:
    for layout, first in (("flat", False), ("at_start", True)):
        path = heads.LAYOUTS[layout](tiny, tmp_path / layout)
        fix_valuehead(path)
        join_valuehead(path)
        header = read_header(path / "model.safetensors")
        names = list(header.tensors)
        assert set(names[:2] if first else names[-2:]) == heads.HEAD.keys()
        assert header.metadata["origin"] == "a test"
        assert header.length % 8 == 0
        assert fix_valuehead(path).edited == ("model.safetensors",)


def test_a_bin_stays_a_bin(tiny: Path, tmp_path: Path) -> None:
    path = heads.pickled(tiny, tmp_path / "checkpoint")
    before = torch.load(path / "pytorch_model.bin", weights_only=True)
    fix_valuehead(path)
    report = join_valuehead(path)
    assert (report.written, report.removed) == (("pytorch_model.bin",), ("value_head.bin",))
    after = torch.load(path / "pytorch_model.bin", weights_only=True)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_the_head_of_an_adapter_becomes_the_file_that_trl_reads(recorded: Recorded) -> None:
    path = recorded("trl-valuehead-lora")
    expected = torch.load(path / "pytorch_model.bin", weights_only=True)
    fix_valuehead(path, safetensors=True)
    report = join_valuehead(path)
    assert (report.written, report.removed) == (("model.safetensors",), ("value_head.safetensors",))
    found = load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    undo(path)
    with pytest.raises(CheckpointError, match=r"holds no decoder to put pretrained_model. before; leave --wrapper out"):
        join_valuehead(path, wrapper="pretrained_model.")


def test_no_head_is_nothing_to_do(tiny: Path, tmp_path: Path, recorded: Recorded) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    before = state(path)
    assert join_valuehead(path).summary == "the value head is in model.safetensors already; nothing to do"
    assert state(path) == before
    save_file(load_file(tiny / "model.safetensors"), path / "model.safetensors")
    before = state(path)
    for wrapper in ("", "pretrained_model."):
        assert join_valuehead(path, wrapper=wrapper).summary == "no value head here; nothing to do"
    assert state(path) == before
    assert not join_valuehead(recorded("hf-reward-model")).changed


def test_an_unknown_wrapper_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"--wrapper model.: no framework puts that .*; one of pretrained_model."):
        join_valuehead(path, wrapper="model.")


@pytest.mark.parametrize("is_split", [True, False])
def test_a_wrapper_that_would_not_be_taken_off_again_is_refused(is_split: bool, tiny: Path, tmp_path: Path) -> None:
    """`base_model.` is trlx's beside a head of trlx, and PEFT's beside any other."""
    path = heads.split("flat", tiny, tmp_path / "checkpoint") if is_split else heads.flat(tiny, tmp_path / "checkpoint")
    before = state(path)
    with pytest.raises(CheckpointError, match=r"--wrapper base_model.: no framework puts that beside v_head.summary"):
        join_valuehead(path, wrapper="base_model.")
    assert state(path) == before
