"""The last steps on a checkpoint, taken back."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.report import Report
from tools.checkpoint.undo import standing, undo_last
from tools.postprocess.options import CheckpointDir


def undo(
    checkpoint: CheckpointDir,
    *,
    steps: Annotated[int, typer.Option(min=1, help="How many steps, the last one first.")] = 1,
) -> Report:
    """Take back the last step that changed a checkpoint in place, byte for byte.

    Refused when a file of that step has changed since, or when `tools forget` has freed what the step kept.

    Example: tools undo runs/ppo/checkpoint-500
    """
    started = time.perf_counter()
    path = Checkpoint.open(checkpoint, accept_run=True).path
    if steps > (count := len(standing(path))):
        problem = f"{count} steps to undo, not {steps}" if count else "no step to undo"
        raise CheckpointError(path, problem, "see `tools history`")
    undone = [undo_last(Path(path)) for _ in range(steps)]
    files = sorted({name for receipt in undone for name in receipt["files"]})
    return Report(
        "undo",
        str(checkpoint),
        changed=True,
        summary=f"as before {', '.join(receipt['step'] for receipt in undone)}",
        written=tuple(name for name in files if (path / name).exists()),
        removed=tuple(name for name in files if not (path / name).exists()),
        seconds=round(time.perf_counter() - started, 3),
    )
