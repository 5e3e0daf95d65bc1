"""What became of a run's checkpoints, on the page of the run in each tracker that it was reported to."""

import logging
from pathlib import Path
from typing import Any

from tools.checkpoint.layout import checkpoints_in
from tools.checkpoint.receipts import read_receipts
from tools.training.callbacks.plain import without_secrets
from tools.training.callbacks.tracker_runs import TRACKERS, reported

logger = logging.getLogger(__name__)

FINISHED = "finished"  # folder of a run with its finished checkpoints


def report_results(run: Path) -> tuple[str, ...]:
    """Add the receipts of all checkpoints of `run`, finished ones too, as group `postprocessing`.

    Each says the step, the version of Burnish, the options, and the fingerprints of the files it read and wrote.
    Returns the trackers that have them now; one that fails costs a warning. Nothing happens when the run was reported
    nowhere.
    """
    written = reported(run)
    groups = {**written["arguments"], "postprocessing": without_secrets(results(run))}
    told = []
    for name, identity in written["runs"].items():
        try:
            with TRACKERS[name].reopened(identity):
                TRACKERS[name].update(identity, groups)
        except Exception as error:  # whatever a tracker raises, a report is not worth a failed flow
            logger.warning("%s: the results were not reported (%s: %s)", name, type(error).__name__, error)
        else:
            told.append(name)
    return tuple(told)


def results(run: Path) -> dict[str, list[dict[str, Any]]]:
    """`{"finished/checkpoint-20": [receipt, ...], ...}`, with `output` and, where it is another one, `input`."""
    folders = [folder for parent in (run, run / FINISHED) if parent.is_dir() for folder in checkpoints_in(parent)]
    found = {folder.relative_to(run).as_posix(): read_receipts(folder) for folder in folders}
    return {name: [{"output": name, **receipt} for receipt in receipts] for name, receipts in found.items() if receipts}
