"""A plain transformers Trainer, as people have it in scripts of their own."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    """Twelve rows of six tokens."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(6) + index) % 30
        return {"input_ids": ids, "labels": ids.clone()}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def plain_trainer(
    folder: Path, *callbacks: Any, model: Any = None, rows: Any = None, tokenizer: Any = None, **training: Any
) -> Trainer:
    """Four steps of two rows on the processor, nothing saved, unless `training` says otherwise."""
    defaults = {"max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no"}
    fixed = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    return Trainer(
        model or tiny_llama(),
        TrainingArguments(**defaults | training, **fixed),
        train_dataset=rows or Rows(),
        eval_dataset=rows or Rows(),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
