"""Full fine-tune and base: their difference as a LoRA adapter."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.checkpoint.change import Change
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.export import recorded
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.report import Report
from tools.checkpoint.rewrite import rewrite
from tools.hub import lasting_name
from tools.postprocess.options import DryRun, NewDir, Overwrite
from tools.postprocess.progress import progress

if TYPE_CHECKING:
    from tools.merging.extraction import Errors


def extract_adapter(
    tuned: Annotated[Path, typer.Argument(help="The fine-tuned model.", show_default=False)],
    *,
    base: Annotated[str, typer.Option(help="The model that it was trained from.", show_default=False)],
    output: NewDir,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter, at most that of its layers.")] = 64,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Report:
    """Take a LoRA adapter out of a full fine-tune: the nearest of this rank to what training changed.

    Linear layers become LoRA, by a randomized SVD of each difference; exact when training changed no more than this
    rank. What is not linear and differs (norms, embeddings, heads) is saved whole in modules_to_save, biases as they
    are. The error of each layer and over all is reported.

    Example: tools extract-adapter runs/full/checkpoint-500 --base models/SmolLM2-135M-Instruct --rank 32 -o runs/lora
    """
    from tools.merging.base import as_base, open_base
    from tools.merging.extraction import Errors, extract_plan

    if rank < 1:
        raise CheckpointError("--rank", f"{rank} is no rank", "give a whole number from 1")
    opened = Checkpoint.open(tuned)
    model = open_base(opened, base)
    errors: Errors = {}
    with progress("extracting") as show:

        def plan(source: Checkpoint) -> Change:
            return extract_plan(as_base(source), model, lasting_name(base), rank, errors, show)

        report = rewrite(
            "extract-adapter",
            tuned,
            plan,
            output=output,
            overwrite=overwrite,
            dry_run=dry_run,
            options={"base": recorded(model.checkpoint, opened.path), "rank": rank},
        )
    if not errors:
        return report
    return replace(report, details={**report.details, **_told(errors)})


def _told(errors: "Errors") -> dict[str, object]:
    """Relative errors, |D - B A| / |D| (Frobenius): over all layers, then of each, the greatest first."""
    missing, whole = (sum(pair[part] for pair in errors.values()) for part in (0, 1))
    each = {module: _relative(*pair) for module, pair in errors.items()}
    shown = {module: f"{error:.3g}" for module, error in sorted(each.items(), key=lambda item: -item[1])}
    return {"relative error": f"{_relative(missing, whole):.3g}", "relative error of each": shown}


def _relative(missing: float, whole: float) -> float:
    """The root of their ratio; 0 for a difference of zeros, as between 0.0 and -0.0."""
    return math.sqrt(missing / whole) if whole else 0.0
