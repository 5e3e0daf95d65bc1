"""Tokenizer and processor files: copied into the checkpoint from the model it was trained from."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tools.checkpoint.change import Change, FileCopy
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import PROCESSOR_FILES, Checkpoint, checkpoints_in
from tools.checkpoint.report import Report, joined
from tools.checkpoint.rewrite import rewrite
from tools.hub import local_copy
from tools.postprocess.options import CheckpointDir, DryRun, OutputDir, Overwrite


def bundle_processor(
    checkpoint: CheckpointDir,
    *,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="The model to copy from; default: the base that adapter_config.json names."),
    ] = None,
    output: OutputDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Report:
    """Copy the tokenizer and processor files into the checkpoint, so that it loads on its own.

    Every file that a tokenizer or an image, video or audio processor is read from and that is missing here is added,
    byte for byte; files that are here stay as they are. A run directory gets them in itself and in each checkpoint-N.

    Example: tools bundle-processor runs/sft/checkpoint-500 --from models/SmolLM2-135M-Instruct
    """
    checkpoint = Path(checkpoint)
    places = [checkpoint]
    if checkpoint.is_dir() and (run := checkpoints_in(checkpoint)):
        if output is not None:
            raise CheckpointError(checkpoint, "a run directory, and --output takes one checkpoint", "name one")
        places += run
    started = time.perf_counter()
    reports = [
        rewrite(
            "bundle-processor",
            place,
            lambda opened: _plan(opened, source),
            output=output,
            overwrite=overwrite,
            dry_run=dry_run,
            accept_run=True,
        )
        for place in places
    ]
    return joined(checkpoint, reports, time.perf_counter() - started)


def _plan(opened: Checkpoint, source: Path | None) -> Change:
    named = source or (opened.adapter_config or {}).get("base_model_name_or_path")
    if not named and opened.processor_files:
        return Change("has its own tokenizer or processor; nothing to do")
    if not named:
        raise CheckpointError(opened.path, "does not say which model it was trained from", "name it with --from")
    origin = local_copy(named)
    if origin is None and source:
        raise CheckpointError(source, "not found")
    if origin is None:
        problem = f"trained from {named}, which is neither a directory here nor in the hub's cache"
        raise CheckpointError(opened.path, problem, "name a local copy with --from")
    offered = [name for name in PROCESSOR_FILES if (origin / name).is_file()]
    if not offered:
        raise CheckpointError(origin, "holds no tokenizer or processor file", "name another model with --from")
    missing = [name for name in offered if name not in opened.processor_files]
    if not missing:
        return Change("all tokenizer and processor files are here; nothing to do")
    return Change(f"added {', '.join(missing)}", {name: FileCopy(origin / name) for name in missing})
