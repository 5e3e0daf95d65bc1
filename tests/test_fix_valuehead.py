"""The value head leaves the weights, and what remains is the same model to the bit."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import contents, state
from transformers import AutoModelForCausalLM

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import build_header, read_header
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.inspect import inspect

Recorded = Callable[[str], Path]
HEAD_NAMES = {"v_head.summary.weight", "v_head.summary.bias"}


def logits(path: Path) -> torch.Tensor:
    """What transformers says after a plain load, which must miss nothing and find nothing it does not know."""
    model, loading = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(torch.arange(10)[None]).logits


@pytest.mark.parametrize(
    "layout", ["flat", "prefixed", "sharded", "head_in_a_shard_of_its_own", "pickled", "hard_linked", "linked"]
)
def test_the_split_model_has_the_logits_of_the_model_before(layout: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.LAYOUTS[layout](tiny, tmp_path / "checkpoint")
    fix_valuehead(path)
    assert torch.equal(logits(path), logits(tiny))
    if layout == "pickled":
        found = torch.load(path / "value_head.bin", weights_only=True)
    else:
        found = load_file(path / "value_head.safetensors")
    assert found.keys() == HEAD_NAMES
    assert all(torch.equal(found[name], heads.HEAD[name]) for name in HEAD_NAMES)


@pytest.mark.parametrize("layout", ["at_start", "at_start_prefixed"])
def test_a_bf16_decoder_keeps_its_bytes_when_the_head_lay_before_it(layout: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.LAYOUTS[layout](tiny, tmp_path / "checkpoint")
    report = fix_valuehead(path)
    assert report.edited == ("model.safetensors",)
    assert "--copy" in report.details["not aligned to 8 bytes"]
    expected = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert torch.equal(logits(path), expected(torch.arange(10)[None]).logits)


def test_copy_writes_an_aligned_file_and_no_byte_of_the_old_one(tiny: Path, tmp_path: Path) -> None:
    path = heads.at_start(tiny, tmp_path / "checkpoint")
    with (path / "model.safetensors").open("rb") as before:
        content = before.read()
        report = fix_valuehead(path, copy=True)
        before.seek(0)
        assert before.read() == content
    assert "model.safetensors" in report.written
    assert read_header(path / "model.safetensors").length % 8 == 0


@pytest.mark.parametrize("layout", ["hard_linked", "linked"])
def test_a_file_that_others_hold_is_not_edited(layout: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.LAYOUTS[layout](tiny, tmp_path / "checkpoint")
    other = tmp_path / ("elsewhere" if layout == "hard_linked" else "blob")
    before = other.read_bytes()
    fix_valuehead(path)
    assert other.read_bytes() == before
    assert not (path / "model.safetensors").is_symlink()


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before torch 1.6"])
def test_a_bin_becomes_safetensors_on_request(old: bool, tiny: Path, tmp_path: Path) -> None:
    path = heads.pickled(tiny, tmp_path / "checkpoint")
    if old:
        tensors = torch.load(path / "pytorch_model.bin", weights_only=True)
        torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    report = fix_valuehead(path, safetensors=True)
    assert (report.written, report.removed) == (
        ("model.safetensors", "value_head.safetensors"),
        ("pytorch_model.bin",),
    )
    assert torch.equal(logits(path), logits(tiny))
    assert load_file(path / "value_head.safetensors").keys() == HEAD_NAMES


@pytest.mark.parametrize("copy", [False, True], ids=["edited", "copied"])
def test_fi_04_a_file_without_metadata_gets_its_format(copy: bool, tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    save_file(load_file(path / "model.safetensors"), path / "model.safetensors")
    assert read_header(path / "model.safetensors").metadata == {}
    fix_valuehead(path, copy=copy)
    written = [read_header(path / name).metadata for name in ("model.safetensors", "value_head.safetensors")]
    assert written == [{"format": "pt"}] * 2


def test_fi_04_metadata_of_the_file_is_kept(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    fix_valuehead(path)
    assert read_header(path / "model.safetensors").metadata == {"format": "pt", "origin": "a test"}
    assert read_header(path / "value_head.safetensors").metadata == {"format": "pt"}


def test_vh_01_every_name_behind_a_wrapper_prefix(tiny: Path, tmp_path: Path) -> None:
    path = heads.prefixed(tiny, tmp_path / "checkpoint")
    before = contents(path)
    fix_valuehead(path)
    after = contents(path)
    assert {name for name in after if after[name] != before.get(name)} == {
        "model.safetensors",
        "value_head.safetensors",
    }
    ours, theirs = load_file(path / "model.safetensors"), load_file(tiny / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 21
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits(path), logits(tiny))
    assert not fix_valuehead(path).changed


def test_a_prefix_goes_without_a_head_too(tiny: Path, tmp_path: Path) -> None:
    path = heads.prefixed(tiny, tmp_path / "checkpoint")
    tensors = load_file(path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name not in HEAD_NAMES}, path / "model.safetensors")
    report = fix_valuehead(path)
    assert report.summary == "pretrained_model. dropped from 21 names; there is no value head"
    assert torch.equal(logits(path), logits(tiny))


def test_vh_02_the_head_in_the_last_of_several_shards(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    index_before = json.loads((path / "model.safetensors.index.json").read_text())
    before = {name: ((path / name).stat().st_ino, digest) for name, digest in contents(path).items()}
    fix_valuehead(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert not HEAD_NAMES & index["weight_map"].keys()
    assert index["metadata"]["total_size"] == index_before["metadata"]["total_size"] - 132
    for name in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "config.json"):
        assert ((path / name).stat().st_ino, contents(path)[name]) == before[name]
    assert load_file(path / "value_head.safetensors").keys() == HEAD_NAMES
    logits(path)


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_vh_04_no_head_is_nothing_to_do(kind: str, tiny: Path, tmp_path: Path, recorded: Recorded) -> None:
    path = recorded("trl-valuehead-lora") if kind == "adapter" else heads.flat(tiny, tmp_path / "checkpoint")
    if kind == "adapter":
        (path / "pytorch_model.bin").unlink()
    else:
        save_file(load_file(tiny / "model.safetensors"), path / "model.safetensors")
    before = state(path)
    report = fix_valuehead(path)
    assert (report.changed, report.summary) == (False, "no value head in the weights; nothing to do")
    assert state(path) == before
    assert not (path / "value_head.safetensors").exists()


RECORDED = [
    "trl-valuehead-single",
    "trl-valuehead-sharded",
    "trl-valuehead-lora",
    "hf-trainer-valuehead",
    "hf-trainer-valuehead-lora",
    "zero3-valuehead-final",
]


@pytest.mark.parametrize("name", RECORDED)
def test_checkpoints_that_trainers_wrote(name: str, recorded: Recorded) -> None:
    path = recorded(name)
    untouched = contents(path)
    report = fix_valuehead(path)
    assert report.changed
    assert report.details["head"]["framework"] == "TRL, LLaMA-Factory"
    if name == "trl-valuehead-lora":
        assert report.removed == ("pytorch_model.bin",)
        assert torch.load(path / "value_head.bin", weights_only=True).keys() == HEAD_NAMES
        assert contents(path)["adapter_model.safetensors"] == untouched["adapter_model.safetensors"]
        return
    assert load_file(path / "value_head.safetensors").keys() == HEAD_NAMES
    if name == "hf-trainer-valuehead-lora":
        assert "only the head was saved here" in report.summary
        assert not (path / "model.safetensors").exists()
        return
    if "config.json" not in untouched:
        assert "config.json is missing here" in report.summary
        source = Path(__file__).parent / "fixtures" / "trl-valuehead-single" / "config.json"
        (path / "config.json").write_bytes(source.read_bytes())
    logits(path)


@pytest.mark.parametrize("name", ["value_head.weight", "score.weight", "reward_head.weight"])
def test_vh_09_heads_of_other_names(name: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    weight = torch.linspace(-1, 1, 32)[None]
    save_file(load_file(tiny / "model.safetensors") | {name: weight}, path / "model.safetensors")
    shown = inspect(path).details["value head in the weights"]
    assert shown.keys() == {name}
    assert shown[name].startswith("F32 [1, 32] (")
    assert "`tools fix-valuehead` splits it out" in shown[name]
    fix_valuehead(path, output=tmp_path / "by name", head=name.split(".")[0])
    fix_valuehead(path)
    for split in (path, tmp_path / "by name"):
        assert torch.equal(load_file(split / "value_head.safetensors")[name], weight)
        assert torch.equal(logits(split), logits(tiny))


def test_a_classifier_keeps_the_head_that_belongs_to_it(recorded: Recorded) -> None:
    path = recorded("hf-reward-model")
    before = state(path)
    report = fix_valuehead(path)
    assert not report.changed
    assert "score.weight belongs to LlamaForSequenceClassification" in report.summary
    assert state(path) == before
    assert fix_valuehead(path, head="score").changed
    assert load_file(path / "value_head.safetensors").keys() == {"score.weight"}


def test_names_that_only_resemble_a_head_stay(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    alike = {
        "model.layers.0.v_head_dim": torch.ones(1),
        "model.v_head.summary.weight": torch.ones(1, 32),
        "v_head.decoder_blocks.0.weight": torch.ones(1, 32),
    }
    save_file(load_file(tiny / "model.safetensors") | alike, path / "model.safetensors")
    assert not fix_valuehead(path).changed


def test_shards_behind_an_emptied_one_are_numbered_anew_and_keep_their_bytes(tiny: Path, tmp_path: Path) -> None:
    path = heads.head_in_a_shard_of_its_own(tiny, tmp_path / "checkpoint")
    before = {shard.name: shard.stat().st_ino for shard in path.glob("model-*")}
    plan = fix_valuehead(path, dry_run=True).details["plan"]
    assert plan["model-00003-of-00003.safetensors"] == "rename model-00004-of-00004.safetensors"
    report = fix_valuehead(path)
    assert report.bytes_written < 4000
    after = {shard.name: shard.stat().st_ino for shard in path.glob("model-*.safetensors")}
    assert after == {
        f"model-0000{new}-of-00003.safetensors": before[f"model-0000{old}-of-00004.safetensors"]
        for new, old in ((1, 1), (2, 3), (3, 4))
    }
    assert torch.equal(logits(path), logits(tiny))


def test_a_checkpoint_without_weights_is_refused(recorded: Recorded) -> None:
    with pytest.raises(CheckpointError, match="holds no weights; consolidate it first"):
        fix_valuehead(recorded("zero3-checkpoint"))


def test_a_read_only_directory_is_refused_before_anything_is_written(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    path.chmod(0o555)
    try:
        if os.access(path, os.W_OK):  # root may write anywhere
            return
        with pytest.raises(CheckpointError, match="not writable; choose an --output"):
            fix_valuehead(path)
    finally:
        path.chmod(0o755)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts the bytes a process reads")
def test_untouched_shards_are_read_in_their_headers_alone(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for number in range(4):
        name, file = f"big.{number}", f"model-big-{number}.safetensors"
        header = build_header([(name, "U8", (64 << 20,), 64 << 20)], {"format": "pt"})
        (path / file).write_bytes(header)
        os.truncate(path / file, len(header) + (64 << 20))
        index["weight_map"][name] = file
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    before = bytes_read()
    fix_valuehead(path)
    assert bytes_read() - before < 1 << 20


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", ["v_head", "v_head.summary"])
def test_a_head_that_was_named_and_split_is_nothing_to_do(name: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    assert fix_valuehead(path, head=name).changed
    report = fix_valuehead(path, head=name)
    assert report.summary == "the value head is in value_head.safetensors already; nothing to do"


def test_a_model_is_not_said_to_lack_the_lm_head_that_it_has(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint", prefix="rwtransformer.")
    assert "lm_head" not in fix_valuehead(path).summary


def test_two_shards_that_would_get_one_name_are_refused(tiny: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "one.safetensors")
    torch.save(heads.HEAD | {"x": torch.ones(1)}, path / "one.bin")
    index = dict.fromkeys(tensors, "one.safetensors") | dict.fromkeys([*heads.HEAD, "x"], "one.bin")
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match="another shard would get its name as safetensors; rename one of the two"):
        fix_valuehead(path, safetensors=True)
