"""All argument groups and the results of post-processing, on the page of the run, whichever tracker has it."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wandb
from runs import forget_after, reward, run_in
from tiny_trainer import plain_trainer

from tools.postprocess.fix_valuehead import fix_valuehead
from tools.training.callbacks import ReporterCallback
from tools.training.callbacks.tracker_runs import TRACKERS, changes, keep_reported, reported
from tools.training.callbacks.trackers import continued, tracker_callbacks
from tools.training.config import DataArguments, FinetuningArguments, ModelArguments, load_config
from tools.training.report_results import report_results, results
from tools.training.train import train

GROUPS = {"finetuning": {"stage": "sft", "r": 8}, "data": {"train_file": "a.jsonl", "max_length": 64}}


def finished(run: Path, heads: Path) -> Path:
    """A checkpoint of the run with its finished form beside, as a flow leaves both."""
    shutil.copytree(heads, run / "checkpoint-4")
    fix_valuehead(run / "checkpoint-4", output=run / "finished" / "checkpoint-4")
    return run


@pytest.fixture
def run(tmp_path: Path, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    wandb.teardown()  # it reads the environment once in a process
    for name, value in (("WANDB_MODE", "offline"), ("SWANLAB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    for name in ("WANDB_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "trackers"))
    (tmp_path / "trackers").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return finished(tmp_path / "run", recorded("trl-valuehead-single"))


def report(run: Path, name: str, groups: dict[str, Any] = GROUPS) -> list[str]:
    """Train reported to one tracker, then report what became of the checkpoints."""
    trackers = tracker_callbacks([name], "burnish", "a-run")
    reporter = ReporterCallback(groups, report_to=[name])
    plain_trainer(run, *trackers, reporter, run_name="a-run", project="burnish").train()
    return list(report_results(run))


def test_lg_13_results_say_input_output_version_options_and_checksums(run: Path) -> None:
    (receipt,) = results(run)["finished/checkpoint-4"]
    assert receipt["output"] == "finished/checkpoint-4"
    assert receipt["source"]["path"].endswith("checkpoint-4")
    assert receipt["step"] == "fix-valuehead"
    assert {"version", "options", "time"} <= receipt.keys()
    assert all("sha256" in known or "header_sha256" in known for known in receipt["files"].values() if known)


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "tensorboard", "mlflow"])
def test_a7_each_tracker_gets_every_group_and_the_results(run: Path, name: str, request: Any) -> None:
    pytest.importorskip(name)
    assert report(run, name) == [name]
    kept = json.loads((run / ".burnish" / "trackers.json").read_text())
    sent = globals()[f"_in_{name}"](run.parent, kept["runs"][name])
    assert sent["finetuning"] == GROUPS["finetuning"]
    assert sent["data"] == GROUPS["data"]
    assert sent["postprocessing"] == json.loads(json.dumps(results(run)))


def _in_wandb(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """What the offline files of the run hold, that of the reopened one last."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {}
    for file in sorted(folder.glob(f"trackers/wandb/offline-run-*/run-{identity['id']}.wandb")):
        for data in _records(file.read_bytes()):
            record = Record.FromString(data)
            for update in [*record.config.update, *record.run.config.update]:
                found[update.key] = json.loads(update.value_json)
    return found


