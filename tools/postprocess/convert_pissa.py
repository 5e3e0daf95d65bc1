"""PiSSA adapter: rewritten as an ordinary LoRA adapter of twice the rank."""

from pathlib import Path
from typing import Annotated

import typer

from tools.checkpoint.change import Change
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.export import recorded
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.report import Report
from tools.checkpoint.rewrite import rewrite
from tools.postprocess.options import DryRun, OutputDir, Overwrite


def convert_pissa(
    adapter: Annotated[Path, typer.Argument(help="The trained adapter.", show_default=False)],
    *,
    init: Annotated[
        Path | None,
        typer.Option(help="The adapter as it was before the first step; default: pissa_init beside it or in the run."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="The original base; default: the one the adapter names. Without an initial adapter, pissa and olora "
            "are decomposed again from it."
        ),
    ] = None,
    residual: Annotated[
        Path | None,
        typer.Option(help="The base that was trained on, W - s B0 A0: with --base it replaces the initial adapter."),
    ] = None,
    max_rank: Annotated[
        int | None, typer.Option(min=1, help="Bring the rank down to this; the report tells the error it costs.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(min=0, help="Refuse a --max-rank that costs more than this relative error.")
    ] = None,
    fold_scaling: Annotated[
        bool, typer.Option("--fold-scaling", help="Multiply the scale into B: for readers that know alpha / r alone.")
    ] = False,
    output: OutputDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Report:
    """Rewrite a PiSSA adapter as plain LoRA of twice the rank, so that it is right on the original base model.

    PiSSA, OLoRA, CorDA and LoRA-GA train on a changed base, W - s B0 A0. On W itself the same model is
    W + s (B A - B0 A0), which is LoRA with A' = [A; A0] and B' = [B, -B0]. Exact: the adapters' tensors
    are concatenated as bytes. Of a base that is on this machine one matrix is read, to see that it is the one that was
    trained. Magnitudes (DoRA), biases and modules_to_save are carried as they are.

    In place, and taken back by `tools undo`, unless there is an --output. A plain LoRA adapter is left alone, unless
    --max-rank or --fold-scaling ask for a change of it.

    Example: tools convert-pissa runs/sft/checkpoint-500 --init runs/sft/pissa_init -o runs/sft/lora
    """
    from tools.lora.conversion import Shape, conversion
    from tools.lora.initial import find_initial
    from tools.lora.origin import Given

    if init and residual:
        raise CheckpointError(residual, "--init and --residual both say what was taken out of the base", "give one")
    if max_error is not None and max_rank is None:
        raise CheckpointError(adapter, "--max-error is the price of --max-rank, which is not given", "give both")
    plan_of = conversion(Given(init, base, residual), Shape(max_rank, max_error, fold_scaling))

    def plan(trained: Checkpoint) -> Change:
        change = plan_of(trained)
        if change.files and output is None and trained.is_training_state:
            problem = "still holds an optimizer, and a doubled rank would break resuming"
            raise CheckpointError(trained.path, problem, "choose an --output")
        return change

    initial = init or (None if residual else find_initial(adapter))
    options = {
        "init": recorded(Checkpoint.open(initial), adapter) if initial else None,
        "base": base,
        "residual": recorded(Checkpoint.open(residual), adapter) if residual else None,
        "max_rank": max_rank,
        "fold_scaling": fold_scaling,
    }
    return rewrite(
        "convert-pissa",
        adapter,
        plan,
        output=output,
        overwrite=overwrite,
        dry_run=dry_run,
        options={key: value for key, value in options.items() if value},
    )
