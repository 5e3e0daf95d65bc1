# ruff: noqa: TID253 - imported only when this stage is trained
"""Supervised fine-tuning: next-token loss on the answers, by TRL's SFTTrainer."""

from collections.abc import Sequence
from typing import Any

from trl import SFTConfig, SFTTrainer

from tools.training.collate import RowCollator
from tools.training.config import ModelArguments
from tools.training.data import load_sft as load_rows
from tools.training.isolation import isolate
from tools.training.model import load_decoder

__all__ = ["ARGUMENTS", "DEFAULTS", "build_model", "build_trainer", "load_decoder", "load_rows"]

ARGUMENTS = SFTConfig
# The rows arrive tokenised, cut and labelled: TRL has nothing left to prepare.
DEFAULTS = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}


class _Trainer(SFTTrainer):  # type: ignore[misc]  # TRL is not typed
    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: it would go to README.md of the output directory, whoever wrote one there, and name no base."""


def build_model(decoder: Any, model: ModelArguments) -> Any:
    """The decoder is all there is."""
    return decoder


def build_trainer(
    model: Any, args: SFTConfig, train_rows: Any, eval_rows: Any, tokenizer: Any, callbacks: Sequence[Any]
) -> SFTTrainer:
    """An SFTTrainer that takes input_ids and labels of the rows as they are, packed or one by one."""
    takes_one = "seq_lengths" in train_rows.column_names and isolate(model)
    return _Trainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=RowCollator(tokenizer.pad_token_id, single=takes_one),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
