"""Finish existing checkpoints: split the value head, convert PiSSA, add the processor files, prove that they load."""

import socket
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.command import command_for, publish, run_command
from tasks.postprocess import bundle_processor, convert_pissa, fix_valuehead, verify
from tools.checkpoint.errors import CheckpointError, all_of
from tools.checkpoint.layout import Checkpoint, checkpoints_in
from tools.checkpoint.report import Report
from tools.training.report_results import report_results


def _name() -> str:
    return "finish " + "/".join(Path(flow_run.parameters["checkpoint"]).parts[-2:])


@flow(name="finish", flow_run_name=_name, log_prints=True)
def finish(checkpoint: Path, base: Path | None = None, init: Path | None = None) -> list[Report]:
    """Finish a checkpoint, or every checkpoint of a run, so that it loads as an ordinary model.

    A checkpoint that still holds an optimizer is left alone; its finished form goes to RUN/finished.

    Args:
        checkpoint: Checkpoint directory, or a run directory for all its checkpoints.
        base: Model it was trained from, which has the processor files; by default the one that the adapter names.
        init: Initial PiSSA adapter; by default pissa_init in the run directory.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(checkpoint, f"not found on {socket.gethostname()}")
    reports: list[Report] = []
    damaged: list[CheckpointError] = []
    for each in _checkpoints(checkpoint):
        try:
            reports += finish_checkpoint(each, base=base, init=init)
        except CheckpointError as error:  # the others are finished all the same
            damaged.append(error)
    for run in (checkpoint, checkpoint.parent):
        report_results(run)
    publish(reports, f"Finished: {checkpoint}")
    if damaged:
        raise all_of(damaged)
    return reports


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoints of a run, and the run itself where it holds a model of its own; else the checkpoint."""
    is_one = Checkpoint.open(path, accept_run=True).kind not in ("run", "nothing", "config")
    return [*checkpoints_in(path), *([path] if is_one else [])] or [path]


def finish_checkpoint(checkpoint: Path, *, base: Path | None = None, init: Path | None = None) -> list[Report]:
    """Everything between a trained checkpoint and one that others can load; what is done reports nothing to do.

    A finished form of an earlier state of the checkpoint is made anew.
    """
    trained = Checkpoint.open(checkpoint)
    output = checkpoint.parent / "finished" / checkpoint.name if trained.is_training_state else None
    finished = output or checkpoint
    logits = checkpoint / ".burnish" / "trained_logits.safetensors"
    reports = [fix_valuehead(checkpoint, output=output, overwrite=output is not None)]
    if trained.adapter_config is not None:
        reports.append(convert_pissa(finished, init=init))
    reports.append(bundle_processor(finished, source=base))
    reports.append(verify(finished, logits=logits if logits.exists() else None, base=base))
    return reports


if __name__ == "__main__":
    command, said = command_for(finish)
    command.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=said["checkpoint"])
    command.add_argument("--from", type=Path, dest="base", metavar="BASE", help=said["base"])
    command.add_argument("--init", type=Path, metavar="ADAPTER", help=said["init"])
    run_command(finish, command, lambda checkpoint, base, init: Checkpoint.open(checkpoint, accept_run=True))
