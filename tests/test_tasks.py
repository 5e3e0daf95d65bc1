"""The child process under a task, and the steps as tasks; no Prefect server is needed."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.logging import disable_run_logger

from tasks import child, postprocess, progress, train
from tools.checkpoint.errors import CheckpointBusy, CheckpointError
from tools.checkpoint.report import Report
from tools.training.state import TrainingStopped

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)
SAVING = """
import signal, sys, time
def save(*_):
    print("saved", file=sys.stderr, flush=True)
    sys.exit(4)
signal.signal(signal.SIGTERM, save)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


class Interrupted(BaseException):
    """Stands for Ctrl-C and for Prefect's TerminationSignal."""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(code: str, tmp_path: Path, **options) -> tuple[int, list[str], list[str]]:
    """Run `code` in a child; its exit code and the lines of both streams."""
    out, err = [], []
    result = child.run(python(code), log=tmp_path / "train.out", on_stdout=out.append, on_stderr=err.append, **options)
    return result, out, err


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_streams_are_kept_apart_and_stderr_is_also_in_the_log(tmp_path):
    code, out, err = run("import sys; print('{}'); print('a\\nb', file=sys.stderr); sys.exit(3)", tmp_path)
    assert (code, out, err) == (3, ["{}"], ["a", "b"])
    assert (tmp_path / "train.out").read_text() == "a\nb\n"


def test_each_line_arrives_while_the_child_still_runs(tmp_path):
    arrived = []
    # The child waits for a file that appears only once its first line has arrived here.
    code = f"""
import pathlib, sys, time
print("first", file=sys.stderr)
while not pathlib.Path({str(tmp_path / "seen")!r}).exists(): time.sleep(0.05)
print("second", end="", file=sys.stderr)
"""

    def on_stderr(line: str) -> None:
        arrived.append(line)
        (tmp_path / "seen").touch()

    child.run(python(code), log=tmp_path / "log", on_stdout=print, on_stderr=on_stderr)
    assert arrived == ["first", "second"]


def test_a_grandchild_that_writes_to_stderr_is_heard(tmp_path):
    _, _, err = run("import os; os.system('echo from below >&2')", tmp_path)
    assert err == ["from below"]


def test_a_second_child_appends_to_the_log_and_hears_only_itself(tmp_path):
    run("import sys; print('one', file=sys.stderr)", tmp_path)
    _, _, err = run("import sys; print('two', file=sys.stderr)", tmp_path)
    assert err == ["two"]
    assert (tmp_path / "train.out").read_text() == "one\ntwo\n"


def test_bytes_that_are_no_text_and_progress_bars_are_lines_too(tmp_path):
    _, _, err = run("import os; os.write(2, b'\\xff 10%\\r20%\\r')", tmp_path)
    assert err == ["\ufffd 10%", "20%"]


