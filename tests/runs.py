"""A tiny run of `tools train`, and what is asked of one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from characters import ROWS
from safetensors.torch import load_file

PAIRS = [{"prompt": f"{n} and", "chosen": f" yes {n}", "rejected": f" no {n}!"} for n in range(24)]


def write_config(base: Path, folder: Path) -> Path:
    """A run of six steps that saves every second one; `output_dir` is RUN beside it."""
    for name, rows in (("sft", ROWS), ("pairs", PAIRS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"output_dir": str(folder / "run"), "max_steps": 6, "save_steps": 2, "logging_steps": 1, "seed": 1}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    groups = {
        "model": {"model_name_or_path": str(base)},
        "data": {"train_file": str(folder / "sft.jsonl")},
        "finetuning": {"r": 2, "lora_dropout": 0.1},
        "training": {**training, **sizes, "gradient_checkpointing": False},
    }
    file = folder / "config.json"
    file.write_text(json.dumps(groups))
    return file


def reward(config: Path) -> list[str]:
    return ["finetuning.stage=reward", f"data.train_file={config.parent / 'pairs.jsonl'}"]


def run_in(config: Path, name: str) -> str:
    return f"training.output_dir={config.parent / name}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(left: Path, right: Path) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def forget_after(run: Path, step: int) -> None:
    """The run as a kill after `step` leaves it: no later checkpoint, and the state of a process that is gone."""
    for checkpoint in run.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > step:
            checkpoint.rename(run / f"gone-{checkpoint.name}")
    file = run / ".burnish" / "train.json"
    written = json.loads(file.read_text())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file.write_text(json.dumps({**written, "state": "running", "pid": ended.pid}))


def rows(run: Path, file: str = "train_log.jsonl") -> list[dict[str, Any]]:
    """The rows of one of the logs of a run."""
    return [json.loads(line) for line in (run / file).read_text().splitlines()]
