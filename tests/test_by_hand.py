"""Supervised fine-tuning against the same step written out by hand in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
from runs import rows as rows_of
from runs import weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.training.train import train

ROWS = [
    {"instruction": "Add the numbers.", "input": "1 and 2", "output": "3"},
    {"instruction": "Say hello.", "input": "", "output": "hello to you"},
    {"instruction": "Spell it out.", "input": "7", "output": "seven"},
    {"instruction": "Name a colour.", "input": "", "output": "red"},
]
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
RATE = 0.5


def by_hand(base: Path) -> tuple[dict[str, torch.Tensor], float]:
    """One step of SGD on all rows at once, in autocast to bf16: the new weights, and the mean loss of a token."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for row in ROWS:
        prompt = tokenizer((WITH_INPUT if row["input"] else WITHOUT_INPUT).format(**row))["input_ids"]
        answer = [*tokenizer(row["output"])["input_ids"], tokenizer.eos_token_id]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.tensor([prompt + answer])).logits
        predicted = logits[0, len(prompt) - 1 : -1].float()
        total = total + torch.nn.functional.cross_entropy(predicted, torch.tensor(answer), reduction="sum")
        count += len(answer)
    (total / count).backward()
    with torch.no_grad():
        new = {name: tensor - RATE * tensor.grad for name, tensor in model.named_parameters()}
    return new, total.item() / count


def test_b1_padded_rows_accumulated_in_bf16_give_the_step_made_by_hand(base: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    training: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "max_steps": 1, "logging_steps": 1}
    training |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True}
    training |= {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    groups = {
        "model": {"model_name_or_path": str(base)},
        "data": {"train_file": str(tmp_path / "rows.jsonl")},
        "finetuning": {"method": "full"},
        "training": training,
        "report": {"report_to": "none"},
    }
    (tmp_path / "config.json").write_text(json.dumps(groups))
    train(tmp_path / "config.json")
    expected, loss = by_hand(base)
    old, new = weights(base), weights(tmp_path / "run" / "checkpoint-1")
    assert new.keys() == old.keys()
    for name, before in old.items():
        step = expected[name] - before
        assert step.norm() > 0
        assert (new[name] - before - step).norm() < 0.02 * step.norm(), name
    logged = next(row for row in rows_of(tmp_path / "run") if row.get("loss") is not None)
    assert abs(logged["loss"] - loss) < 0.01 * loss
