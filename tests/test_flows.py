"""The flows against a Prefect server of their own, with real training and real steps on a model of two layers."""

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings
from prefect.states import Scheduled
from prefect.testing.utilities import prefect_test_harness
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flows.command import run_command, table
from flows.finish import finish
from flows.post_train import post_train
from tasks.postprocess import as_task
from tasks.train import TrainingStopped
from tools import postprocess as steps
from tools.checkpoint.errors import CheckpointBusy, CheckpointError
from tools.checkpoint.report import Report

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[1]
WORDS = [f"w{number}" for number in range(40)]


@pytest.fixture(scope="module", autouse=True)
def server():
    # Without heartbeats, each of which costs a flow run a second at its end.
    with (
        prefect_test_harness(server_startup_timeout=90),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Llama of two layers with a tokenizer of forty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("models") / "base"
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(path)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(special + WORDS), pad_token_id=0, **size)).save_pretrained(path)
    return path


@pytest.fixture
def config(base, tmp_path) -> Path:
    """Four steps of PiSSA, saved after two and after four."""
    rows = [{"prompt": " ".join(WORDS[i : i + 4]), "completion": WORDS[i + 4]} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"output_dir": str(tmp_path / "run"), "max_steps": 4, "save_steps": 2, "logging_steps": 1}
    path = tmp_path / "pissa.json"
    path.write_text(
        json.dumps(
            {
                "model": {"model_name_or_path": str(base)},
                "data": {"train_file": str(tmp_path / "rows.jsonl"), "max_length": 32},
                "finetuning": {"init_lora_weights": "pissa", "r": 2},
                "training": {**training, "per_device_train_batch_size": 2, "learning_rate": 1e-2},
            }
        )
    )
    return path


@pytest.fixture
def run_log(caplog):
    """What Prefect writes to the logs of its runs."""
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def retried(flow_run_id, of, parameters):
    """The state after a retry of a flow run, as `prefect flow-run retry` makes it."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Scheduled(), force=True)
        again = client.read_flow_run(flow_run_id)
    return run_flow(of, flow_run=again, parameters=parameters, return_type="state")


def outcomes(reports: list[Report]) -> dict[str, bool]:
    return {report.step: report.changed for report in reports}


def test_pf_01_a_failed_step_is_done_again_and_training_is_not(config, tmp_path, monkeypatch, run_log):
    calls = []

    def convert_pissa(adapter: Path, **options) -> Report:
        calls.append(adapter)
        if len(calls) == 1:
            raise CheckpointError(adapter, "no space left on the device")
        return steps.convert_pissa(adapter, **options)

    monkeypatch.setattr("flows.finish.convert_pissa", as_task(convert_pissa))
    parameters = {"config": config}
    failed = post_train(**parameters, return_state=True)
    assert failed.is_failed()

    state = retried(failed.state_details.flow_run_id, post_train, parameters)
    assert state.is_completed()
    assert outcomes(state.result()) == {
        "train": False,
        "fix-valuehead": False,
        "convert-pissa": True,
        "bundle-processor": False,
        "verify": False,
    }
    assert not any(outcomes(post_train(**parameters)).values())

    finished = tmp_path / "run" / "finished" / "checkpoint-4"
    assert calls == [finished] * 3
    assert json.loads((finished / "adapter_config.json").read_text())["r"] == 4
    assert not (finished / "optimizer.pt").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    assert len({row["run_id"] for row in rows}) == 1
    assert "logits within" in table(state.result())
    assert "step 4 of 4, loss" in run_log.text
    assert "computing cache key" not in run_log.text
    assert "Traceback" not in run_log.text

    # The other checkpoint, by the flow for existing ones; it may be asked for the whole run.
    reports = finish(tmp_path / "run")
    assert [Path(report.path).name for report in reports if report.changed] == ["checkpoint-2"] * 2


def test_a_stopped_training_finishes_nothing(config, tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    monkeypatch.setattr("tasks.train.COMMAND", (sys.executable, "-c", "raise SystemExit(4)"))
    with pytest.raises(TrainingStopped):
        post_train(config)
    assert not (tmp_path / "run" / "finished").exists()


def test_only_what_may_pass_is_tried_again(tmp_path):
    tries = []

    errors = {"hiccup": OSError("stale file handle"), "refusal": CheckpointError(tmp_path, "no adapter")}

    def first_fails(checkpoint: Path, why: str) -> Report:
        tries.append(why)
        if tries.count(why) == 1:
            raise errors[why]
        return Report("first-fails", str(checkpoint), True, "went well")

    @flow
    def once(why: str) -> Report:
        return as_task(first_fails).with_options(retry_delay_seconds=0)(tmp_path, why)

    assert once("hiccup").changed
    assert once("refusal", return_state=True).is_failed()
    assert tries == ["hiccup", "hiccup", "refusal"]


def test_a_missing_path_is_named_with_the_host(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere: not found on \S+"):
        finish(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("run", "no adapter"), 1),
        (CheckpointBusy("run", "another process is here"), 3),
        (TrainingStopped("run", "stopped at step 7"), 4),
    ],
)
def test_a_failed_flow_ends_its_command_with_one_line_and_the_code_of_the_error(error, code, monkeypatch, capsys):
    @flow
    def fails() -> list[Report]:
        raise error

    monkeypatch.setattr(sys, "argv", ["fails"])
    with pytest.raises(SystemExit) as ended:
        run_command(fails, argparse.ArgumentParser(), lambda: None)
    assert ended.value.code == code
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {error}"


def test_a_plainly_wrong_argument_ends_a_command_before_a_server_is_started(monkeypatch, capsys):
    def check() -> None:
        raise CheckpointError("nowhere.yaml", "not found")

    monkeypatch.setattr(sys, "argv", ["fails"])
    with pytest.raises(SystemExit) as ended:
        run_command(None, argparse.ArgumentParser(), check)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: nowhere.yaml: not found\n"


def prefect(*arguments: str) -> str:
    settings = {"PREFECT_API_URL": get_current_settings().api.url, "BURNISH_HOME": "/srv/burnish", "DO_NOT_TRACK": "1"}
    command = [sys.executable, "-m", "prefect", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_deployments_are_accepted_and_have_a_form():
    prefect("work-pool", "create", "burnish", "--type", "process")
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    with get_client(sync_client=True) as client:
        nightly = client.read_deployment_by_name("post-train/nightly")
        on_demand = client.read_deployment_by_name("finish/finish")
    assert [schedule.schedule.cron for schedule in nightly.schedules] == ["0 3 * * *"]
    assert nightly.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert on_demand.pull_steps[0]["prefect.deployments.steps.set_working_directory"]["directory"] == "/srv/burnish"
    for deployment in (nightly, on_demand):
        form = deployment.parameter_openapi_schema["properties"]
        assert all(field["description"] for field in form.values())


def test_lg_13_results_follow_to_the_tracker_of_the_run(config, tmp_path):
    post_train(config, overrides=("report.report_to=tensorboard",))
    events = EventAccumulator(str(tmp_path / "run" / "runs" / "arguments")).Reload()
    (sent,) = events.Tensors("postprocessing/text_summary")
    results = json.loads(sent.tensor_proto.string_val[0].decode().removeprefix("```json").removesuffix("```"))
    steps_done = [receipt["step"] for receipt in results["finished/checkpoint-4"]]
    assert "convert-pissa" in steps_done
    assert events.Tensors("finetuning/text_summary")
