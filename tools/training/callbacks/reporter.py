# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""ReporterCallback: every argument of a run, on the page of the run in Weights & Biases and the like."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tools.training.callbacks.plain import plain, without_secrets
from tools.training.callbacks.tracker_runs import TRACKERS, Groups, keep_reported, reported

logger = logging.getLogger(__name__)


class ReporterCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Sends argument groups to each tracker that has a run, once, from the main process: as plain JSON types, and
    without keys that look like a secret.

    A group is an object with fields, named by its class (`ModelArguments` is `model`), or a mapping of names to groups,
    such as `{"model": ..., "data": ...}`. Trackers are those in `report_to`, by default that of the training arguments,
    and any other with a run of its own in this process. One that has no run yet at train begin is asked again at the
    first step. A tracker that is missing, has no run or fails costs one warning, and never the training.

    What was sent, and where, is kept in `.burnish/trackers.json` of the output directory, so that results can follow.
    """

    def __init__(self, *groups: Any, report_to: Sequence[str] | None = None):
        named: dict[str, Any] = {}
        for group in groups:
            named |= group if isinstance(group, Mapping) else {_name_of(group): group}
        self.groups: Groups = without_secrets(plain(named))
        self.report_to = report_to
        self._waiting: list[str] = []
        self._runs: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._runs = dict(reported(Path(args.output_dir))["runs"]) if state.global_step else {}
        expected = [name for name in self._expected(args) if name in TRACKERS]
        self._waiting = [name for name in expected if not self._send(name, args)]
        for name in TRACKERS.keys() - set(expected):
            if name in sys.modules and name != "tensorboard":  # that one is imported by many and has no run
                self._send(name, args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        waiting, self._waiting = self._waiting, []
        for name in waiting:
            if not self._send(name, args):
                logger.warning("%s has no run; the arguments were not reported to it", name)

    def _expected(self, args: Any) -> Sequence[str]:
        return args.report_to if self.report_to is None else self.report_to

    def _send(self, name: str, args: Any) -> bool:
        """False when the tracker has no run yet. A failure is final, so it counts as sent."""
        tracker = TRACKERS[name]
        try:
            run = tracker.current(args)
            if run is None:
                return False
            tracker.update(run, self.groups)
            self._runs[name] = dict(run)
            keep_reported(Path(args.output_dir), self.groups, self._runs)
        except Exception as error:  # whatever a tracker raises, a report is not worth the training
            logger.warning("%s: the arguments were not reported (%s: %s)", name, type(error).__name__, error)
        return True


def _name_of(group: Any) -> str:
    name: str = type(group).__name__.removesuffix("Arguments").lower()
    return name
