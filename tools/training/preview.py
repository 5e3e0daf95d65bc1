"""What training would do, before it does it: batches as the model sees them, what is trained, memory and steps."""

import contextlib
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.report import Report
from tools.training.masking import IGNORED

if TYPE_CHECKING:
    from tools.training.config import TrainConfig
    from tools.training.stages import Stage


def preview(config: Path, overrides: Sequence[str] = (), *, batches: int = 1) -> Report:
    """Show what training would do: the first batches, what is trained, and how much memory and how many steps it takes.

    The weights are not loaded. Raises CheckpointError for what `tools train` would refuse before its first step.
    """
    from tools.training.train import keep_quiet

    keep_quiet()
    from tools.training.callbacks.chosen import own
    from tools.training.config import load_config
    from tools.training.loading import trainer_args
    from tools.training.model import check_quantization
    from tools.training.precision import chosen_precision
    from tools.training.stages import load_stage
    from tools.training.trainer_arguments import trainer_arguments

    if batches < 1:
        raise CheckpointError("--batches", f"must be at least 1, not {batches}")
    resolved = load_config(config, overrides)
    settings = resolved.config
    stage = load_stage(settings.finetuning.stage)
    arguments = trainer_arguments(resolved, stage.ARGUMENTS)
    precision = chosen_precision(settings, arguments)
    check_quantization(settings.model.quantization)
    for each in settings.report.callbacks:
        own(each.path, each.args)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # stdout is for the report alone
        warnings.simplefilter("ignore", FutureWarning)  # of the libraries, to each other
        args = trainer_args(settings, stage, arguments, precision)
        trainer, tokenizer = _trainer(settings, stage, args, precision.weights)
        loader = trainer.get_train_dataloader()
        shown = [_batch(batch, tokenizer) for batch in islice(loader, batches)]
    return _report(settings, trainer, loader, shown, str(precision))


def _trainer(config: "TrainConfig", stage: "Stage", args: Any, dtype: str) -> tuple[Any, Any]:
    """The trainer of the run, around a model that has every name and shape, and no weights."""
    from transformers import set_seed

    from tools.training.adapter import add_adapter
    from tools.training.lengths import require_room
    from tools.training.loading import load_rows
    from tools.training.model import load_tokenizer, outline

    tokenizer = load_tokenizer(config.model)
    rows, eval_rows = load_rows(config, stage, args, tokenizer)
    decoder = outline(config.model, dtype)
    for each in filter(None, (rows, eval_rows)):
        require_room(each.longest, each.place, decoder.config.get_text_config())
    set_seed(args.seed)
    model = decoder if config.finetuning.method == "full" else add_adapter(decoder, config.finetuning)
    args.eval_strategy = "no"
    with _nothing_moves(), tempfile.TemporaryDirectory() as folder:  # the Trainer makes its directory at once
        args.output_dir = folder
        model = stage.build_model(model, config.model)
        return stage.build_trainer(model, args, rows.dataset, None, tokenizer, []), tokenizer


@contextlib.contextmanager
def _nothing_moves() -> Iterator[None]:
    """Within it no module is moved to a device: there are no weights to move, and PyTorch would refuse."""
    from torch import nn

    apply = nn.Module._apply
    nn.Module._apply = lambda module, *_, **__: module
    try:
        yield
    finally:
        nn.Module._apply = apply


def _batch(batch: Any, tokenizer: Any) -> dict[str, Any]:
    """One batch: the shape and dtype of each tensor, and its rows as text in learnt and masked pieces."""
    labels = batch.get("labels")
    rows = []
    for number, ids in enumerate(batch["input_ids"].tolist()):
        mask = batch["attention_mask"][number].tolist() if "attention_mask" in batch else [1] * len(ids)
        of_row = labels[number].tolist() if labels is not None else ids
        rows.append(_row(ids, of_row, mask, tokenizer))
    shapes = {name: [str(value.dtype).removeprefix("torch."), *value.shape] for name, value in batch.items()}
    return {"tensors": shapes, "rows": rows}


