"""A loss that is no number ends the training before it reaches the weights, and its batch is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import forget_after, reward, run_in
from safetensors.torch import load_file
from tiny_trainer import Rows, plain_trainer, tiny_llama
from transformers import TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.training.callbacks import NonFiniteCallback
from tools.training.train import train

POISON = 31


class Poisoned(Rows):
    """One row of the twelve has a token whose embedding is no number."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        if index == 7:
            row["input_ids"][3] = POISON
        return row


def poisoned_llama(value: float) -> Any:
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_c10_a_batch_that_gives_no_number_is_kept_and_the_weights_too(
    tmp_path: Path, value: float, accumulated: int
) -> None:
    model = poisoned_llama(value)
    steps = {"gradient_accumulation_steps": accumulated, "train_sampling_strategy": "sequential"}
    seen: list[dict[str, torch.Tensor]] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    finite = NonFiniteCallback()
    trainer = plain_trainer(tmp_path, Watch(), finite, model=model, rows=Poisoned(), **steps)
    step, batch = {1: (4, 1), 3: (2, 1)}[accumulated]
    with pytest.raises(CheckpointError, match=f"the loss of step {step} is nan; .*step-{step}-batch-{batch}"):
        trainer.train()
    finite.close()
    (kept,) = (tmp_path / "non_finite").iterdir()
    assert POISON in load_file(kept)["input_ids"]
    assert load_file(kept).keys() >= {"input_ids", "labels"}
    after = model.state_dict()
    assert all(torch.equal(after[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in seen[-1].items())
    assert not model._forward_hooks


def test_c10_a_loss_of_ones_own_is_seen_by_its_gradient(tmp_path: Path) -> None:
    class Own(type(plain_trainer(tmp_path))):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            loss = model(**inputs).loss
            return loss * float("nan") if self.state.global_step == 2 else loss

    trainer = plain_trainer(tmp_path, NonFiniteCallback(), gradient_accumulation_steps=2)
    trainer.__class__ = Own
    with pytest.raises(CheckpointError, match=r"the gradient of model.embed_tokens.weight in step 3 is not finite"):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "non_finite").iterdir()) == [
        "step-3-batch-1.safetensors",
        "step-3-batch-2.safetensors",
    ]


def test_c10_a_finite_run_keeps_nothing(tmp_path: Path) -> None:
    plain_trainer(tmp_path, NonFiniteCallback()).train()
    assert not (tmp_path / "non_finite").exists()


class Spoil(TrainerCallback):
    """Makes a weight infinite before step 4."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == 3:
            with torch.no_grad():
                next(iter(model.parameters())).fill_(float("inf"))


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_c10_a_run_ends_with_one_line_and_goes_on_from_its_last_checkpoint(
    config: Path, stage: str, watch: Callable[[TrainerCallback], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = reward(config) if stage == "reward" else []
    with monkeypatch.context() as patched:
        patched.setattr("tools.training.callbacks.trackers.tracker_callbacks", lambda *_: [named(Spoil())])
        with pytest.raises(CheckpointError, match=r"step[ -]4.*is in step-4-batch-1"):
            train(config, overrides)
    run = config.parent / "run"
    assert (run / "non_finite" / "step-4-batch-1.safetensors").exists()
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-2"}
    forget_after(run, 2)
    assert train(config, overrides).details["steps"] == 6
    assert train(config, [*overrides, run_in(config, "whole")]).changed


def named(callback: TrainerCallback) -> TrainerCallback:
    callback.name = "watch"
    return callback
