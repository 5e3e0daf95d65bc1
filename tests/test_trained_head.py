"""Reward training starts from the head that a model has; a second one only when it is asked for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.heads.finding import find_heads
from tools.training import value_head
from tools.training.train import train

H = 32
TRAINED = torch.linspace(-1, 1, H).reshape(1, H)
PAIRS = [{"prompt": f"{n} and", "chosen": f" yes {n}", "rejected": f" no {n}!"} for n in range(8)]


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers, untied, with a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("causal")
    vocabulary = {token: n for n, token in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


def rewritten(causal: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
    """A copy of the model with other tensors and other fields of its config."""
    shutil.copytree(causal, path)
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors) or tensors, path / "model.safetensors", {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | config))
    return path


def flat(causal: Path, path: Path) -> Path:
    head = {"v_head.summary.weight": TRAINED, "v_head.summary.bias": torch.tensor([0.25])}
    return rewritten(causal, path, lambda tensors: tensors | head)


def zero3(causal: Path, path: Path) -> Path:
    head = {"v_head.summary.weight": TRAINED, "v_head.summary.bias": torch.tensor([0.25])}
    return rewritten(causal, path, lambda tensors: {f"pretrained_model.{n}": t for n, t in tensors.items()} | head)


def split(causal: Path, path: Path) -> Path:
    shutil.copytree(causal, path)
    head = {"v_head.summary.weight": TRAINED, "v_head.summary.bias": torch.tensor([0.25])}
    save_file(head, path / "value_head.safetensors", {"format": "pt"})
    return path


def declared(causal: Path, path: Path) -> Path:
    """The causal LM with `score`, which its config calls a classifier."""
    config = {"architectures": ["LlamaForSequenceClassification"]}
    return rewritten(causal, path, lambda tensors: tensors | {"score.weight": TRAINED}, **config)


def classifier(causal: Path, path: Path) -> Path:
    """What transformers saves: no lm_head."""
    shutil.copytree(causal, path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    model.score.weight.data.copy_(TRAINED)
    model.save_pretrained(path)
    return path


def trlx(causal: Path, path: Path) -> Path:
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(H, 2 * H), nn.ReLU(), nn.Linear(2 * H, 1)).state_dict()
    head = {f"v_head.{name}": tensor for name, tensor in mlp.items()}
    return rewritten(causal, path, lambda tensors: {f"base_model.{n}": t for n, t in tensors.items()} | head)


LAYOUTS = (flat, zero3, split, declared, classifier, trlx)


def config(model: Path, folder: Path) -> Path:
    """Two steps of reward training that leave the weights as they are."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    training = {"output_dir": str(folder / "run"), "max_steps": 2, "save_steps": 1, "seed": 1, "learning_rate": 0.0}
    groups = {
        "model": {"model_name_or_path": str(model)},
        "data": {"train_file": str(folder / "pairs.jsonl")},
        "finetuning": {"stage": "reward", "method": "full", "r": 2},
        "training": {**training, "per_device_train_batch_size": 2, "gradient_checkpointing": False},
    }
    (folder / "config.json").write_text(json.dumps(groups))
    return folder / "config.json"


def scores(path: Path) -> torch.Tensor:
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    with torch.no_grad():
        return value_head.load(path)(ids, (ids != 0).long())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_vh_13_training_goes_on_from_the_head_that_is_there(
    layout: Callable[[Path, Path], Path], causal: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = layout(causal, tmp_path / "model")
    with caplog.at_level("INFO", logger="tools"):
        train(config(model, tmp_path))
    assert "goes on from its value head" in caplog.text
    assert ("score.weight" if layout in (declared, classifier) else "v_head") in caplog.text
    saved = tmp_path / "run" / "checkpoint-2"
    assert torch.equal(scores(saved), scores(model))
    opened = Checkpoint.open(saved)
    assert opened.model
    assert len(find_heads(opened.model.tensors, opened.config)) == 1  # and no second one beside it


@pytest.mark.parametrize("layout", [flat, declared, trlx], ids=lambda layout: layout.__name__)
def test_vh_13_an_adapter_goes_on_from_it_too(
    layout: Callable[[Path, Path], Path], causal: Path, tmp_path: Path
) -> None:
    model = layout(causal, tmp_path / "model")
    train(config(model, tmp_path), ["finetuning.method=lora"])
    torch.testing.assert_close(scores(tmp_path / "run" / "checkpoint-2"), scores(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", [flat, declared, classifier], ids=lambda layout: layout.__name__)
def test_vh_13_a_new_head_is_made_only_when_it_is_asked_for(
    layout: Callable[[Path, Path], Path], causal: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = layout(causal, tmp_path / "model")
    with caplog.at_level("INFO", logger="tools"):
        train(config(model, tmp_path), ["model.value_head=new"])
    assert "a new value head" in caplog.text
    head = value_head.load(tmp_path / "run" / "checkpoint-2").v_head
    assert not torch.equal(head.summary.weight, TRAINED)


def test_a_model_without_head_gets_a_new_one(causal: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tools"):
        train(config(causal, tmp_path))
    assert "a new value head" in caplog.text


@pytest.mark.parametrize("layout", [classifier, trlx], ids=lambda layout: layout.__name__)
def test_a_run_that_started_from_a_head_resumes(
    layout: Callable[[Path, Path], Path], causal: Path, tmp_path: Path
) -> None:
    model = layout(causal, tmp_path / "model")
    learning = ["training.learning_rate=0.01"]
    train(config(model, tmp_path), learning)
    run = tmp_path / "run"
    expected = load_file(run / "checkpoint-2" / "model.safetensors")
    shutil.rmtree(run / "checkpoint-2")
    state = run / ".burnish" / "train.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "state": "stopped"}))
    train(tmp_path / "config.json", learning)
    resumed = load_file(run / "checkpoint-2" / "model.safetensors")
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_one_of_several_heads_is_chosen_and_none_is_guessed(causal: Path, tmp_path: Path) -> None:
    two = {"v_head.summary.weight": TRAINED, "v_head.summary.bias": torch.zeros(1), "reward_head.weight": -TRAINED}
    model = rewritten(causal, tmp_path / "model", lambda tensors: tensors | two)
    file = config(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"several value heads: .*model\.value_head=new"):
        train(file)
    assert not (tmp_path / "run" / ".burnish" / "train.json").exists()
    train(file, ["model.value_head=reward_head"])
    assert torch.equal(value_head.load(tmp_path / "run" / "checkpoint-2").v_head.summary.weight, -TRAINED)
    with pytest.raises(CheckpointError, match="no value head called score"):
        train(file, ["model.value_head=score", f"training.output_dir={tmp_path / 'other'}"])


def test_a_classifier_of_two_labels_is_no_reward_model(causal: Path, tmp_path: Path) -> None:
    shutil.copytree(causal, tmp_path / "model")
    AutoModelForSequenceClassification.from_pretrained(causal, num_labels=2).save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"score\.weight \[2, 32\]"):
        train(config(tmp_path / "model", tmp_path))


def test_an_adapter_needs_a_decoder_with_lm_head(causal: Path, tmp_path: Path) -> None:
    model = classifier(causal, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"has no lm_head, which a LoRA adapter needs"):
        train(config(model, tmp_path), ["finetuning.method=lora"])


def test_an_adapter_with_a_head_is_merged_first(causal: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(causal), lora)
    value_head.save(value_head.ValueHeadModel(adapted), tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(causal / file, tmp_path / "model")
    with pytest.raises(CheckpointError, match="merge it first"):
        train(config(tmp_path / "model", tmp_path))