def test_a_killed_child_is_noticed_at_once_and_named_by_its_signal(tmp_path):
    begun = time.monotonic()
    code, _, _ = run("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert child.killed_by(code) == "SIGKILL"
    assert time.monotonic() - begun < 5


def test_an_interrupt_lets_the_child_save_and_is_raised_again(tmp_path):
    lines = []

    def on_stderr(line: str) -> None:
        lines.append(line)
        if line == "ready":
            raise Interrupted

    with pytest.raises(Interrupted):
        child.run(python(SAVING), log=tmp_path / "log", on_stdout=print, on_stderr=on_stderr)
    assert lines == ["ready", "saved"]


def test_an_interrupt_stops_the_whole_group_even_where_it_ignores_sigterm(tmp_path):
    pids = []
    code = f"""
import subprocess, sys, os
below = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
below.stdout.readline()
print(os.getpid(), below.pid, file=sys.stderr, flush=True)
below.wait()
"""

    def on_stderr(line: str) -> None:
        pids.extend(map(int, line.split()))
        raise Interrupted

    with pytest.raises(Interrupted):
        child.run(python(code), log=tmp_path / "log", on_stdout=print, on_stderr=on_stderr, grace_s=0.5)
    assert len(pids) == 2
    assert until(lambda: not any(map(is_alive, pids)))


def test_an_interrupt_lets_training_save_whose_rows_come_from_workers(config):
    run = config.parent / "run"
    run.mkdir()
    log = run / "train_log.jsonl"
    said = []

    def on_tick() -> None:
        if log.exists() and log.read_text().count("\n") > 2:
            raise Interrupted

    options = ["max_steps=5000", "save_steps=5000", "dataloader_num_workers=2", "dataloader_persistent_workers=true"]
    with pytest.raises(Interrupted):
        child.run(
            [*train.COMMAND, str(config), *options],
            log=run / "train.out",
            on_stdout=print,
            on_stderr=said.append,
            on_tick=on_tick,
        )
    assert said[-1].startswith("stopped: "), said[-3:]
    assert list(run.glob("checkpoint-*"))


def test_a_child_whose_run_was_killed_still_saves_and_ends(tmp_path):
    log = tmp_path / "train.out"
    parent = subprocess.Popen(
        python(
            f"import sys; sys.path.insert(0, {str(Path(child.__file__).parents[1])!r})\n"
            "from pathlib import Path; from tasks import child\n"
            f"child.run([sys.executable, '-c', {SAVING!r}], log=Path({str(log)!r}), on_stdout=print, on_stderr=print)"
        ),
        stdout=subprocess.DEVNULL,
    )
    assert until(lambda: log.exists() and "ready" in log.read_text())
    parent.kill()
    parent.wait()
    assert until(lambda: "saved" in log.read_text())


def test_the_child_does_not_inherit_an_ignored_sigterm(tmp_path):
    code, _, _ = run("import os; os.kill(os.getpid(), 15)", tmp_path)
    assert child.killed_by(code) == "SIGTERM"


def train_with(code: str, run: Path, monkeypatch) -> Report:
    """Run the task with a small program in the place of `tools train`."""
    monkeypatch.setattr(train, "COMMAND", python(f"import json, os, sys\n{code}"))
    with disable_run_logger():
        return train.train.fn(Path("sft.yaml"), ["r=4"], run=run)


def test_the_report_of_the_child_is_the_result_of_the_task(tmp_path, monkeypatch):
    code = """
print("printed by a library")
print(json.dumps({"step": "train", "path": "run", "changed": True, "summary": " ".join(sys.argv[1:])}))
"""
    assert train_with(code, tmp_path, monkeypatch) == Report("train", "run", True, "sft.yaml r=4 --json")


SAYS_WHY = "sys.stderr.write('error: sft.yaml:3: unknown key rank; did you mean r?\\n'); "


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("sys.exit(4)", TrainingStopped, "exit code 4"),
        ("sys.stderr.write('stopped: run: at step 3\\n'); sys.exit(4)", TrainingStopped, "^run: at step 3$"),
        (SAYS_WHY + "raise KeyError('prompt')", train.TrainingFailed, "its last lines: .* KeyError: 'prompt'"),
        (SAYS_WHY + "sys.stderr.flush(); os.kill(os.getpid(), 9)", train.TrainingFailed, "was killed by SIGKILL"),
        (SAYS_WHY + "print('error: run: b', file=sys.stderr); sys.exit(1)", train.TrainingFailed, "^sft.*\nrun: b$"),
        (
            SAYS_WHY + "print('x\\nerror: run: b\\ny', file=sys.stderr); sys.exit(1)",
            train.TrainingFailed,
            "^run: b$",
        ),
        (SAYS_WHY + "sys.exit(1)", train.TrainingFailed, "^sft.yaml:3: unknown key rank; did you mean r?"),
        (SAYS_WHY + "sys.exit(3)", CheckpointBusy, "^sft.yaml:3"),
        ("raise KeyError('prompt')", train.TrainingFailed, "exit code 1; its last lines: .* KeyError: 'prompt'"),
        (
            "print('step 7', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)",
            train.TrainingFailed,
            "SIGKILL.*step 7",
        ),
    ],
)
def test_each_end_of_the_child_is_an_error_that_says_why(tmp_path, monkeypatch, code, error, message):
    with pytest.raises(error, match=message):
        train_with(code, tmp_path, monkeypatch)


def test_progress_is_the_last_complete_row_of_the_log(tmp_path):
    log = tmp_path / "train_log.jsonl"
    assert progress.last_row(log) is None
    log.write_text('{"current_steps": 1}\n{"current_steps": 2, "total_steps": 8, "loss": 0.5}\n{"curr')
    row = progress.last_row(log)
    assert progress.describe(row) == "step 2 of 8, loss 0.5000"


def test_a_row_may_be_of_any_length(tmp_path):
    log = tmp_path / "train_log.jsonl"
    log.write_text(f'{{"current_steps": 1}}\n{{"current_steps": 2, "text": "{"x" * 100_000}"}}\n')
    assert progress.last_row(log)["current_steps"] == 2


@pytest.mark.parametrize("name", ["fix_valuehead", "convert_pissa", "bundle_processor", "verify"])
def test_a_task_is_named_like_its_step_and_keeps_no_result(name):
    made = getattr(postprocess, name)
    assert made.name == name.replace("_", "-")
    assert made.persist_result is False


def caused(cause: Exception) -> CheckpointError:
    """The error that a step makes of an OSError."""
    error = CheckpointError("a", "could not be written")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "again"),
    [
        (OSError("input/output error"), True),
        (CheckpointBusy("a", "is held by another process"), True),
        (CheckpointError("a", "no PiSSA adapter"), False),
        (caused(OSError("stale file handle")), True),
        (caused(PermissionError("a")), False),
        (FileNotFoundError("a"), False),
        (ValueError("a"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(cause, again):
    state = SimpleNamespace(result=lambda raise_on_failure: cause)
    assert postprocess.is_transient(None, None, state) is again
