"""Callbacks for people with a Trainer of their own: what a plain one leaves on disk."""

import contextlib
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from plain_trainer import HEAD_NAMES, Flat, Wrapper, adapted, decoder, trainer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from snapshots import state
from transformers import AutoModelForCausalLM

from tools.checkpoint.errors import CheckpointError
from tools.training.callbacks import FixValueHeadModelCallback, fix_valuehead_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"


def keys(file: Path) -> set[str]:
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        return set(opened.keys())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 12)[None]).logits


def loaded(path: Path) -> Any:
    """A plain load, which must miss nothing and find nothing it does not know."""
    model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    return model


@pytest.mark.parametrize(("kind", "tied"), [(Flat, False), (Flat, True), (Wrapper, False)])
def test_a3_each_checkpoint_of_a_plain_trainer_is_a_plain_model_with_its_head_beside_it(
    kind: type[Wrapper], tied: bool, tiny: Path, tmp_path: Path
) -> None:
    model = kind(decoder(tiny, tied=tied))
    running = trainer(model, tmp_path, [FixValueHeadModelCallback()])
    running.train()
    for number in (2, 4):
        checkpoint = tmp_path / f"checkpoint-{number}"
        assert keys(checkpoint / "value_head.safetensors") == HEAD_NAMES
        plain = keys(tiny / "model.safetensors") - ({"lm_head.weight"} if tied else set())
        assert keys(checkpoint / "model.safetensors") == plain
        assert (checkpoint / "optimizer.pt").exists()
    assert torch.equal(logits(loaded(checkpoint)), logits(model.pretrained_model))
    head = load_file(checkpoint / "value_head.safetensors")
    assert torch.equal(head["v_head.summary.weight"], model.v_head.summary.weight)
    assert {tensor.dtype for tensor in head.values()} == {torch.float32}
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert config["tie_word_embeddings"] is tied
    assert json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == 2
    assert not [file.name for file in checkpoint.iterdir() if "draft" in file.name]


def test_a2_the_root_is_fixed_by_a_call_after_save_model(tiny: Path, tmp_path: Path) -> None:
    model = Flat(decoder(tiny))
    running = trainer(model, tmp_path, [], save_strategy="no")
    running.train()
    running.save_model()
    report = fix_valuehead_checkpoint(running.model, str(tmp_path), True)
    assert report.changed
    assert torch.equal(logits(loaded(tmp_path)), logits(model.pretrained_model))
    before = state(tmp_path)
    again = fix_valuehead_checkpoint(running.model, str(tmp_path), True)
    assert (again.changed, state(tmp_path)) == (False, before)


@pytest.mark.parametrize("kind", [Flat, Wrapper])
def test_a2_of_an_adapted_model_the_adapter_is_there_and_the_head_beside_it(
    kind: type[Wrapper], tiny: Path, tmp_path: Path
) -> None:
    model = kind(adapted(tiny))
    trainer(model, tmp_path, [FixValueHeadModelCallback()]).train()
    checkpoint = tmp_path / "checkpoint-4"
    names = {file.name for file in checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "value_head.safetensors"} <= names
    assert not {"model.safetensors", "config.json"} & names
    assert keys(checkpoint / "value_head.safetensors") == HEAD_NAMES
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (config["inference_mode"], config["base_model_name_or_path"]) == (True, str(tiny))
    found = PeftModel.from_pretrained(decoder(tiny), checkpoint)
    assert torch.equal(logits(found), logits(model.pretrained_model))


def test_a2_without_a_live_model(tiny: Path, tmp_path: Path) -> None:
    path = heads.prefixed(tiny, tmp_path / "checkpoint")
    assert fix_valuehead_checkpoint(None, path, True).changed
    assert keys(path / "value_head.safetensors") == HEAD_NAMES
    assert torch.equal(logits(loaded(path)), logits(decoder(tiny)))


