"""The value head: where it is written, where it is found again, and what its score is of."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tools.checkpoint.errors import CheckpointError
from tools.training import value_head
from tools.training.value_head import HEAD_KEYS, ValueHeadModel

HIDDEN = 16


def decoder(*, tied: bool, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    sizes = {"vocab_size": 40, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype).eval()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[3, 5, 7, 9], [4, 6, 0, 0]])
    return {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}


def split_out(folder: Path) -> None:
    """What fix-valuehead leaves: plain weights, and the head in a file of its own."""
    tensors = load_file(folder / "model.safetensors")
    save_file({key: tensors.pop(key) for key in HEAD_KEYS}, folder / "value_head.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def assert_same(left: torch.nn.Module, right: torch.nn.Module) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_score_is_of_the_last_token_whatever_the_padding() -> None:
    model = ValueHeadModel(decoder(tied=True))
    right = model(**batch())
    alone = model(torch.tensor([[4, 6]]), torch.ones(1, 2, dtype=torch.long))
    left = model(torch.tensor([[0, 0, 4, 6]]), torch.tensor([[0, 0, 1, 1]]))
    assert right.shape == (2,)
    torch.testing.assert_close(right[1:], alone)
    torch.testing.assert_close(left, alone)


def test_score_is_of_the_hidden_state_that_lm_head_would_see() -> None:
    base = decoder(tied=False)
    model = ValueHeadModel(base)
    hidden = base(**batch(), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model(**batch())[0], model.v_head.summary(hidden[0, 3])[0])


def test_lm_head_never_runs() -> None:
    base = decoder(tied=False)
    base.lm_head.register_forward_hook(lambda *_: pytest.fail("logits were computed"))
    ValueHeadModel(base)(**batch())


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_model_is_saved_in_the_layout_of_trl(tmp_path: Path, tied: bool) -> None:
    model = ValueHeadModel(decoder(tied=tied, dtype=torch.bfloat16))
    value_head.save(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
        head = {key: file.get_tensor(key) for key in HEAD_KEYS}
    plain = set(model.decoder.state_dict()) - ({"lm_head.weight"} if tied else set())
    assert names == plain | set(HEAD_KEYS)
    assert metadata == {"format": "pt"}
    assert [tuple(tensor.shape) for tensor in head.values()] == [(1, HIDDEN), (1,)]
    assert {tensor.dtype for tensor in head.values()} == {torch.float32}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"


def test_shards_hold_the_head_too_and_load_back(tmp_path: Path) -> None:
    model = ValueHeadModel(decoder(tied=False))
    value_head.save(model, tmp_path, max_shard_size="5KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(HEAD_KEYS) <= index["weight_map"].keys()
    assert len(set(index["weight_map"].values())) > 1
    assert_same(value_head.load(tmp_path), model)


def test_a_plain_loader_reads_the_model_under_the_head(tmp_path: Path) -> None:
    model = ValueHeadModel(decoder(tied=True))
    value_head.save(model, tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model.decoder)


@pytest.mark.parametrize("where", ["weights", "safetensors", "bin"])
def test_the_head_is_found_wherever_it_lies(tmp_path: Path, where: str) -> None:
    model = ValueHeadModel(decoder(tied=True))
    value_head.save(model, tmp_path)
    if where != "weights":
        split_out(tmp_path)
    if where == "bin":
        file = tmp_path / "value_head.safetensors"
        torch.save(load_file(file), tmp_path / "value_head.bin")
        file.unlink()
    assert_same(value_head.load(tmp_path), model)


@pytest.mark.parametrize("name", ["trl-valuehead-single", "trl-valuehead-sharded"])
def test_a_checkpoint_of_trl_loads(name: str) -> None:
    folder = Path(__file__).parent / "fixtures" / name
    stored = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    head = value_head.load(folder).v_head.summary
    assert torch.equal(head.weight, stored["v_head.summary.weight"])
    assert torch.equal(head.bias, stored["v_head.summary.bias"])


def test_an_adapter_keeps_its_head_beside_it(tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "adapter"
    decoder(tied=True).save_pretrained(base)
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = ValueHeadModel(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)).eval()
    value_head.save(model, saved)
    assert not (saved / "model.safetensors").exists()
    with safe_open(saved / "value_head.safetensors", "pt") as file:
        assert set(file.keys()) == set(HEAD_KEYS)
        assert file.metadata() == {"format": "pt"}
    torch.testing.assert_close(value_head.load(saved)(**batch()), model(**batch()), rtol=0, atol=0)


def test_an_adapter_on_a_changed_base_is_not_put_on_the_original_one(tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "adapter"
    decoder(tied=True).save_pretrained(base)
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="pissa")
    value_head.save(ValueHeadModel(get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)), saved)
    with pytest.raises(CheckpointError, match="convert-pissa"):
        value_head.load(saved)


def test_a_missing_head_is_an_error_and_never_a_random_one(tmp_path: Path) -> None:
    decoder(tied=True).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no value head"):
        value_head.load(tmp_path)
    with pytest.raises(CheckpointError, match="no value head"):
        value_head.restore(ValueHeadModel(decoder(tied=True)), tmp_path)


def test_an_empty_head_file_is_no_head(tmp_path: Path) -> None:
    value_head.save(ValueHeadModel(decoder(tied=True)), tmp_path)
    split_out(tmp_path)
    save_file({}, tmp_path / "value_head.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="no value head"):
        value_head.load(tmp_path)


def test_restore_refuses_weights_of_another_model(tmp_path: Path) -> None:
    value_head.save(ValueHeadModel(decoder(tied=True)), tmp_path)
    with pytest.raises(CheckpointError, match=r"no lm_head.weight"):
        value_head.restore(ValueHeadModel(decoder(tied=False)), tmp_path)
