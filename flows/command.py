"""A flow as a command: quiet settings, one table of what was done, and an exit code."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from prefect import Flow
from prefect.artifacts import create_table_artifact
from prefect.settings import (
    PREFECT_LOGGING_TO_API_BATCH_INTERVAL,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.report import Report

# Below what the user's environment or profile says. They matter where no PREFECT_API_URL is set, and Prefect starts a
# server for this one run.
DEFAULTS = {
    PREFECT_SERVER_ANALYTICS_ENABLED: False,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 90,
    PREFECT_LOGGING_TO_API_BATCH_INTERVAL: 1.0,
}


class _SaidOnce(logging.Filter):
    """A CheckpointError is named by the state that it ends a run with; Prefect's tracebacks of it would bury that."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if not isinstance(error, CheckpointError):
            return True
        record.exc_info = None
        return "will start" in record.getMessage()  # of a retry


for _runs in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_runs).addFilter(_SaidOnce())


def command_for(flow: Flow[..., list[Report]]) -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """A parser with the flow's help, and the texts of its parameters: the same ones as in the form of the UI."""
    help_text, _, _ = (flow.description or "").partition("Args:")
    parser = argparse.ArgumentParser(f"python -m flows.{flow.fn.__name__}", description=help_text)
    form = flow.parameters.properties
    return parser, {name: field.get("description", "") for name, field in form.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it a flow sends nothing to anybody, and Prefect's own server has time to start on a slow machine."""
    os.environ.setdefault("DO_NOT_TRACK", "1")
    with temporary_settings(set_defaults=DEFAULTS):
        yield


def run_command(
    flow: Flow[..., list[Report]], command: argparse.ArgumentParser, check: Callable[..., object]
) -> NoReturn:
    """Run the flow with the arguments of the command line and print its reports; exits with the code of its error.

    `check` gets the same parameters and raises what is plainly wrong with them, before a server is started.
    """
    parameters = vars(command.parse_intermixed_args())
    with quiet():
        try:
            check(**parameters)
            print(table(flow(**parameters)))
        except CheckpointError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            print("interrupted; run the same command again to go on", file=sys.stderr)
            sys.exit(130)
    sys.exit()


def rows(reports: Iterable[Report]) -> list[dict[str, str]]:
    """One row a report: which step, with which outcome, on what."""
    return [
        {
            "step": report.step,
            "outcome": "changed" if report.changed else "unchanged",
            "seconds": f"{report.seconds:.1f}",
            "what": f"{report.path}: {report.summary}",
        }
        for report in reports
    ]


def publish(reports: Sequence[Report], description: str) -> None:
    """The reports as a table in the flow run's page."""
    create_table_artifact(rows(reports), key="reports", description=description)


def table(reports: Sequence[Report]) -> str:
    """The same rows for a terminal."""
    lines = [("step", "outcome", "seconds", "what")]
    lines += [(row["step"], row["outcome"], row["seconds"], row["what"]) for row in rows(reports)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        f"{step:<{widths[0]}}  {outcome:<{widths[1]}}  {seconds:>{widths[2]}}  {what}"
        for step, outcome, seconds, what in lines
    )
