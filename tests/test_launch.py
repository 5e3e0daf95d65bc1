"""Training in several processes of one machine: one run, one log, one end."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from runs import assert_same, reward, rows, run_in, weights, write_config
from typer.testing import CliRunner, Result

from tools import logits
from tools.checkpoint.errors import CheckpointError
from tools.cli import app
from tools.postprocess.convert_pissa import convert_pissa
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.training import state
from tools.training.state import TrainingStopped
from tools.training.train import train

TWO = "launch.processes=2"
PISSA = ["finetuning.lora_dropout=0", "finetuning.init_lora_weights=pissa_niter_4"]
CALLBACKS = """
import os, signal, time
from pathlib import Path
import torch
from transformers import TrainerCallback

class At(TrainerCallback):
    '''Does what `does` says in a step of one of the processes: at its begin, or at the event that is named.'''

    def __init__(self, step, rank, does, event):
        self.step, self.rank, self.does = step, rank, getattr(self, does)
        setattr(self, event, self.act)

    def act(self, args, state, control, model=None, **_):
        if (state.global_step + 1, args.process_index) == (self.step, self.rank):
            self.does(model)

    def stop(self, model):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(3)  # meanwhile it is passed on to both

    def sleep(self, model):
        Path("asleep").write_text(str(os.getpid()))
        time.sleep(600)

    def die(self, model):
        os.kill(os.getpid(), signal.SIGKILL)

    def spoil(self, model):
        with torch.no_grad():
            model.get_output_embeddings().weight.fill_(float("nan"))