def _records(data: bytes, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, behind the header of wandb."""
    at, parts = header, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


def _in_swanlab(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    import yaml

    files = sorted(folder.glob(f"swanlog/run-*-{identity['id']}/files/config.yaml"))
    return {key: entry["value"] for key, entry in yaml.safe_load(files[-1].read_text()).items()}


def _in_trackio(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    from trackio import Api

    (found,) = (run for run in Api().runs(identity["project"]) if run.name == identity["name"])
    return dict(found.config)


def _in_tensorboard(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(identity["folder"]) / "arguments")).Reload()
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    return {name: json.loads(text.removeprefix("```json").removesuffix("```")) for name, text in texts.items()}


def _in_mlflow(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient(identity["uri"])
    assert client.get_run(identity["id"]).data.params["finetuning.r"] == "8"
    return dict(mlflow.artifacts.load_dict(f"runs:/{identity['id']}/arguments.json"))


def test_a7_a_tracker_that_fails_costs_the_flow_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report(run, "tensorboard")
    kept = json.loads((run / ".burnish" / "trackers.json").read_text())
    kept["runs"]["mlflow"] = {"id": "1", "uri": "nowhere"}
    (run / ".burnish" / "trackers.json").write_text(json.dumps(kept))
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    assert report_results(run) == ("tensorboard",)
    assert "mlflow: the results were not reported" in caplog.text


def test_a7_a_run_that_was_reported_nowhere_has_nothing_to_add(tmp_path: Path) -> None:
    assert report_results(tmp_path) == ()


@pytest.mark.parametrize("content", ["", "[]", '{"runs": {}}', '{"arguments": {}, "runs": {"wandb": null}}'])
def test_a7_a_damaged_record_counts_as_none_with_one_warning(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / ".burnish" / "trackers.json"
    file.parent.mkdir()
    file.write_text(content)
    assert report_results(tmp_path) == ()
    with continued(tmp_path):
        assert "WANDB_RUN_ID" not in os.environ
    assert caplog.text.count(f"{file}: does not say where the run was reported") == 1


def test_a7_a_resumed_run_keeps_what_it_told_other_trackers(run: Path) -> None:
    keep_reported(run, {}, {"mlflow": {"id": "1", "uri": "nowhere"}})
    reporter = ReporterCallback(GROUPS, report_to=["tensorboard"])
    trainer = plain_trainer(run, reporter)
    for step, kept in ((2, {"mlflow", "tensorboard"}), (0, {"tensorboard"})):
        trainer.state.global_step = step
        reporter.on_train_begin(trainer.args, trainer.state, trainer.control)
        assert reported(run)["runs"].keys() == kept


def test_a7_another_process_of_the_run_reports_nothing(run: Path) -> None:
    reporter = ReporterCallback(GROUPS, report_to=["tensorboard"])
    trainer = plain_trainer(run, reporter)
    trainer.state.is_world_process_zero = False
    reporter.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert not (run / ".burnish" / "trackers.json").exists()


def test_a7_groups_may_be_objects_named_by_their_class(config: Path) -> None:
    given = load_config(config).config
    reporter = ReporterCallback(given.model, given.data, given.finetuning)
    assert reporter.groups.keys() == {"model", "data", "finetuning"}
    for name, kind in (("model", ModelArguments), ("data", DataArguments), ("finetuning", FinetuningArguments)):
        assert reporter.groups[name].keys() == kind.model_fields.keys()


def test_lg_13_a_run_reports_all_its_groups(config: Path) -> None:
    train(config, [*reward(config), "report.report_to=tensorboard", "max_steps=1"])
    kept = json.loads((config.parent / "run" / ".burnish" / "trackers.json").read_text())
    assert kept["arguments"].keys() == {"model", "data", "finetuning", "generating", "training", "report", "launch"}
    assert kept["arguments"]["finetuning"]["stage"] == "reward"
    assert kept["arguments"]["finetuning"]["r"] == 2
    assert kept["runs"].keys() == {"tensorboard"}


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_lg_11_a_resumed_run_goes_on_in_the_run_of_its_tracker(config: Path, run: Path, name: str) -> None:
    tracker = pytest.importorskip(name)
    ids = []
    for resumed in (False, True):
        if resumed:
            forget_after(config.parent / "reported", 4)
        train(config, [f"report.report_to={name}", run_in(config, "reported")])
        tracker.finish()
        if name == "wandb":
            tracker.teardown()
        kept = json.loads((config.parent / "reported" / ".burnish" / "trackers.json").read_text())
        ids.append(kept["runs"][name]["id"])
    assert ids[0] == ids[1]
    assert f"{name.upper()}_RUN_ID" not in os.environ


def test_lg_11_only_what_changes_is_said() -> None:
    old = {"a": {"b": 1, "c": {"d": [1]}}, "e": 2, "gone": 3}
    new = {"a": {"b": 1, "c": {"d": [2]}}, "e": None, "new": {}}
    assert changes(old, new) == ["a.c.d: [1] -> [2]", "e: 2 -> None"]


def test_every_tracker_that_a_configuration_may_name_is_known() -> None:
    from tools.training.config import REPORTERS

    assert TRACKERS.keys() == set(REPORTERS)
