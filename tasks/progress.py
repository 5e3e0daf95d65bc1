"""How far training is, as a Prefect progress artifact that follows `train_log.jsonl`."""

import logging
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException

from tools.training.progress import describe, last_row

EVERY_S = 3.0


class Progress:
    """The last row of a training log, shown in the run; `update` may be called as often as one likes."""

    def __init__(self, log: Path, logger: "logging.Logger | logging.LoggerAdapter[Any]"):
        self.log = log
        self.logger = logger
        self.artifact: UUID | None = None
        self.shown = last_row(log)  # that of an earlier start
        self.due = 0.0

    def update(self) -> None:
        """Show the newest row, every few seconds at most; a server that does not answer never stops training."""
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + EVERY_S
        row = last_row(self.log)
        if row is None or row == self.shown or "percentage" not in row:
            return
        self.shown = row
        try:
            self._show(row["percentage"], describe(row))
        except (httpx.HTTPError, PrefectException) as error:
            self.logger.warning("progress is not shown: %s", error)

    def _show(self, percent: float, description: str) -> None:
        if self.artifact is None:
            created = create_progress_artifact(percent, key="training", description=description)
            assert isinstance(created, UUID)  # in a synchronous task it is no coroutine
            self.artifact = created
        else:
            update_progress_artifact(self.artifact, progress=percent, description=description)
