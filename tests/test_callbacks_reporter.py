"""ReporterCallback: arguments reach the trackers as plain values, secrets do not, and no failure ends a training."""

import json
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tools.training.callbacks import ReporterCallback, trackers
from tools.training.callbacks.plain import plain, without_secrets
from tools.training.callbacks.trackers import Guarded

GROUPS = {"model": {"name": Path("/models/tiny"), "hub_token": "hf_x"}, "finetuning": {"r": 8, "targets": {"v", "q"}}}
SENT = {"model": {"name": "/models/tiny"}, "finetuning": {"r": 8, "targets": ["q", "v"]}}


class Rows(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(6) + index
        return {"input_ids": ids, "labels": ids.clone()}


def train(folder: Path, *callbacks: Any) -> int:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    args = TrainingArguments(
        output_dir=str(folder), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    return Trainer(model, args, train_dataset=Rows(), callbacks=list(callbacks)).train().global_step


@pytest.fixture
def wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield wandb
    wandb.finish()


def messages(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


def test_lg_10_arguments_wait_for_the_run(tmp_path: Path, wandb_offline: Any, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.integrations import WandbCallback

    assert train(tmp_path, ReporterCallback(GROUPS, report_to=["wandb"]), WandbCallback()) == 2
    config = wandb_offline.run.config.as_dict()
    assert {name: config[name] for name in SENT} == SENT
    assert not messages(caplog, "reported")


def test_lg_11_a_resumed_run_takes_changed_arguments_and_says_which(
    tmp_path: Path, wandb_offline: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wandb_offline.init(project="burnish", config={"finetuning": {"r": 4, "targets": ["q", "v"]}})
    with caplog.at_level("INFO", logger="tools"):
        train(tmp_path, ReporterCallback(GROUPS))  # found by its run, though nothing names it
    assert wandb_offline.run.config["finetuning"]["r"] == 8
    assert messages(caplog, "wandb:") == ["wandb: finetuning.r: 4 -> 8"]


def test_lg_10_without_a_run_there_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert train(tmp_path, ReporterCallback(GROUPS, report_to=["wandb"])) == 2
    assert messages(caplog, "wandb") == ["wandb has no run; the arguments were not reported to it"]


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "mlflow"])
def test_lg_10_a_tracker_that_is_not_installed_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert train(tmp_path, ReporterCallback(GROUPS, report_to=[name])) == 2
    assert len(messages(caplog, name)) == 1


def test_a_tracker_that_fails_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ModuleType("mlflow")
    broken.active_run = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "mlflow", broken)
    assert train(tmp_path, ReporterCallback(GROUPS, report_to=["mlflow"])) == 2
    (message,) = messages(caplog, "mlflow")
    assert "ZeroDivisionError" in message


def test_tensorboard_shows_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    train(tmp_path, ReporterCallback(GROUPS, report_to=["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "runs" / "arguments")).Reload()
    text = events.Tensors("finetuning/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text.removeprefix("```json").removesuffix("```")) == SENT["finetuning"]


def test_lg_12_configs_become_plain_json() -> None:
    class Kind(Enum):
        ONE = "one"

    @dataclass
    class Group:
        dtype: torch.dtype
        path: Path

    config = {
        "peft": LoraConfig(target_modules={"v_proj", "q_proj"}, init_lora_weights="pissa"),
        "group": Group(torch.bfloat16, Path("/a")),
        "kind": Kind.ONE,
        "device": torch.device("cpu"),
        "class": Trainer,
        "tensor": torch.tensor([1.5]),
        "many": {("a", 1): frozenset({3, 1})},
    }
    result = plain(config)
    assert json.loads(json.dumps(result)) == result
    assert result["peft"]["target_modules"] == ["q_proj", "v_proj"]
    assert result["group"] == {"dtype": "bfloat16", "path": "/a"}
    assert (result["kind"], result["device"], result["class"]) == ("one", "cpu", "Trainer")
    assert (result["tensor"], result["many"]) == ([1.5], {"['a', 1]": [1, 3]})


def test_lg_12_secrets_are_removed_at_any_depth() -> None:
    secret = dict.fromkeys(["token", "hf_token", "HUB_TOKEN", "api_key", "WANDB_API_KEY", "password", "client_secret"])
    public = dict.fromkeys(["pad_token", "eos_token", "num_input_tokens_seen", "tokenizer", "trainable_token_indices"])
    assert without_secrets({"a": [{**secret, **public}], **secret}) == {"a": [public]}


def test_a_tracker_of_the_trainer_that_raises_is_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TrainerCallback):
        calls = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            Broken.calls += 1
            raise ConnectionError("no network")

        on_log = on_step_end = on_train_begin

    assert train(tmp_path, Guarded("broken", Broken())) == 2
    assert Broken.calls == 1
    assert messages(caplog, "broken") == ["broken is off: ConnectionError: no network; training goes on"]


def test_a_tracker_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert trackers.tracker_callbacks(["mlflow"], "burnish", "run") == []
    assert messages(caplog, "mlflow") == ["mlflow is not installed; the run is not reported to it"]
