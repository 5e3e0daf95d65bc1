"""LogCallback: what a row holds, and that no row of the past is ever lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_trainer import Rows, plain_trainer
from transformers import TrainerState

from tools.training.callbacks import LogCallback, json_lines, log, memory


def strict_rows(path: Path) -> list[dict[str, Any]]:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def fake(folder: Path, step: int, *, total: int = 2400, tokens: int = 0) -> tuple[Any, Any, None]:
    state = TrainerState(global_step=step, max_steps=total, num_input_tokens_seen=tokens, is_world_process_zero=True)
    return SimpleNamespace(output_dir=str(folder), disable_tqdm=True), state, None


def written(folder: Path) -> list[dict[str, Any]]:
    return strict_rows(folder / "train_log.jsonl")


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, tools.training.callbacks, tools.training.stages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_metric_of_a_run_is_in_the_log(tmp_path: Path) -> None:
    training = plain_trainer(
        tmp_path, LogCallback(), eval_strategy="steps", eval_steps=2, include_num_input_tokens_seen="all"
    )
    training.train()
    rows = written(tmp_path)
    steps = [row for row in rows if "loss" in row]
    assert [row["current_steps"] for row in steps] == [1, 2, 3, 4]
    first = steps[0]
    assert {"grad_norm", "learning_rate", "lr", "epoch", "elapsed_time", "remaining_time", "rss"} <= first.keys()
    assert first["total_steps"] == 4
    assert first["percentage"] == 25.0
    assert first["total_tokens"] == 12
    assert first["throughput"] > 0
    assert len({row["run_id"] for row in rows}) == 1
    assert datetime.fromisoformat(first["time"]).utcoffset().total_seconds() == 0
    assert [row["current_steps"] for row in rows if "eval_loss" in row] == [2, 4]
    reported = {key for entry in training.state.log_history for key in entry} - {"step"}
    assert reported <= {key for row in rows for key in row}


def test_an_evaluation_shows_its_progress_without_training(tmp_path: Path) -> None:
    callback = LogCallback()
    training = plain_trainer(tmp_path, callback, per_device_eval_batch_size=2)
    training.evaluate()
    training.predict(Rows())
    callback.close()
    progress = [(row["predicted"], row["predictions"]) for row in written(tmp_path) if "predicted" in row]
    assert progress == [(n, 6) for n in range(1, 7)] * 2
    assert any("eval_loss" in row for row in written(tmp_path))


def test_a6_what_a_prediction_measured_is_in_the_log(tmp_path: Path) -> None:
    callback = LogCallback()
    plain_trainer(tmp_path, callback).predict(Rows(), metric_key_prefix="predict")
    callback.close()
    assert written(tmp_path)[-1]["predict_loss"] > 0


def test_a6_the_names_that_users_of_llama_factory_know(tmp_path: Path) -> None:
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path, 0))
    metrics = {"loss": 0.0, "learning_rate": 1e-4, "epoch": 0.5, "rewards/accuracies": 0.75, "reward": 1.5, "kl": 0.1}
    callback.on_log(*fake(tmp_path, 10, total=100, tokens=640), logs={**metrics, "eval_other_loss": 2.0})
    callback.close()
    (row,) = written(tmp_path)
    names = ("current_steps", "total_steps", "loss", "reward", "accuracy", "lr", "epoch", "percentage", "total_tokens")
    assert tuple(row[name] for name in names) == (10, 100, 0.0, 1.5, 0.75, 1e-4, 0.5, 10.0, 640)
    assert {"elapsed_time", "remaining_time", "throughput", "run_id", "time"} <= row.keys()
    assert (row["kl"], row["eval_other_loss"]) == (0.1, 2.0)  # nothing is left out


def test_a6_video_memory_is_told_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**31)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**32)
    assert memory.memory() == {"vram_allocated": 2.0, "vram_reserved": 4.0}


def test_lg_01_speed_is_measured_from_the_resumed_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.0, 101.0, 102.0])
    monkeypatch.setattr(log, "monotonic", lambda: next(now))
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path, 800, tokens=80_000))
    callback.on_log(*fake(tmp_path, 810, tokens=81_000), logs={"loss": 1.0})
    callback.on_log(*fake(tmp_path, 2500, tokens=81_000), logs={"loss": 1.0})
    callback.close()
    row, beyond = written(tmp_path)
    assert (row["throughput"], row["total_tokens"]) == (1000, 81_000)
    assert (row["elapsed_time"], row["remaining_time"]) == ("0:00:01", "0:02:39")
    assert (beyond["remaining_time"], beyond["percentage"]) == ("0:00:00", 100)


def test_lg_02_the_folder_is_made(tmp_path: Path) -> None:
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path / "new" / "run", 5))
    callback.on_log(*fake(tmp_path / "new" / "run", 6), logs={"loss": 1.0})
    callback.close()
    assert len(written(tmp_path / "new" / "run")) == 1


def test_lg_03_numbers_that_json_lacks_are_null_and_named(tmp_path: Path) -> None:
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path, 0))
    metrics = {"loss": float("nan"), "grad_norm": torch.tensor(float("inf")), "learning_rate": 1e-5}
    callback.on_log(*fake(tmp_path, 1), logs=metrics)
    callback.close()
    (row,) = written(tmp_path)
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert row["lr"] == 1e-5
    assert sorted(row["non_finite"]) == ["grad_norm", "loss"]


def test_lg_05_resuming_moves_later_rows_and_starting_renames_the_log(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    old = "".join(json.dumps({"current_steps": step}) + "\n" for step in range(1, 59))
    path.write_text(old + '{"current_steps": 5')  # killed while it wrote
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path, 50))
    callback.on_log(*fake(tmp_path, 51), logs={"loss": 1.0})
    callback.on_train_end(*fake(tmp_path, 51))
    assert [row["current_steps"] for row in written(tmp_path)] == list(range(1, 52))
    (beyond,) = tmp_path.glob("train_log.jsonl.beyond-step-50.*")
    assert beyond.read_text() == old[old.index('{"current_steps": 51}') :] + '{"current_steps": 5'

    before = path.read_text()
    callback.on_train_begin(*fake(tmp_path, 0))
    callback.on_log(*fake(tmp_path, 1), logs={"loss": 1.0})
    callback.on_train_end(*fake(tmp_path, 1))
    assert [row["current_steps"] for row in written(tmp_path)] == [1]
    (renamed,) = tmp_path.glob("train_log.jsonl.before.*")
    assert renamed.read_text() == before


def test_lg_07_every_row_is_there_at_the_end(tmp_path: Path) -> None:
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path, 0))
    for step in range(100):
        callback.on_log(*fake(tmp_path, step), logs={"loss": 1.0})
    callback.on_train_end(*fake(tmp_path, 100))
    assert [row["current_steps"] for row in written(tmp_path)] == list(range(100))


WRITER = """
import os, sys, time
from pathlib import Path
from tools.training.callbacks.json_lines import JsonLines
rows = JsonLines(Path(sys.argv[1]))
for step in range(100):
    rows.write({"current_steps": step})
