"""The steps as tasks of the same name: `fix_valuehead` is the task `fix-valuehead`."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from prefect import Task, get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from tools import postprocess as steps
from tools.checkpoint.errors import CheckpointBusy, CheckpointError
from tools.checkpoint.report import Report

P = ParamSpec("P")
LASTING = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)


def is_transient(_task: Any, _run: Any, state: Any) -> bool:
    """Whether trying again may help: the disk or the network failed, or another process holds the checkpoint."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, CheckpointError) and error.__cause__:
        error = error.__cause__
    return isinstance(error, CheckpointBusy | OSError) and not isinstance(error, LASTING)


def as_task(step: Callable[P, Report]) -> Task[P, Report]:
    """The step as a task. It keeps no result and needs none: what is done shows in the directory."""

    @wraps(step)
    def logged(*args: P.args, **options: P.kwargs) -> Report:
        report = step(*args, **options)
        get_run_logger().info("%s: %s", report.path, report.summary)
        return report

    return Task(
        logged,
        name=step.__name__.replace("_", "-"),
        task_run_name=_run_name,
        retries=2,
        retry_delay_seconds=[5, 60],
        retry_condition_fn=is_transient,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


def _run_name() -> str:
    """`fix-valuehead checkpoint-500`: the step and what it works on."""
    checkpoint = next(iter(task_run.parameters.values()))
    return f"{task_run.task_name} {Path(checkpoint).name}"


fix_valuehead = as_task(steps.fix_valuehead)
split_actor_critic = as_task(steps.split_actor_critic)
export_reward_model = as_task(steps.export_reward_model)
convert_pissa = as_task(steps.convert_pissa)
merge_adapter = as_task(steps.merge_adapter)
extract_adapter = as_task(steps.extract_adapter)
bundle_processor = as_task(steps.bundle_processor)
verify = as_task(steps.verify)
