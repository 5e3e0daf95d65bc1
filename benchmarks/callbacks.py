"""What our callbacks cost a step: the time inside them, against the median step of a real model."""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from tools.training.callbacks import (
    GradientNormsCallback,
    LogCallback,
    MemoryCallback,
    ModelHookCallback,
    NonFiniteCallback,
    ReporterCallback,
    SamplesCallback,
    StopCallback,
    TrainedLogitsCallback,
)

LIMIT = 0.01
# What happens in a step. Beginning, end, saving and samples happen now and then, and are told apart.
EACH_STEP = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log")


class Timed:
    """A callback, and the seconds that each of its events has taken."""

    def __init__(self, callback: TrainerCallback):
        self.callback = callback
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def __getattr__(self, event: str) -> Any:
        hook = getattr(self.callback, event)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds[event].append(time.perf_counter() - began)

        return timed


class Steps(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


class Rows(Dataset):
    """Rows of random tokens, all learnt."""

    def __init__(self, count: int, tokens: int, vocabulary: int):
        self.ids = torch.randint(vocabulary, (count, tokens), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main() -> None:
    """Train, print the table, and fail when a step spends more than 1 % in our callbacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".demo/model"), help="a causal LM")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row; a step takes two rows")
    parser.add_argument("--full", action="store_true", help="train every weight rather than an adapter")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        timed, step = measured(given, Path(folder))
    print(table(timed, step))
    share = sum(per_step(each) for each in timed) / step
    print(f"\n{given.model}, {given.steps} steps of 2 x {given.tokens} tokens, median step {step * 1000:.1f} ms")
    print(f"time in our callbacks / median step: {share:.3%} (at most {LIMIT:.0%})")
    raise SystemExit(share > LIMIT)


def measured(given: argparse.Namespace, folder: Path) -> tuple[list[Timed], float]:
    """Every callback of ours after a run of a plain Trainer, and the median seconds of a step."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(given.model), AutoTokenizer.from_pretrained(given.model)
    if not given.full:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    ours: list[TrainerCallback] = [NonFiniteCallback(), GradientNormsCallback(), LogCallback(), ReporterCallback({})]
    ours += [SamplesCallback(["What is a checkpoint?"], {"max_new_tokens": 16, "do_sample": False}, given.steps)]
    ours += [MemoryCallback(), ModelHookCallback(), TrainedLogitsCallback(), StopCallback()]
    timed, steps = [Timed(callback) for callback in ours], Steps()
    for each in timed:
        each.__class__ = type(f"Timed{type(each.callback).__name__}", (Timed,), {})  # the Trainer wants each its own
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=given.steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=given.steps,
        report_to="none",
        include_num_input_tokens_seen="non_padding",
    )
    rows = Rows(2 * given.steps, given.tokens, model.config.vocab_size)
    callbacks: list[Any] = [steps, *timed]
    Trainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks).train()
    lengths = [end - begin for begin, end in zip(steps.ends, steps.ends[1:], strict=False)]
    return timed, statistics.median(lengths)


def per_step(callback: Timed) -> float:
    """The median seconds of each event that belongs to a step, added up; samples are no part of a step."""
    events = [seconds for event, seconds in callback.seconds.items() if event in EACH_STEP]
    return sum(statistics.median(seconds) for seconds in events)


def table(timed: list[Timed], step: float) -> str:
    """One line for each callback: share of a step, and the seconds of what happens now and then."""
    lines = [f"{'callback':<24}{'of a step':>10}  begin / save / end, seconds"]
    for each in timed:
        rare = [sum(each.seconds.get(event, [])) for event in ("on_train_begin", "on_save", "on_train_end")]
        name = type(each.callback).__name__
        lines.append(f"{name:<24}{per_step(each) / step:>10.4%}  {' / '.join(f'{value:.3f}' for value in rare)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
