"""A tiny causal LM with a tokenizer of single characters, and a run that trains it."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROWS = [{"prompt": f"what is {n}", "completion": f" it is {n + 1}"} for n in range(24)]
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_tokenizer(folder: Path) -> int:
    """Write the tokenizer and return the size of its vocabulary."""
    vocabulary = {token: n for n, token in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return len(vocabulary)


def save_llama(folder: Path, *, tied: bool) -> Path:
    """Write a Llama of two layers with its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=save_tokenizer(folder), num_key_value_heads=1, tie_word_embeddings=tied, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_run(folder: Path, model: Path) -> Path:
    """A configuration of four steps, a checkpoint after every second; its rows and its directory `run` beside it."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    training = {"output_dir": str(folder / "run"), "max_steps": 4, "save_steps": 2, "logging_steps": 1, "seed": 1}
    groups = {
        "model": {"model_name_or_path": str(model)},
        "data": {"train_file": str(folder / "rows.jsonl")},
        "finetuning": {"r": 2},
        "training": {**training, "per_device_train_batch_size": 2, "learning_rate": 1e-2},
    }
    file = folder / "run.json"
    file.write_text(json.dumps(groups))
    return file
