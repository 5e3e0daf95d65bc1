"""`tools train` up to its first step, against a bare TRL script of the same model, rows, adapter and settings."""

import shutil
import sys
from pathlib import Path

from measure import TOOLS, Benchmark, Command

_SCRIPTS = Path(__file__).parent
MODEL, CONFIG = ".demo/model", "examples/sft.yaml"
LEAVE = "benchmarks.leave.LeaveAtFirstStep"


def start(folder: Path) -> Benchmark:
    """From the command to the first step; both end there."""
    ours, theirs = folder / "run", folder / "run_by_trl"
    arguments = [TOOLS, "train", CONFIG, f"training.output_dir={ours}", f"report.callbacks={LEAVE}"]
    return Benchmark(
        "tools train, to its first step",
        "a bare TRL script",
        Command(arguments, lambda: shutil.rmtree(ours, ignore_errors=True)),
        Command(
            [sys.executable, _SCRIPTS / "first_step_by_trl.py", MODEL, theirs],
            lambda: shutil.rmtree(theirs, ignore_errors=True),
        ),
        lambda: _only_begun(ours, theirs),
    )


def _only_begun(*runs: Path) -> str:
    assert not any(saved for run in runs for saved in run.glob("checkpoint-*"))
    return f"{CONFIG}, no step done"
