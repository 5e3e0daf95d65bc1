# ruff: noqa: TID253 - imported only when this stage is trained
"""Reward modelling: a value head learns to score the chosen answer above the rejected one."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from tools.training import value_head
from tools.training.collate import PairCollator
from tools.training.data import load_preferences as load_rows
from tools.training.scored_model import load_decoder
from tools.training.scored_model import with_head as build_model
from tools.training.value_head import ValueHeadModel

__all__ = ["ARGUMENTS", "DEFAULTS", "RewardTrainer", "build_model", "build_trainer", "load_decoder", "load_rows"]

ARGUMENTS = TrainingArguments
# The columns of a pair are not parameters of the model, whose forward takes both sides as one batch.
DEFAULTS = {"remove_unused_columns": False, "label_names": []}


class RewardTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed here
    """Pairwise loss -log sigmoid(chosen - rejected); the head is saved with the model and loaded back with it."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._rewards: dict[str, list[float]] = defaultdict(list)
        super().__init__(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Mapping[str, torch.Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        scores = model(**inputs)
        chosen, rejected = scores.chunk(2)  # [2 * pairs] -> [pairs], [pairs]
        self._note_rewards(chosen.detach(), rejected.detach())
        loss = -logsigmoid(chosen - rejected).mean()
        return (loss, {"scores": scores}) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Any, None, None]:
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def _note_rewards(self, chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        side = "rewards" if self.model.training else "eval_rewards"
        self._rewards[f"{side}/chosen"].append(chosen.mean().item())
        self._rewards[f"{side}/rejected"].append(rejected.mean().item())
        self._rewards[f"{side}/margins"].append((chosen - rejected).mean().item())
        self._rewards[f"{side}/accuracies"].append((chosen > rejected).float().mean().item())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the mean of the rewards since the last log; those of an evaluation go to its own row.

        It is that of all processes, so that all of them find the same model the best.
        """
        evaluated = any(name.startswith("eval_") for name in logs)
        for name in [name for name in self._rewards if name.startswith("eval_") == evaluated]:
            values = self._rewards.pop(name)
            total, count = sum(values), float(len(values))
            if self.args.world_size > 1:
                among_all = torch.tensor([total, count], dtype=torch.float64, device=self.args.device)
                total, count = self.accelerator.reduce(among_all).tolist()
            logs[name] = total / count
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        value_head.save(self.model, folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        value_head.restore(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        value_head.restore(self.model, Path(self.state.best_model_checkpoint))


def build_trainer(
    model: ValueHeadModel,
    args: TrainingArguments,
    train_rows: Any,
    eval_rows: Any,
    tokenizer: Any,
    callbacks: Sequence[Any],
) -> RewardTrainer:
    """A RewardTrainer of a decoder with its head."""
    return RewardTrainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=PairCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
