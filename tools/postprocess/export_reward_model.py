"""Reward model: a value head as the classifier that transformers and servers load, and back."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.report import Report
from tools.checkpoint.rewrite import rewrite
from tools.postprocess.options import CheckpointDir, DryRun, NewDir, Overwrite


def export_reward_model(
    checkpoint: CheckpointDir,
    *,
    output: NewDir,
    to: Annotated[
        Literal["sequence-classification", "token-classification", "value-head"], typer.Option(help="The layout.")
    ] = "sequence-classification",
    head: Annotated[
        str | None, typer.Option(help="The value head to take, where there are several: `v_head`, `score`.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="For value-head: the model to take lm_head from, which a classifier lacks.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Load both, score the same tokens, and compare.")] = False,
    tolerance: Annotated[float, typer.Option(help="Largest difference of scores that --verify passes.")] = 1e-5,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Report:
    """Make a reward model with a value head the classifier that transformers and vLLM load, or the other way round.

    As token-classification it is exact. As sequence-classification, whose layer has no bias, every score lacks the
    bias of the value head: a constant, which config.json keeps as score_bias. As value-head, head and causal LM lie
    side by side as tools fix-valuehead leaves them. Tensors are copied as bytes.

    Example: tools export-reward-model runs/rm/checkpoint-500 -o runs/rm/classifier --verify
    """
    from tools.heads.exporting import export_plan

    options = {"to": to, "head": head, "base": str(base) if base else None}
    report = rewrite(
        "export-reward-model",
        checkpoint,
        lambda source: export_plan(source, to, head, base),
        output=output,
        overwrite=overwrite,
        dry_run=dry_run,
        options={key: value for key, value in options.items() if value},
    )
    return _verified(report, Path(checkpoint), output.expanduser(), tolerance) if verify and not dry_run else report


def _verified(report: Report, checkpoint: Path, output: Path, tolerance: float) -> Report:
    from tools.scores import largest_difference

    found = largest_difference(checkpoint, output)
    if not found <= tolerance:  # also refuses NaN
        raise CheckpointError(output, f"scores differ from {checkpoint} by up to {found:.3g}, more than {tolerance:g}")
    details = {**report.details, "largest difference of scores": found}
    return replace(report, summary=f"{report.summary}; scores within {found:.3g}", details=details)