def _row(ids: list[int], labels: list[int], mask: list[int], tokenizer: Any) -> dict[str, Any]:
    """A row without its padding: `pieces` are [text, learnt], neighbours of the same kind decoded together."""
    real = [(token, label != IGNORED) for token, label, is_real in zip(ids, labels, mask, strict=True) if is_real]
    runs: list[tuple[list[int], bool]] = []
    for token, is_learnt in real:
        if runs and runs[-1][1] == is_learnt:
            runs[-1][0].append(token)
        else:
            runs.append(([token], is_learnt))
    pieces = [[tokenizer.decode(tokens), is_learnt] for tokens, is_learnt in runs]
    learnt = sum(is_learnt for _, is_learnt in real)
    return {"tokens": len(real), "padding": len(ids) - len(real), "learnt": learnt, "pieces": pieces}


def _report(config: "TrainConfig", trainer: Any, loader: Any, shown: list[dict[str, Any]], precision: str) -> Report:
    from tools.training.memory import estimate
    from tools.training.trainable import grouped, summary

    model, args, processes = trainer.model, trainer.args, config.launch.processes
    longest = max(max(len(ids) for ids in _tokens(row)) for row in trainer.train_dataset)
    updates = max(1, math.ceil(len(loader) / processes / args.gradient_accumulation_steps))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * updates)
    memory = estimate(model, args, longest, config.model.quantization)
    details = {
        "batches": shown,
        "precision": precision,
        "trained": summary(model),
        "parameters": [asdict(same) for same in grouped(model)],
        "memory_bytes": memory,
        "rows": len(trainer.train_dataset),
        "longest_row": longest,
        "steps": steps,
        "epochs": round(steps / updates, 2),
    }
    total = sum(memory.values())
    size = args.train_batch_size * args.gradient_accumulation_steps * processes
    text = f"{steps} steps of {size} rows, some {total / 2**30:.2g} GiB; nothing was trained"
    return Report("preview", str(config.run_dir), False, text, details=details)


def _tokens(row: Any) -> list[list[int]]:
    return [value for name, value in row.items() if name.endswith("input_ids")]


def print_preview(report: Report) -> None:
    """The report for people: what the loss leaves out is dim on a terminal, and in «» elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True, width=None if os.isatty(1) else 10**4)
    details = report.details
    for number, batch in enumerate(details["batches"], 1):
        shapes = ", ".join(f"{name} {kind} {shape}" for name, (kind, *shape) in batch["tensors"].items())
        console.print(Text(f"batch {number}: {shapes}", style="bold"))
        for row in batch["rows"]:
            console.print(Text(f"  {row['tokens']} tokens, {row['learnt']} learnt, {row['padding']} padding"))
            console.print(_as_text(row["pieces"], console.is_terminal))
    console.print(Text("parameters", style="bold"))
    for same in details["parameters"]:
        mark, style = ("trained", "") if same["requires_grad"] else ("frozen", "dim")
        line = f"  {mark:<7} {same['name']}  {same['tensors']} x {list(same['shape'])} {same['dtype']}"
        console.print(Text(f"{line}, {same['parameters']:,} parameters", style=style))
    memory = ", ".join(f"{name} {_size(size)}" for name, size in details["memory_bytes"].items())
    console.print(Text(f"trained: {details['trained']}"))
    console.print(Text(f"precision: {details['precision']}"))
    console.print(Text(f"memory, estimated: {memory}"))
    console.print(Text(f"rows: {details['rows']}, the longest of {details['longest_row']} tokens"))
    console.print(Text(f"{report.path}: {report.summary}"))


def _as_text(pieces: list[list[Any]], is_terminal: bool) -> Any:
    from rich.text import Text

    text = Text("    ")
    for piece, is_learnt in pieces:
        shown = "".join(c if c.isprintable() else {"\n": "⏎"}.get(c, f"\\x{ord(c):02x}") for c in piece)
        if is_terminal:
            text.append(shown, style="" if is_learnt else "dim")
        else:
            text.append(shown if is_learnt else f"«{shown}»")
    return text


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"