"""


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks for the processes to find, which begin in the directory of the test."""
    (tmp_path / "acting.py").write_text(CALLBACKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def acting(does: str, *, step: int, event: str = "on_step_begin") -> str:
    """The override that lets the second process do something in a step."""
    arguments = {"step": step, "rank": 1, "does": does, "event": event}
    return f"report.callbacks={json.dumps([{'path': 'acting.At', 'args': arguments}])}"


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def pair(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The configuration of a run in two processes, and how it was told. It has all that must not disturb training."""
    config = write_config(base, tmp_path_factory.mktemp("pair"))
    watched = [f"data.eval_file={config.parent / 'sft.jsonl'}", "early_stopping_patience=3", "samples=[what is 3]"]
    return config, command(config, TWO, *PISSA, *watched, "samples_every=3", "max_new_tokens=3", "--json")


def test_two_processes_train_what_one_trains_with_twice_the_batch(pair: tuple[Path, Result]) -> None:
    config, _ = pair
    run = config.parent / "run"
    shutil.copytree(run / "pissa_init", config.parent / "alone" / "pissa_init")
    train(config, [*PISSA, "per_device_train_batch_size=4", run_in(config, "alone")])
    for step in (2, 4, 6):
        ours, theirs = weights(run / f"checkpoint-{step}"), weights(config.parent / "alone" / f"checkpoint-{step}")
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)


def test_two_processes_tell_everything_once(pair: tuple[Path, Result]) -> None:
    config, told = pair
    run = config.parent / "run"
    assert told.exit_code == 0
    report = json.loads(told.stdout)
    assert (report["changed"], report["details"]["checkpoint"]) == (True, "checkpoint-6")
    assert [row["current_steps"] for row in rows(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["current_steps"] for row in rows(run) if "eval_loss" in row] == [2, 4, 6]
    assert [row["step"] for row in rows(run, "samples.jsonl")] == [
        0,
        3,
        6,
        6,
    ]  # the last two of the last and of the best
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert not (run / ".burnish" / "lock").exists()
    assert state.read_state(run).state == "finished"


def test_another_number_of_processes_on_resume_is_refused(pair: tuple[Path, Result]) -> None:
    config, _ = pair
    with pytest.raises(CheckpointError, match=r"another configuration \(launch.processes: 2 -> its default\)"):
        train(config, [*PISSA, f"data.eval_file={config.parent / 'sft.jsonl'}", "early_stopping_patience=3"])


def test_a_run_that_was_stopped_goes_on_to_the_same_end(pair: tuple[Path, Result], config: Path) -> None:
    stopped = command(config, TWO, *PISSA, acting("stop", step=3, event="on_pre_optimizer_step"))
    run = config.parent / "run"
    assert (stopped.exit_code, stopped.stdout) == (TrainingStopped.exit_code, "")
    assert stopped.stderr.startswith(f"stopped: {run}: stopped at step 3; checkpoint-3 is saved")
    assert stopped.stderr.count("\n") == 1
    assert state.read_state(run).state == "stopped"
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    assert command(config, TWO, *PISSA).exit_code == 0
    assert_same(run / "checkpoint-6", pair[0].parent / "run" / "checkpoint-6")
    assert [row["current_steps"] for row in rows(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_pissa_run_in_two_processes_is_converted_for_the_original_base(
    pair: tuple[Path, Result], base: Path, tmp_path: Path
) -> None:
    checkpoint = pair[0].parent / "run" / "checkpoint-6"
    expected, asked = logits.load(checkpoint / ".burnish" / "trained_logits.safetensors")
    convert_pissa(checkpoint, output=tmp_path / "converted")
    converted = logits.logits(logits.load_model(tmp_path / "converted", base), asked)
    torch.testing.assert_close(torch.stack([row[-1] for row in converted]), expected, rtol=0, atol=1e-4)


def test_a_reward_model_of_two_processes_has_a_head_that_every_tool_reads(config: Path) -> None:
    """The best is that of all processes."""
    best = ["load_best_model_at_end=true", "metric_for_best_model=eval_rewards/margins", "greater_is_better=false"]
    evaluated = [f"data.eval_file={config.parent / 'pairs.jsonl'}", "eval_strategy=steps", "eval_steps=2", *best]
    report = train(config, [TWO, *reward(config), "finetuning.method=full", *evaluated])
    assert report.details["checkpoint"] == "checkpoint-2"  # of a run that gets better
    checkpoint = config.parent / "run" / report.details["checkpoint"]
    assert fix_valuehead(checkpoint).changed
    assert (checkpoint / "value_head.safetensors").exists()
    assert logits.load_model(checkpoint)


def test_c10_the_rank_that_hangs_is_named(config: Path, tmp_path: Path) -> None:
    told = command(config, TWO, "launch.timeout=5", acting("sleep", step=3))
    pid = (tmp_path / "asleep").read_text()
    assert told.exit_code == 1
    assert told.stderr.startswith(
        f"error: {tmp_path / 'run'}: rank 1 (process {pid} on {os.uname().nodename}) did not come to step 3 within 5 s"
    )
    assert "py-spy" in told.stderr
    assert told.stderr.count("\n") == 1
    assert not psutil.pid_exists(int(pid))


def test_a_rank_that_is_killed_ends_the_others_and_is_named(config: Path, tmp_path: Path) -> None:
    told = command(config, TWO, acting("die", step=3))
    assert told.exit_code == 1
    assert told.stderr.startswith(f"error: {tmp_path / 'run'}: rank 1 was killed by SIGKILL")
    assert told.stderr.count("\n") == 1
    left = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [line for line in left if "spawn_main" in line]


def test_c10_the_loss_of_one_process_that_is_no_number_ends_all_with_its_batch(config: Path, tmp_path: Path) -> None:
    told = command(config, TWO, "finetuning.method=full", acting("spoil", step=2))
    assert told.exit_code == 1
    assert "the loss of step 2 is nan" in told.stderr
    assert told.stderr.count("\n") == 1
    kept = sorted(path.name for path in (tmp_path / "run" / "non_finite").iterdir())
    assert "step-2-batch-1-process-1.safetensors" in kept


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_nothing_outlives_the_process_that_was_called(config: Path, tmp_path: Path) -> None:
    called = [sys.executable, "-m", "tools", "train", str(config), TWO, acting("sleep", step=2)]
    parent = subprocess.Popen(
        called, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert until((tmp_path / "asleep").exists)
    ranks = psutil.Process(parent.pid).children(recursive=True)
    assert len(ranks) >= 2
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


def test_a_wrong_configuration_is_one_line_before_anything_is_started(config: Path, tmp_path: Path) -> None:
    told = command(config, TWO, "learning_rate=-1")
    assert (told.exit_code, told.stderr) == (
        1,
        "error: override: training.learning_rate must be at least 0, not -1.0\n",
    )
    for key in ("fsdp=full_shard", "deepspeed=zero.json"):
        told = command(config, TWO, f"training.{key}")
        assert told.exit_code == 1
        assert "shards the model" in told.stderr
    assert not (tmp_path / "run").exists()


def test_a_bad_row_is_one_line(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows_file = tmp_path / "sft.jsonl"
    rows_file.write_text(rows_file.read_text() + '{"prompt": 3}\n')
    told = command(config, TWO)
    assert told.exit_code == 1
    assert told.stderr.startswith(f"error: {rows_file}:25: ")
    assert told.stderr.count("\n") == 1
    assert "Traceback" not in capfd.readouterr().err
    assert not (tmp_path / "run" / ".burnish" / "train.json").exists()


def test_torchrun_starts_the_processes_itself(config: Path, pair: tuple[Path, Result], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    called = [*launcher, "-m", "tools", "train", str(config), *PISSA, "--json"]
    done = subprocess.run(called, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["details"]["checkpoint"] == "checkpoint-6"
    assert_same(tmp_path / "run" / "checkpoint-6", pair[0].parent / "run" / "checkpoint-6")
    assert done.stderr.count("trained: ") == 1


def test_another_number_than_that_of_the_launcher_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(variable, value)
    told = command(config, TWO)
    assert told.stderr == (
        "error: override: launch.processes is 2, but a launcher has started 4 processes; leave it out\n"
    )
