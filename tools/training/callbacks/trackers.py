# ruff: noqa: TID253 - imported only when training starts
"""The trackers' own callbacks, made so that none of them can end the training."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.integrations import get_reporting_integration_callbacks

from tools.training.callbacks.tracker_runs import go_offline, reported

logger = logging.getLogger(__name__)


# What tells a tracker to go on with a run; the others do so by its name, or begin a new one.
CONTINUED = {
    "wandb": {"WANDB_RUN_ID": "{id}", "WANDB_RESUME": "allow"},
    "swanlab": {"SWANLAB_RUN_ID": "{id}", "SWANLAB_RESUME": "allow"},
}


@contextlib.contextmanager
def continued(run: Path) -> Iterator[None]:
    """Within it, trackers go on with the runs that the directory `run` was reported to, unless the environment names
    others."""
    known, given = reported(run)["runs"], os.environ.copy()
    for name in CONTINUED.keys() & known.keys():
        for variable, value in CONTINUED[name].items():
            os.environ.setdefault(variable, value.format_map(known[name]))
    try:
        yield
    finally:
        for variable in (variable for variables in CONTINUED.values() for variable in variables):
            if variable not in given:
                os.environ.pop(variable, None)


class Guarded:
    """A callback that is switched off, with one warning, the first time that it raises."""

    def __init__(self, name: str, callback: Any):
        self.name = name
        self._callback = callback
        self._failed = False

    def __getattr__(self, event: str) -> Any:
        hook = getattr(self._callback, event)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._failed:
                return None
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # whatever a tracker raises, a report is not worth the training
                self._failed = True
                logger.warning("%s is off: %s: %s; training goes on", self.name, type(error).__name__, error)
                return None

        return guarded


def tracker_callbacks(names: Sequence[str], project: str, run_name: str) -> list[Guarded]:
    """A guarded callback for each tracker that is installed, and one warning for each that is not.

    wandb and swanlab are used offline when nobody is logged in, rather than asking for an account.
    """
    os.environ.setdefault("WANDB_PROJECT", project)
    os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", project)
    callbacks: list[Guarded] = []
    for name in names:
        if find_spec(name) is None:
            logger.warning("%s is not installed; the run is not reported to it", name)
        else:
            kind = type(f"Guarded_{name}", (Guarded,), {})  # the Trainer warns of two of one class
            callbacks.append(kind(name, _callback(name, project, run_name)))
    return callbacks


def _callback(name: str, project: str, run_name: str) -> Any:
    if name in ("wandb", "swanlab"):
        go_offline(name)
    if name == "swanlab":  # that of transformers asks for functions which swanlab no longer has
        from swanlab.integration.transformers import SwanLabCallback

        return SwanLabCallback(project=project, experiment_name=run_name)
    return get_reporting_integration_callbacks([name])[0]()
