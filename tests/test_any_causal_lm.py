"""Any causal LM trains: nothing here is of one family of models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from characters import ROWS, save_tokenizer
from runs import rows, weights
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen2VLConfig,
)

from tools.training.train import train

TEXT: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
SEES: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1}
ROTARY = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def config_of(family: str, vocabulary: int) -> Any:
    if family == "gpt2":
        return GPT2Config(vocab_size=vocabulary, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    if family == "qwen2-vl":
        words = {**TEXT, "vocab_size": vocabulary, "rope_parameters": ROTARY}
        tokens = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
        return Qwen2VLConfig(text_config=words, vision_config=SEES, **tokens)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[family](vocab_size=vocabulary, **TEXT)


@pytest.fixture(params=["llama", "qwen2", "gpt2", "qwen2-vl"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model of a family with a tokenizer of single characters, and rows of text beside it."""
    folder = tmp_path / request.param
    folder.mkdir()
    torch.manual_seed(0)
    config = config_of(request.param, save_tokenizer(folder))
    auto = AutoModelForImageTextToText if request.param == "qwen2-vl" else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.mark.parametrize("method", ["lora", "full"])
def test_b7_any_causal_lm_trains_two_steps(family: Path, method: str) -> None:
    run = family.parent / "run"
    groups = {
        "model": {"model_name_or_path": str(family)},
        "data": {"train_file": str(family.parent / "rows.jsonl")},
        "finetuning": {"method": method, "r": 2},
        "training": {"output_dir": str(run), "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2},
        "report": {"samples": ["what is 3"], "gradient_norms": True},
        "generating": {"max_new_tokens": 3},
    }
    (family.parent / "run.json").write_text(json.dumps(groups))
    report = train(family.parent / "run.json")
    losses = [row["loss"] for row in rows(run) if "loss" in row]
    assert losses[1] < losses[0]
    assert [row["step"] for row in rows(run, "samples.jsonl")] == [0, 2]
    assert any(".0" in key for key in rows(run)[0] if key.startswith("grad_norm/"))
    trained, before = weights(run / report.details["checkpoint"]), weights(family)
    if method == "full":
        assert trained.keys() == before.keys()
        assert any(not torch.equal(tensor, before[name]) for name, tensor in trained.items())
    else:
        assert all("lora_" in name for name in trained)
