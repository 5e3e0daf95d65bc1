"""How a run ends is what it says: the last step is saved, and what is finished is there and of this configuration."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import assert_same, run_in, weights
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.training.preview import preview
from tools.training.state import TrainingStopped
from tools.training.train import train

Watch = Callable[[TrainerCallback], None]


class EndAt(TrainerCallback):
    """Ends the training after a step, as a callback of the user's own may."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


class StopAt(EndAt):
    """Asks from outside to stop after a step."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            (Path(args.output_dir) / "stop").touch()


def test_a_run_that_is_ended_between_two_saves_ends_with_a_save(config: Path, watch: Watch) -> None:
    watch(EndAt(5))
    report = train(config)
    assert (report.details["checkpoint"], report.details["state"]) == ("checkpoint-5", "finished")
    checkpoint = config.parent / "run" / "checkpoint-5"
    assert weights(checkpoint)
    assert (checkpoint / ".burnish" / "trained_logits.safetensors").exists()


def test_a_stopped_run_without_saves_ends_with_its_last_step(config: Path, watch: Watch) -> None:
    never = ["save_strategy=no"]
    train(config, [*never, run_in(config, "uninterrupted")])
    watch(StopAt(3))
    with pytest.raises(TrainingStopped, match="stopped at step 3; checkpoint-3 is saved"):
        train(config, never)
    report = train(config, never)
    assert report.summary.startswith("trained 6 steps, the first 3 of them before, loss ")
    assert report.details["checkpoint"] == "checkpoint-6"
    assert_same(config.parent / "run" / "checkpoint-6", config.parent / "uninterrupted" / "checkpoint-6")


class StopAmid(TrainerCallback):
    """Asks to stop when a part of a step is done."""

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == 2:
            (Path(args.output_dir) / "stop").touch()


def test_a_stop_amid_gradient_accumulation_waits_for_the_step(config: Path, watch: Watch) -> None:
    train(config, [run_in(config, "uninterrupted")])
    watch(StopAmid())
    with pytest.raises(TrainingStopped, match="stopped at step 3; checkpoint-3 is saved"):
        train(config)
    train(config)
    assert_same(config.parent / "run" / "checkpoint-6", config.parent / "uninterrupted" / "checkpoint-6")


@pytest.mark.parametrize("damage", [shutil.rmtree, lambda path: (path / "adapter_model.safetensors").write_bytes(b"x")])
def test_a_finished_run_whose_checkpoint_is_gone_is_refused(config: Path, damage: Callable[[Path], object]) -> None:
    train(config)
    damage(config.parent / "run" / "checkpoint-6")
    with pytest.raises(CheckpointError, match=r"is finished, but its checkpoint-6 is not whole .*; put it back"):
        train(config)


def test_a_finished_run_is_not_one_of_another_configuration(config: Path) -> None:
    train(config)
    for checkpoint in (config.parent / "run").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match=r"another configuration \(finetuning.r: 2 -> 4\)"):
        train(config, ["finetuning.r=4"])


def test_a_default_that_is_written_down_makes_no_other_run(config: Path) -> None:
    train(config)
    defaults = ["training.weight_decay=0.0", "finetuning.use_dora=false", "training.save_strategy=steps"]
    assert not train(config, defaults).changed


def test_a_base_that_was_made_anew_makes_another_run(config: Path, base: Path, tmp_path: Path) -> None:
    """And one that was moved does not."""
    model = Path(shutil.copytree(base, tmp_path / "model"))
    train(config, [f"model_name_or_path={model}"])
    assert not train(config, [f"model_name_or_path={model.rename(tmp_path / 'moved')}"]).changed
    changed = {name: -tensor for name, tensor in load_file(tmp_path / "moved/model.safetensors").items()}
    save_file(changed, tmp_path / "moved/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"another configuration \(model.model_name_or_path: sha256:\w+\.\.\. ->"):
        train(config, [f"model_name_or_path={tmp_path / 'moved'}"])


def test_a_run_never_lies_in_its_own_model(config: Path, base: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(base, tmp_path / "model"))
    before = {path: path.read_bytes() for path in model.rglob("*")}
    with pytest.raises(CheckpointError, match="is what the run is made from, and training would write into it"):
        train(config, [f"model_name_or_path={model}", f"output_dir={model}"])
    assert {path: path.read_bytes() for path in model.rglob("*")} == before


def test_a_readme_in_the_output_directory_stays(config: Path) -> None:
    run = config.parent / "run"
    run.mkdir()
    (run / "README.md").write_text("mine")
    train(config, ["max_steps=2"])
    assert (run / "README.md").read_text() == "mine"


def test_a_secret_is_neither_kept_nor_shown(config: Path) -> None:
    train(config, ["training.hub_token=hf_SECRET", "max_steps=2"])
    assert "SECRET" not in (config.parent / "run" / ".burnish" / "train.json").read_text()
    assert not train(config, ["training.hub_token=hf_OTHER", "max_steps=2"]).changed
    command = [sys.executable, "-m", "tools", "train", str(config), "training.hub_token=hf_SECRET", "--show"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "SECRET" not in shown
    assert "# hub_token" in shown


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim=adamw_bnb_8bit", "training: .*bitsandbytes"),
        ("lr_scheduler_type=cosine_with_min_lr", "training: .*min_lr"),
        ("use_liger_kernel=true", "training: .*liger"),
    ],
)
def test_what_the_libraries_refuse_is_one_line(config: Path, override: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        train(config, [override])
    assert "\n" not in str(caught.value)
    assert train(config).changed


@pytest.mark.parametrize(("method", "size"), [("full", 20_000), ("full", 40_000), ("lora", 7_000)])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(config: Path, method: str, size: int) -> None:
    """A limit on the size of files stands for the disk: weights, or only the optimizer, do not fit."""
    command = [sys.executable, "-m", "tools", "train", str(config), f"finetuning.method={method}", "--json"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (1, 1), done.stderr
    assert "could not be written to" in errors[0]
    assert "make room; no checkpoint was saved yet" in errors[0]
    assert "Traceback" not in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["details"]["checkpoint"] == "checkpoint-6"


def test_quiet_says_nothing(config: Path) -> None:
    command = [sys.executable, "-m", "tools", "train", str(config), "max_steps=1", "-q"]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}  # wandb speaks of it
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    said = [line for line in done.stderr.splitlines() if "[transformers]" not in line]
    assert (done.stdout, said) == ("", [])


REFUSED = {
    "no directory": (["model_name_or_path=adapter"], "an adapter, not a model; merge it first: tools merge-adapter"),
    "no tokenizer": (["model_name_or_path=bare"], "its tokenizer does not load .*; copy one there: tools bundle"),
    "eval file": (["eval_file=nowhere.jsonl"], "nowhere.jsonl: not found"),
    "callback": (["report.callbacks=nowhere.Name"], "there is no module nowhere"),
    "too long": (["data.train_file=long.jsonl", "max_length=5000"], "long.jsonl"),
}


@pytest.mark.parametrize("act", [preview, train])
@pytest.mark.parametrize("why", REFUSED)
def test_preview_refuses_what_training_refuses(
    why: str, act: Callable[..., object], config: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bare = Path(shutil.copytree(base, tmp_path / "bare"))
    for file in bare.glob("tokenizer*"):
        file.unlink()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"lora": torch.zeros(1)}, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "a" * 4000}) + "\n")
    overrides, message = REFUSED[why]
    with pytest.raises(CheckpointError, match=message):
        act(config, overrides)