"""


def run_writer(path: Path, end: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER + end, str(path)])


def test_lg_07_every_row_is_there_after_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    process = run_writer(path, "time.sleep(60)")
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_bytes().count(b"\n") == 100) and time.monotonic() < deadline:
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [row["current_steps"] for row in strict_rows(path)] == list(range(100))


def test_rows_are_written_when_training_raises(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    assert run_writer(path, "raise SystemExit(3)").wait() == 3
    assert len(strict_rows(path)) == 100


def test_a6_a_part_of_a_row_that_fits_no_more_is_taken_back(tmp_path: Path) -> None:
    """A full disk takes the beginning of a row; the next row must not be glued to it."""
    path = tmp_path / "log"
    limited = """
import resource, signal, sys
from pathlib import Path
from tools.training.callbacks.json_lines import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rows = JsonLines(Path(sys.argv[1]))
rows.write({"current_steps": 1})
rows.close()
rows = JsonLines(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
rows.write({"current_steps": 2})
rows.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
rows = JsonLines(Path(sys.argv[1]))
rows.write({"current_steps": 3})
rows.close()
"""
    subprocess.run([sys.executable, "-c", limited, str(path)], check=True)
    assert [row["current_steps"] for row in strict_rows(path)] == [1, 3]


def test_a6_a_slow_disk_holds_no_step_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = threading.Event()
    monkeypatch.setattr(json_lines, "_append", lambda path, line: is_free.wait(60))
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path, 0))
    for step in (1, 2):
        callback.on_log(*fake(tmp_path, step), logs={"loss": 1.0})  # returns though nothing is written
    is_free.set()
    callback.close()


def test_no_writer_is_left_when_the_callback_is_dropped(tmp_path: Path) -> None:
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path, 0))
    callback.on_log(*fake(tmp_path, 1), logs={"loss": 1.0})
    del callback
    assert not [thread for thread in threading.enumerate() if thread.name == "writes train_log.jsonl"]


def test_lg_08_a_missing_eval_loss_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"eval_runtime": 7.2, "eval_samples_per_second": 0.1, "epoch": 0}
    callback = LogCallback()
    callback.on_train_begin(*fake(tmp_path, 0))
    for _ in range(2):
        callback.on_log(*fake(tmp_path, 1), logs=metrics)
        callback.on_evaluate(*fake(tmp_path, 1), metrics=metrics)
    callback.close()
    assert [record.message for record in caplog.records] == ["no eval_loss in evaluation metrics; check label_names"]
    assert written(tmp_path)[0]["eval_runtime"] == 7.2


def test_a_record_that_cannot_be_written_is_warned_of_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = LogCallback(tmp_path / "log")
    callback.on_train_begin(*fake(tmp_path, 0))
    callback.on_log(*fake(tmp_path, 1), logs={"loss": 1.0})
    callback.close()
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    for step in (2, 3):
        callback.on_log(*fake(tmp_path, step), logs={"loss": 1.0})
    callback.close()
    assert len([record for record in caplog.records if "was not written" in record.message]) == 1


def test_another_process_of_the_run_writes_nothing(tmp_path: Path) -> None:
    args, state, control = fake(tmp_path, 1)
    state.is_world_process_zero = False
    callback = LogCallback()
    callback.on_train_begin(args, state, control)
    callback.on_log(args, state, control, logs={"loss": 1.0})
    callback.close()
    assert list(tmp_path.iterdir()) == []
