"""Train, then finish what training saved: one flow from a configuration to checkpoints that load anywhere."""

from pathlib import Path
from typing import Literal

from prefect import flow
from prefect.runtime import flow_run

from flows.command import command_for, publish, run_command
from flows.finish import finish_checkpoint
from tasks.train import train
from tools.checkpoint.layout import checkpoints_in
from tools.checkpoint.report import Report
from tools.training.config import load_config
from tools.training.report_results import report_results


def _name() -> str:
    return f"post-train {Path(flow_run.parameters['config']).stem}"


@flow(name="post-train", flow_run_name=_name, log_prints=True)
def post_train(config: Path, overrides: tuple[str, ...] = (), which: Literal["last", "all"] = "last") -> list[Report]:
    """Train as a configuration says, and finish the checkpoint that training ended with, or all.

    Run it again after a failure: what is done is not repeated, and stopped training goes on.

    Args:
        config: Training configuration, YAML or JSON.
        overrides: Values that replace those of the file, each as group.key=value.
        which: Which checkpoints are finished: the last one (the best, where training keeps the best), or all.
    """
    settings = load_config(config, overrides).config
    run, base = settings.run_dir, Path(settings.model.model_name_or_path)
    trained = train(config, overrides, run=run)
    reports = [trained]
    for checkpoint in checkpoints_in(run) if which == "all" else [run / trained.details["checkpoint"]]:
        reports += finish_checkpoint(checkpoint, base=base)
    report_results(run)
    publish(reports, f"Trained from {base} in {run}")
    return reports


if __name__ == "__main__":
    command, said = command_for(post_train)
    command.add_argument("config", type=Path, metavar="CONFIG", help=said["config"])
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=said["overrides"])
    command.add_argument("--which", choices=["last", "all"], default="last", help=said["which"])
    run_command(post_train, command, lambda config, overrides, which: load_config(config, overrides))
