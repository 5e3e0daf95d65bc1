# ruff: noqa: TID253 - imported only when an adapter is started from data
"""Adapters that start from data: what the model does on some rows decides where they begin."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from peft import EvaConfig, LoraConfig, LoraGAConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.eva import initialize_lora_eva_weights
from peft.tuners.lora.loraga import preprocess_loraga

from tools.checkpoint.errors import CheckpointError
from tools.training.collate import RowCollator

Batch = dict[str, torch.Tensor]

BATCH_ROWS = 8
MOST_BATCHES = 1000  # that EVA may see before it has settled


class Calibration:
    """The first rows of a dataset, on the device of the model, as often as they are asked for."""

    def __init__(self, rows: Any, pad_token_id: int, count: int):
        self.rows = [_row(row) for row in islice(rows, count)]
        self.collate = RowCollator(pad_token_id)
        self.given = 0

    def __len__(self) -> int:
        return -(-len(self.rows) // BATCH_ROWS)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.rows), BATCH_ROWS):
            self.given += 1
            if self.given > MOST_BATCHES:
                problem = f"{len(self.rows)} rows tell it too little: it did not settle within {MOST_BATCHES} batches"
                raise CheckpointError("finetuning.init_lora_weights", problem, "raise calibration_rows, or lower r")
            yield self.collate(self.rows[start : start + BATCH_ROWS])

    def singly(self, device: Any) -> Iterator[Batch]:
        """One row at a time, without padding."""
        for row in self.rows:
            yield {name: tensor.to(device) for name, tensor in self.collate([row]).items()}


def _row(row: Any) -> dict[str, list[int]]:
    """A row to learn from; of a preference pair the chosen answer."""
    tokens = row["input_ids"] if "input_ids" in row else row["chosen_input_ids"]
    return {"input_ids": tokens, "labels": row.get("labels", tokens)}


def config_of(init: str, **settings: Any) -> LoraConfig:
    """The config of an adapter that starts from data; each has one of its own for it."""
    own = {"eva": ("eva_config", EvaConfig), "corda": ("corda_config", CordaConfig)}
    name, kind = own.get(init, ("lora_ga_config", LoraGAConfig))
    # EVA's mask of labels would leave too few tokens of short rows.
    return LoraConfig(
        init_lora_weights=init, **{name: kind(**({"use_label_mask": False} if init == "eva" else {}))}, **settings
    )


def look(base: Any, config: LoraConfig, calibration: Calibration) -> None:
    """Let CorDA or LoRA-GA see the rows: what it needs is then at the layers that `config` names, of the base."""

    def forward() -> None:
        for batch in calibration.singly(base.device):
            base(input_ids=batch["input_ids"])

    def backward() -> None:
        for batch in calibration.singly(base.device):
            base(**batch).loss.backward()

    was_training = base.training
    if config.init_lora_weights == "corda":
        preprocess_corda(base, config, run_model=forward)
    else:
        preprocess_loraga(base, config, train_step=backward)
    base.train(was_training)


def eva_adapter(base: Any, config: LoraConfig, calibration: Calibration) -> PeftModel:
    """The base with an adapter whose A explains most of the layers' inputs, at each layer with the rank it takes."""
    model = get_peft_model(base, config)
    initialize_lora_eva_weights(model, calibration, show_progress_bar=False)
    return model
