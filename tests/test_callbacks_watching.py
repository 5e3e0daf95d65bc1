"""What is watched while a model trains: its own hook, the gradients of its parts, the memory of each step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from runs import rows
from tiny_trainer import plain_trainer, tiny_llama
from transformers import LlamaForCausalLM, TrainerCallback

from tools.training.callbacks import (
    GradientNormsCallback,
    LogCallback,
    MemoryCallback,
    ModelHookCallback,
)
from tools.training.callbacks.gradient_norms import part_of
from tools.training.train import train


class Curious(LlamaForCausalLM):
    """A model that wants to know."""

    def on_step_end(self, step: int, logs: Mapping[str, Any]) -> None:
        self.told = [*getattr(self, "told", []), (step, logs.get("step"), logs.get("loss"))]


@pytest.mark.parametrize("adapted", [False, True])
def test_b4_a_model_with_a_hook_is_told_of_each_step(tmp_path: Path, adapted: bool) -> None:
    curious = Curious(tiny_llama().config)
    model = get_peft_model(curious, LoraConfig(target_modules=["q_proj"])) if adapted else curious
    plain_trainer(tmp_path, ModelHookCallback(), model=model).train()
    assert [step for step, _, _ in curious.told] == [1, 2, 3, 4]
    assert [of for _, of, _ in curious.told] == [None, 1, 2, 3]  # the newest there are
    assert curious.told[1][2] > 0


def test_b4_other_models_are_left_alone(tmp_path: Path) -> None:
    assert plain_trainer(tmp_path, ModelHookCallback()).train().global_step == 4


class Exact(TrainerCallback):
    """The gradients as the optimizer gets them, and how they were scaled."""

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.norms.append(
            {
                part: torch.cat([p.grad.flatten() for name, p in model.named_parameters() if part_of(name) == part])
                .norm()
                .item()
                for part in ("layers.0", "layers.1", "embed_tokens", "lm_head", "norm")
            }
        )


@pytest.mark.parametrize("max_grad_norm", [1e-3, 0.0])
def test_b5_gradient_norms_of_each_part_reach_log_and_history(tmp_path: Path, max_grad_norm: float) -> None:
    exact = Exact()
    trainer = plain_trainer(tmp_path, exact, GradientNormsCallback(), LogCallback(), max_grad_norm=max_grad_norm)
    trainer.train()
    logged = [row for row in rows(tmp_path) if "loss" in row]
    for row, entry, norms in zip(logged, trainer.state.log_history, exact.norms, strict=False):
        scale = row["grad_norm"] / sum(norm**2 for norm in norms.values()) ** 0.5  # of clipping
        for part, norm in norms.items():
            assert row[f"grad_norm/{part}"] == pytest.approx(norm * scale, rel=1e-4)
            assert entry[f"grad_norm/{part}"] == row[f"grad_norm/{part}"]
    assert len(logged) == 4
    assert (logged[0]["grad_norm"] > 10 * exact.norms[0]["layers.0"]) == bool(max_grad_norm)


def test_b5_only_steps_that_are_logged_cost_anything(tmp_path: Path) -> None:
    callback = GradientNormsCallback()
    measured = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            measured.append(bool(callback._norms))

    trainer = plain_trainer(tmp_path, callback, Watch(), logging_steps=3)
    trainer.train()
    assert measured == [False, False, True, False]
    assert sum("grad_norm/layers.0" in entry for entry in trainer.state.log_history) == 1


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("base_model.model.model.layers.3.mlp.up_proj.lora_A.default.weight", "layers.3"),
        ("model.layers.11.self_attn.q_proj.weight", "layers.11"),
        ("transformer.h.0.attn.c_attn.weight", "h.0"),
        ("decoder.model.embed_tokens.weight", "embed_tokens"),
        ("v_head.summary.bias", "v_head"),
        ("model.language_model.layers.1.mlp.gate.weight", "language_model.layers.1"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_b5_a_parameter_belongs_to_a_part(name: str, part: str) -> None:
    assert part_of(name) == part


def test_c10_memory_of_each_step_is_noted_with_and_without_gradients(tmp_path: Path) -> None:
    plain_trainer(tmp_path, MemoryCallback(), max_steps=2).train()
    written = rows(tmp_path, "memory.jsonl")
    assert [(row["step"], row["at"]) for row in written] == [
        (step, at) for step in (1, 2) for at in ("gradients", "end")
    ]
    assert all(row["rss"] > 0.05 for row in written)


def test_a8_a_run_watches_what_its_configuration_asks_for(config: Path) -> None:
    run = config.parent / "run"
    train(config, ["report.gradient_norms=true", "report.memory=true", "max_steps=2"])
    assert "grad_norm/layers.0" in rows(run)[0]
    assert len(rows(run, "memory.jsonl")) == 4