def test_a2_shards_stay_shards(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    fix_valuehead_checkpoint(Flat(decoder(tiny)), path, True)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert not HEAD_NAMES & index["weight_map"].keys()
    assert torch.equal(logits(loaded(path)), logits(decoder(tiny)))


@pytest.mark.parametrize("safe", [True, False])
def test_a2_safe_serialization_makes_safetensors_of_a_pickle(safe: bool, tiny: Path, tmp_path: Path) -> None:
    path = heads.pickled(tiny, tmp_path / "checkpoint")
    fix_valuehead_checkpoint(None, path, safe)
    names = {"model.safetensors", "value_head.safetensors"} if safe else {"pytorch_model.bin", "value_head.bin"}
    assert names <= {file.name for file in path.iterdir()}
    assert not [file for file in path.glob("*.bin") if safe]


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("layout", "size"), [("flat", 100), ("sharded", 100), ("pickled", 4096)])
def test_a2_a_full_disk_loses_nothing(layout: str, size: int, tiny: Path, tmp_path: Path) -> None:
    path = heads.LAYOUTS[layout](tiny, tmp_path / "checkpoint")
    before = state(path)
    with no_file_beyond(size), pytest.raises(CheckpointError, match="file too large"):
        fix_valuehead_checkpoint(None, path, True)
    assert {name: held for name, held in state(path).items() if ".burnish" not in str(name)} == before
    assert fix_valuehead_checkpoint(None, path, True).changed


@pytest.mark.parametrize("name", ["hf-trainer-valuehead", "hf-trainer-valuehead-lora"])
def test_a2_a_full_disk_while_the_live_model_is_written_loses_nothing(name: str, tmp_path: Path) -> None:
    path, model = recorded(name, tmp_path)
    before = state(path)
    with no_file_beyond(100), pytest.raises(CheckpointError, match="nothing is lost"):
        fix_valuehead_checkpoint(model, path, True)
    assert state(path) == before
    assert fix_valuehead_checkpoint(model, path, True).changed


def recorded(name: str, tmp_path: Path) -> tuple[Path, Wrapper]:
    """What a Trainer saved of TRL's class, and a live model like it."""
    path = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    decoder = AutoModelForCausalLM.from_pretrained(FIXTURES / "trl-valuehead-single")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return path, Wrapper(get_peft_model(decoder, lora) if name.endswith("lora") else decoder)


FULL = {"model.safetensors", "config.json", "generation_config.json"}
ADAPTER = {"adapter_model.safetensors", "adapter_config.json", "README.md"}


@pytest.mark.parametrize(
    ("name", "files"),
    [("hf-trainer-valuehead", FULL), ("hf-trainer-valuehead-lora", ADAPTER), ("zero3-valuehead-final", FULL)],
)
def test_a2_what_is_on_disk_afterwards(name: str, files: set[str], tmp_path: Path) -> None:
    """A full model, an adapted one of which only the head was saved, and one that ZeRO-3 gathered."""
    path, model = recorded(name, tmp_path)
    old = {file.name for file in path.iterdir()} - {"model.safetensors"}
    head = {n: t.clone() for n, t in load_file(path / "model.safetensors").items() if n in HEAD_NAMES}
    fix_valuehead_checkpoint(model, path, True)
    assert {file.name for file in path.iterdir()} - {".burnish"} == files | old | {"value_head.safetensors"}
    written = load_file(path / "value_head.safetensors")
    assert written.keys() == HEAD_NAMES
    assert all(torch.equal(written[key], head[key]) for key in HEAD_NAMES)
    if files is FULL:
        assert loaded(path).generation_config.eos_token_id == model.pretrained_model.generation_config.eos_token_id
        assert keys(path / "model.safetensors") == set(model.pretrained_model.state_dict())
    else:
        assert keys(path / "adapter_model.safetensors") == set(get_peft_model_state_dict(model.pretrained_model))


def test_a2_the_config_has_the_dtype_of_what_was_saved(tmp_path: Path) -> None:
    path, model = recorded("hf-trainer-valuehead", tmp_path)
    fix_valuehead_checkpoint(model.bfloat16(), path, True)
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"


def test_what_the_decoder_is_called_elsewhere_is_never_guessed(tiny: Path, tmp_path: Path) -> None:
    model = Wrapper(decoder(tiny))
    model.backbone = model.pretrained_model
    del model.pretrained_model
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    before = state(tmp_path)
    with pytest.raises(CheckpointError, match=r"nobody looks for a decoder under backbone\."):
        fix_valuehead_checkpoint(model, tmp_path, True)
    assert state(tmp_path) == before


def test_the_other_processes_leave_the_checkpoint_alone(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint-2")
    before = state(path)
    running = trainer(Flat(decoder(tiny)), tmp_path, [])
    running.state.global_step, running.state.is_world_process_zero = 2, False
    FixValueHeadModelCallback().on_save(running.args, running.state, running.control, model=running.model)
    assert state(path) == before
