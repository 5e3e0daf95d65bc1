"""Resuming: what only a process of its own, or each step looked at, can show."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import forget_after, reward, rows, weights
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from tools.training import value_head
from tools.training.train import train

RESIDUAL = """
import sys
from pathlib import Path
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from tools.training.callbacks.initial_adapter import add_adapter
base, folder, out, seed, init, rslora, dora = sys.argv[1:]
torch.manual_seed(int(seed))
config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=6, target_modules="all-linear", init_lora_weights=init,
                    use_rslora=rslora == "True", use_dora=dora == "True")
model = add_adapter(AutoModelForCausalLM.from_pretrained(base), config, Path(folder))
save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, out)
"""


@pytest.mark.parametrize("init", ["pissa_niter_4", "pissa", "olora"])
@pytest.mark.parametrize(("rslora", "dora"), [(False, False), (True, True)])
def test_the_residual_is_made_of_the_kept_adapter_in_another_process_with_another_seed(
    base: Path, tmp_path: Path, init: str, rslora: bool, dora: bool
) -> None:
    """W - s * B0 @ A0, no second decomposition: every tensor of the model is the same, bit for bit."""
    states = []
    for seed in (1, 2):
        out = tmp_path / f"{seed}.safetensors"
        arguments = [str(base), str(tmp_path / "pissa_init"), str(out), str(seed), init, str(rslora), str(dora)]
        subprocess.run([sys.executable, "-c", RESIDUAL, *arguments], check=True, capture_output=True)
        states.append(load_file(out))
    first, again = states
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())

    kept = load_file(tmp_path / "pissa_init" / "adapter_model.safetensors")
    original = load_file(base / "model.safetensors")
    scale = 6 / (2**0.5 if rslora else 2)
    for name, residual in again.items():
        if name.endswith("base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            part = scale * kept[f"{layer}.lora_B.weight"] @ kept[f"{layer}.lora_A.weight"]
            bare = layer.removeprefix("base_model.model.")
            torch.testing.assert_close(residual, original[f"{bare}.weight"] - part, rtol=0, atol=1e-6)


METHODS = {
    "lora": [],
    "pissa": ["finetuning.init_lora_weights=pissa_niter_4"],
    "full": ["finetuning.method=full"],
    "value head": ["finetuning.method=full", "finetuning.stage=reward"],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [2, 4])
def test_each_step_after_a_resume_equals_that_of_an_uninterrupted_run(
    config: Path, method: str, step: int, watch: Callable[[TrainerCallback], None]
) -> None:
    overrides = METHODS[method] + (reward(config)[1:] if method == "value head" else [])
    seen: list[tuple[int, dict[str, torch.Tensor]]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            seen.append((state.global_step, {name: tensor.clone() for name, tensor in model.state_dict().items()}))

    watch(Watch())
    train(config, overrides)
    whole = dict(seen)
    run = config.parent / "run"
    told = {row["current_steps"]: (row["loss"], row["grad_norm"]) for row in rows(run) if "loss" in row}
    forget_after(run, step)
    seen.clear()
    train(config, overrides)
    assert [number for number, _ in seen] == list(range(step + 1, 7))
    for number, tensors in seen:
        assert all(torch.equal(tensor, whole[number][name]) for name, tensor in tensors.items()), number
    again = [row for row in rows(run) if "loss" in row]
    assert {row["current_steps"]: (row["loss"], row["grad_norm"]) for row in again} == told
    assert [row["current_steps"] for row in again] == [1, 2, 3, 4, 5, 6]


def test_lg_02_a_run_resumes_without_its_log(config: Path) -> None:
    train(config)
    run = config.parent / "run"
    forget_after(run, 4)
    (run / "train_log.jsonl").unlink()
    train(config)
    assert [row["current_steps"] for row in rows(run) if "loss" in row] == [5, 6]


def test_a_split_head_is_loaded_back_tensor_by_tensor(config: Path, watch: Callable[[TrainerCallback], None]) -> None:
    overrides = [*reward(config), "finetuning.method=full"]
    train(config, overrides)
    run = config.parent / "run"
    forget_after(run, 4)
    tensors = weights(run / "checkpoint-4")
    head = {name: tensors.pop(name) for name in value_head.HEAD_KEYS}
    save_file(head, run / "checkpoint-4" / "value_head.safetensors", {"format": "pt"})
    save_file(tensors, run / "checkpoint-4" / "model.safetensors", {"format": "pt"})
    loaded: dict[str, torch.Tensor] = {}

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            loaded.update({name: tensor.clone() for name, tensor in model.state_dict().items()})

    watch(Watch())
    train(config, overrides)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in head.items())
    assert all(torch.equal(loaded[f"decoder.{name}"], tensor) for name, tensor in tensors.items())
    assert json.loads((run / ".burnish" / "train.json").read_text())["state"] == "finished"
