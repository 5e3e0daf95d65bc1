"""Adapter and base: merged into a whole model, one tensor at a time."""

import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tools.checkpoint.change import Change, Computed, TensorFile
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.export import recorded
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.report import Report
from tools.checkpoint.rewrite import rewrite
from tools.postprocess.options import DryRun, NewDir, Overwrite
from tools.postprocess.progress import progress

if TYPE_CHECKING:
    from tools.merging.base import Base
    from tools.merging.low_rank import Block


def merge_adapter(
    adapter: Annotated[Path, typer.Argument(help="The trained LoRA adapter.", show_default=False)],
    *,
    output: NewDir,
    base: Annotated[
        str | None, typer.Option(help="The model it was trained on; default: the one that adapter_config.json names.")
    ] = None,
    weight: Annotated[float, typer.Option(help="By how much the adapter's changes are multiplied.")] = 1.0,
    more: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="DIR[=WEIGHT]", help="Another adapter to add; may be given more than once."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest weight file, as 5GB; default: files as in the base.")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Report:
    """Merge a LoRA adapter into its base: a whole model in a new directory, which loads without PEFT.

    One tensor at a time, in float32, rounded once to the dtype it has in the base, so memory stays small whatever the
    size of the model. Tokenizer, processor and value head come from the adapter's directory when they are there, all
    else from the base.

    Example: tools merge-adapter runs/sft/lora --base models/SmolLM2-135M-Instruct -o runs/sft/merged
    """
    from tools.merging.adapter import read_adapter
    from tools.merging.base import open_base
    from tools.merging.plan import merge_plan
    from tools.merging.shards import size_in_bytes

    opened = Checkpoint.open(adapter)
    read_adapter(opened)  # what is wrong with it is said before its base is looked for
    model = open_base(opened, base)
    _require_finite("--weight", weight)
    others = [_other(text) for text in more or ()]
    largest = size_in_bytes(max_shard_size) if max_shard_size else None
    with progress("merging") as show:
        watch = _Watch(opened.path, show)

        def plan(first: Checkpoint) -> Change:
            adapters = [read_adapter(first, weight), *(read_adapter(other, number) for other, number in others)]
            change = merge_plan(adapters, model, largest, watch.blocks)
            return watch.expect(change)

        return rewrite(
            "merge-adapter",
            adapter,
            plan,
            output=output,
            overwrite=overwrite,
            dry_run=dry_run,
            options=_options(adapter, model, weight, others, max_shard_size),
        )


def _other(text: str) -> tuple[Checkpoint, float]:
    """`DIR=0.5` or `DIR`, the last with weight 1; a directory whose own name has a `=` needs the weight behind it."""
    path, separator, weight = text.rpartition("=")
    if not separator:
        return Checkpoint.open(text), 1.0
    try:
        number = float(weight)
    except ValueError:
        problem = f"{weight} is not a weight"
        raise CheckpointError("--with", problem, "write the directory, then = and a number: lora=0.5") from None
    _require_finite("--with", number)
    return Checkpoint.open(path), number


def _require_finite(option: str, weight: float) -> None:
    if not math.isfinite(weight):
        raise CheckpointError(option, f"{weight} is not a finite weight", "give a number such as 0.5")


def _options(
    adapter: Path, base: "Base", weight: float, others: list[tuple[Checkpoint, float]], max_shard_size: str | None
) -> dict[str, Any]:
    """What the receipt records: the output is made again when any of it has changed."""
    options = {"base": recorded(base.checkpoint, adapter), "weight": weight, "max_shard_size": max_shard_size}
    options["with"] = [{**recorded(other, adapter), "weight": number} for other, number in others]
    return {key: value for key, value in options.items() if value}


class _Watch:
    """Sees every block of the merged tensors: shows how far it is, and refuses a result that equals the base.

    Two processes may write; each counts in a row of shared memory of its own: bytes done, and whether one has changed.
    """

    def __init__(self, adapter: Path, show: Callable[[int, int], None]) -> None:
        self.adapter, self.show, self.total, self.process = adapter, show, 0, os.getpid()
        self.counts = memoryview(mmap.mmap(-1, 32)).cast("Q", (2, 2))

    def expect(self, change: Change) -> Change:
        """The change, accepted only if a number of the base has changed."""
        files = [content for content in change.files.values() if isinstance(content, TensorFile)]
        sources = [source for content in files for source in content.tensors.values()]
        self.total = sum(source.nbytes for source in sources if isinstance(source, Computed))
        return replace(change, accept=self.accept)

    def blocks(self, blocks: "Iterable[Block]") -> Iterator[bytes]:
        row = 0 if os.getpid() == self.process else 1
        for old, new in blocks:
            if not self.counts[row, 1]:
                self.counts[row, 1] = old != new
            self.counts[row, 0] += len(new)
            if row == 0:
                self.show(self.counts[0, 0] + self.counts[1, 0], self.total)
            yield new

    def accept(self) -> None:
        if not (self.counts[0, 1] or self.counts[1, 1]):
            problem = "changes nothing: every number of the base is the same after the merge"
            raise CheckpointError(self.adapter, problem, "was it saved before the first step?")
