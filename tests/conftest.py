"""Tiny checkpoints built by the real libraries, and the recorded ones under tests/fixtures."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported: two threads on two busy cores are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest

RECORDED = Path(__file__).parent / "fixtures"


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[str], Path]:
    """A writable copy of a checkpoint under tests/fixtures, by its name."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(RECORDED / name, tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, saved by transformers: 21 tensors, fp32, untied."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in fp32, where `make model` puts it; without it a `real` test fails rather than skips."""
    path = Path(os.environ.get("BURNISH_MODEL", ".demo/model"))
    assert (path / "model.safetensors").is_file(), f"{path} is not there; run `make model`"
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with a tokenizer of single characters."""
    from characters import save_llama

    folder = tmp_path_factory.mktemp("base")
    return save_llama(folder, tied=True)


@pytest.fixture
def config(base: Path, tmp_path: Path) -> Path:
    """A run of six steps that saves every second one; `output_dir` is RUN beside it."""
    from runs import write_config

    return write_config(base, tmp_path)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> "Callable[[Any], None]":
    """Let every run of the test call this callback too."""
    from tools.training.callbacks import trackers

    def add(callback: Any) -> None:
        callback.name = "watch"
        monkeypatch.setattr(trackers, "tracker_callbacks", lambda *_: [callback])

    return add


@pytest.fixture
def tokenizer() -> Any:
    """A small tokenizer of any text, in ChatML."""
    from conversations import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Any]:
    """Write rows as JSON lines: the data of a run."""

    def write(*rows: Any, **options: Any) -> Any:
        from tools.training.config import DataArguments

        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataArguments(train_file=file, **options)

    return write
