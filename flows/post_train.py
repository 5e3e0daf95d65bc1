"""Train, then finish what training saved: one flow from a configuration to checkpoints that load anywhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow
from prefect.runtime import flow_run
from pydantic import WithJsonSchema

from flows.command import command_for, publish, run_command
from flows.finish import finish_checkpoint
from tasks.train import train
from tools.checkpoint.layout import checkpoints_in
from tools.checkpoint.report import Report
from tools.training.config import load_config
from tools.training.report_results import report_results
from tools.training.schema import values_schema

# A form with every group and key, their descriptions and choices; it is read from a file, without torch.
Values = Annotated[dict[str, Any], WithJsonSchema(values_schema())]


def _name() -> str:
    return f"post-train {Path(flow_run.parameters['config']).stem}"


@flow(name="post-train", flow_run_name=_name, log_prints=True)
def post_train(
    config: Path,
    overrides: tuple[str, ...] = (),
    which: Literal["last", "all"] = "last",
    values: Values = {},  # noqa: B006 - never changed; None would be a choice in the form
) -> list[Report]:
    """Train as a configuration says, and finish the checkpoint that training ended with, or all.

    Run it again after a failure: what is done is not repeated, and stopped training goes on.

    Args:
        config: Training configuration, YAML or JSON.
        overrides: Values that replace those of the file, each as group.key=value.
        which: Which checkpoints are finished: the last one (the best, where training keeps the best), or all.
        values: The same as overrides, as a form: only what is filled in replaces the values of the file.
    """
    overrides = (*overrides, *as_overrides(values))
    settings = load_config(config, overrides).config
    run, base = settings.run_dir, Path(settings.model.model_name_or_path)
    trained = train(config, overrides, run=run)
    reports = [trained]
    for checkpoint in checkpoints_in(run) if which == "all" else [run / trained.details["checkpoint"]]:
        reports += finish_checkpoint(checkpoint, base=base)
    report_results(run)
    publish(reports, f"Trained from {base} in {run}")
    return reports


def as_overrides(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`{"finetuning": {"r": 4}}` as `finetuning.r=4`."""
    return [
        f"{group}.{key}={json.dumps(value, ensure_ascii=False)}"
        for group, entries in values.items()
        for key, value in entries.items()
    ]


if __name__ == "__main__":
    command, said = command_for(post_train)
    command.add_argument("config", type=Path, metavar="CONFIG", help=said["config"])
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=said["overrides"])
    command.add_argument("--which", choices=["last", "all"], default="last", help=said["which"])
    run_command(post_train, command, lambda config, overrides, which: load_config(config, overrides))
