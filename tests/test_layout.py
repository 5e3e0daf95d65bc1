"""What is recognised in a directory, and what is wrong with one."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import heads
import pytest
import torch

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint, checkpoints_in
from tools.checkpoint.pickles import read_bin

Recorded = Callable[[str], Path]


def test_kinds(tiny: Path, recorded: Recorded, tmp_path: Path) -> None:
    assert Checkpoint.open(tiny).kind == "model"
    assert Checkpoint.open(recorded("trl-valuehead-lora")).kind == "adapter"
    assert Checkpoint.open(recorded("zero3-checkpoint")).kind == "config"
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    assert Checkpoint.open(tmp_path / "run", accept_run=True).kind == "run"


def test_a_missing_path_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: not found$"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_file_is_no_checkpoint(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="a file, not a checkpoint directory; try"):
        Checkpoint.open(tiny / "config.json")


def test_checkpoints_of_a_run_come_by_number(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-100", "checkpoint-x", "tmp-checkpoint-1"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    with pytest.raises(
        CheckpointError, match="a run directory with checkpoint-9, checkpoint-10, checkpoint-100; name one"
    ):
        Checkpoint.open(tmp_path)


def test_training_state_is_told_from_the_model(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint-7")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        (path / name).write_text("{}")
    (path / "global_step7").mkdir()
    found = Checkpoint.open(path).training_state
    assert found == ("global_step7", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json")


def test_fi_06_an_index_that_names_a_missing_shard(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"index.json: names model-00002-of-00003.safetensors, which is not there"
    ):
        Checkpoint.open(path)


def test_fi_02_every_bad_shard_is_reported(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    for number in (1, 3):
        shard = path / f"model-0000{number}-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].rsplit("/", 1)[1] for line in lines] == [
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]
    assert all("cut short" in line and "copy, download or save it again" in line for line in lines)


def test_an_index_that_disagrees_with_its_shards(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["v_head.summary.bias"] = "model-00001-of-00003.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"says v_head.summary.bias is in model-00001.*, but it is in model-00003"
    ):
        Checkpoint.open(path)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd"])
def test_an_index_that_points_outside_is_refused(shard: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="which is not a plain file name"):
        Checkpoint.open(path)


def test_fi_06_a_file_beside_a_stale_index_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    (path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="loaders disagree on which counts; remove one"):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_damaged_json_file_is_named(name: str, text: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    (path / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name}: not (valid JSON|a JSON object)"):
        Checkpoint.open(path)


def test_an_adapter_without_weights(recorded: Recorded) -> None:
    path = recorded("trl-valuehead-lora")
    (path / "adapter_model.safetensors").unlink()
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config.json but no adapter_model.safetensors"):
        Checkpoint.open(path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_a_bin_is_read_without_torch_and_its_ranges_are_the_tensors(zipped: bool, tmp_path: Path) -> None:
    tensors = {
        "fp32": torch.randn(3, 4),
        "bf16": torch.randn(5).bfloat16(),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "ints": torch.arange(7),
        "scalar": torch.tensor(3.5),
    }
    tensors["tied"] = tensors["fp32"]
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    found = read_bin(tmp_path / "pytorch_model.bin")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert content[found[name].start : found[name].end] == raw
        assert found[name].shape == tuple(tensor.shape)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this must never be printed",)


def test_a_bin_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"its pickle needs __builtin__.print; only plain tensors are read"):
        read_bin(tmp_path / "pytorch_model.bin")
    (tmp_path / "old.bin").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match=r"not a file as torch.save writes it"):
        read_bin(tmp_path / "old.bin")
    assert capsys.readouterr().out == ""


def test_a_strided_tensor_in_a_bin_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(4, 4).T}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a tensor that is not contiguous"):
        read_bin(tmp_path / "pytorch_model.bin")


def test_an_old_bin_that_is_cut_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(4)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "old.bin").read_bytes()
    for length in range(15, len(whole)):
        (tmp_path / "old.bin").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="its pickle is damaged"):
            read_bin(tmp_path / "old.bin")
