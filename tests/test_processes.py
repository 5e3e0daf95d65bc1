"""Callbacks in several processes: one of them tells, all of them train."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from characters import save_llama
from runs import rows
from safetensors.torch import load_file

SCRIPT = """
import sys
from pathlib import Path
import torch
from tiny_trainer import plain_trainer
from tools.training.callbacks import (
    GradientNormsCallback, LogCallback, MemoryCallback, ModelHookCallback, NonFiniteCallback, ReporterCallback,
    SamplesCallback, StopCallback,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

class Spoil(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        if "spoil" in sys.argv and state.global_step == 1:
            with torch.no_grad():
                model.lm_head.weight.fill_(float("nan"))

folder = Path(sys.argv[1])
samples = SamplesCallback(["a", "what is 3"], {"max_new_tokens": 3, "do_sample": True}, 2)
plain_trainer(
    folder / "run", Spoil(), NonFiniteCallback(), GradientNormsCallback(), LogCallback(),
    ReporterCallback({"a": {"b": 1}}, report_to=["tensorboard"]), samples, MemoryCallback(), ModelHookCallback(),
    StopCallback(), model=AutoModelForCausalLM.from_pretrained(folder / "model"),
    tokenizer=AutoTokenizer.from_pretrained(folder / "model"), ddp_backend="gloo",
).train()
"""


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two processes on this machine."""
    save_llama(folder / "model", tied=True)
    (folder / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(folder / "script.py"), str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_b2_two_processes_write_each_row_once(tmp_path: Path) -> None:
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert [row["step"] for row in rows(run, "samples.jsonl")] == [0, 0, 2, 2, 4, 4]
    assert [row["current_steps"] for row in rows(run) if "loss" in row] == [1, 2, 3, 4]
    assert len(rows(run, "memory.jsonl")) == 8
    assert len(list((run / "runs" / "arguments").iterdir())) == 1


def test_c10_each_process_keeps_its_own_batch(tmp_path: Path) -> None:
    done = train(tmp_path, "spoil")
    assert done.returncode != 0
    assert "the loss of step 2 is nan" in done.stderr
    kept = sorted((tmp_path / "run" / "non_finite").iterdir())
    assert kept
    assert {path.name for path in kept} <= {f"step-2-batch-1-process-{number}.safetensors" for number in (0, 1)}
    assert all(torch.is_tensor(load_file(path)["input_ids"]) for path in kept)
