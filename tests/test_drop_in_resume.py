"""A Trainer as it comes does not read a head that was split out; the callback puts it back."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_trainer import Flat, Wrapper, adapted, decoder, trainer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.training.callbacks import FixValueHeadModelCallback, restore_valuehead_checkpoint

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # of a run that gets better: the first
    "label_names": ["labels"],
    "prediction_loss_only": True,
}


class Keep(TrainerCallback):
    """The live weights at each save."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, torch.Tensor]] = {}

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen[f"checkpoint-{state.global_step}"] = parameters(model)


class AtStart(TrainerCallback):
    """The live weights when training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.weights = parameters(model)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("kind", "tied"), [(Flat, False), (Flat, True), (Wrapper, False)])
def test_a3_a_resumed_run_equals_an_uninterrupted_one(
    kind: type[Wrapper], tied: bool, tiny: Path, tmp_path: Path
) -> None:
    kept = Keep()
    trainer(kind(decoder(tiny, tied=tied)), tmp_path, [FixValueHeadModelCallback(), kept]).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    model, start = kind(decoder(tiny, tied=tied)), AtStart()
    trainer(model, tmp_path, [FixValueHeadModelCallback(), start]).train(resume_from_checkpoint=True)
    assert same(start.weights, kept.seen["checkpoint-2"])
    assert same(parameters(model), kept.seen["checkpoint-4"])


def test_a_plain_trainer_alone_goes_on_with_a_new_head_and_only_warns(tiny: Path, tmp_path: Path) -> None:
    """Why the callback loads it: the Trainer loads what has the names of the state dict, and leaves the rest."""
    kept, start = Keep(), AtStart()
    trainer(Flat(decoder(tiny)), tmp_path, [FixValueHeadModelCallback(), kept]).train()
    model = Flat(decoder(tiny))
    new, trained = parameters(model), kept.seen["checkpoint-2"]
    trainer(model, tmp_path, [start]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    missed = {name for name in trained if not torch.equal(start.weights[name], trained[name])}
    assert missed == {"v_head.summary.weight", "v_head.summary.bias"}
    assert all(torch.equal(start.weights[name], new[name]) for name in missed)


def test_a_plain_trainer_alone_fails_where_all_names_were_wrapped(tiny: Path, tmp_path: Path) -> None:
    trainer(Wrapper(decoder(tiny)), tmp_path, [FixValueHeadModelCallback()]).train()
    with pytest.raises(AttributeError, match="_keys_to_ignore_on_save"):
        trainer(Wrapper(decoder(tiny)), tmp_path, []).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", [Flat, Wrapper])
def test_a3_the_best_model_comes_back_with_its_head(kind: type[Wrapper], tiny: Path, tmp_path: Path) -> None:
    kept, model = Keep(), kind(decoder(tiny))
    running = trainer(model, tmp_path, [FixValueHeadModelCallback(), kept], **BEST)
    running.train()
    assert Path(running.state.best_model_checkpoint).name == "checkpoint-2"
    assert same(parameters(model), kept.seen["checkpoint-2"])
    assert not same(parameters(model), kept.seen["checkpoint-4"])


@pytest.mark.parametrize("kind", [Flat, Wrapper])
def test_an_adapted_model_resumes_with_one_method_more(kind: type[Wrapper], tiny: Path, tmp_path: Path) -> None:
    class Restoring(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            restore_valuehead_checkpoint(self.model, Path(resume_from_checkpoint))

    kept, start = Keep(), AtStart()
    trainer(kind(adapted(tiny)), tmp_path, [FixValueHeadModelCallback(), kept]).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    model = kind(adapted(tiny))
    with pytest.raises(ValueError, match="Can't find a checkpoint index"):  # a Trainer as it comes
        trainer(model, tmp_path, [FixValueHeadModelCallback()]).train(resume_from_checkpoint=True)
    running = trainer(model, tmp_path, [FixValueHeadModelCallback(), start], trainer_class=Restoring)
    running.train(resume_from_checkpoint=True)
    assert same(start.weights, kept.seen["checkpoint-2"])
    assert same(parameters(model), kept.seen["checkpoint-4"])


def test_a_checkpoint_elsewhere_is_warned_of(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(Flat(decoder(tiny)), tmp_path / "one", [FixValueHeadModelCallback()]).train()
    checkpoint = tmp_path / "one" / "checkpoint-2"
    with caplog.at_level(logging.WARNING, logger="tools"):
        trainer(Flat(decoder(tiny)), tmp_path / "two", [FixValueHeadModelCallback()]).train(str(checkpoint))
    assert "checkpoint-2 is not there; the value head of the checkpoint that was loaded may not be" in caplog.text


def test_the_checkpoint_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    model = Flat(decoder(tiny))
    trainer(model, tmp_path, [FixValueHeadModelCallback()], max_steps=2).train()
    checkpoint = tmp_path / "checkpoint-2"
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"other.weight": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"other\.weight is not of this model"):
        restore_valuehead_checkpoint(model, checkpoint)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no pretrained_model\.model\.norm\.weight"):
        restore_valuehead_checkpoint(model, checkpoint)
    (checkpoint / "value_head.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no value head"):
        restore_valuehead_checkpoint(model, checkpoint)
