"""Training: what a run leaves behind, and that stopping, killing and resuming change nothing about it."""

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from characters import ROWS
from peft import PeftModel
from runs import assert_same, forget_after, reward, run_in, weights, write_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tools import logits
from tools.checkpoint.errors import CheckpointBusy, CheckpointError
from tools.checkpoint.journal import lock
from tools.training import state, value_head
from tools.training.callbacks import initial_adapter
from tools.training.collate import PairCollator
from tools.training.state import TrainingStopped
from tools.training.train import train

METHODS = {
    "sft lora": ["finetuning.method=lora"],
    "sft full": ["finetuning.method=full"],
    "sft pissa": ["finetuning.init_lora_weights=pissa_niter_4"],
    "sft olora": ["finetuning.init_lora_weights=olora"],
    "sft pissa dora": ["finetuning.init_lora_weights=pissa_niter_4", "finetuning.use_dora=true"],
    "sft pissa bf16": ["finetuning.init_lora_weights=pissa_niter_4", "model.dtype=bfloat16"],
    "reward full": ["finetuning.stage=reward", "finetuning.method=full"],
    "reward pissa": ["finetuning.stage=reward", "finetuning.init_lora_weights=pissa_niter_4"],
}


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, for tests that only look at it."""
    config = write_config(base, tmp_path_factory.mktemp("trained"))
    train(config)
    return config.parent / "run"


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_an_uninterrupted_one(
    config: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = METHODS[method] + (reward(config)[1:] if "reward" in method else [])
    report = train(config, overrides)
    run = config.parent / "run"
    assert (report.changed, report.details["checkpoint"]) == (True, "checkpoint-6")
    initial = weights(run / "pissa_init")
    assert bool(initial) == ("pissa" in method or "olora" in method)

    forget_after(run, 4)
    (run / "checkpoint-2").rename(run / "gone-checkpoint-2")
    monkeypatch.setattr(initial_adapter, "_decompose", lambda *_: pytest.fail("decomposed a second time"))
    with caplog.at_level("INFO", logger="tools"):
        assert train(config, overrides).changed
    assert "which trained here, is gone" in caplog.text
    assert not (run / "checkpoint-2").exists()  # it did go on from 4
    assert_same(run / "checkpoint-6", run / "gone-checkpoint-6")
    kept = weights(run / "pissa_init")
    assert initial.keys() == kept.keys()
    assert all(torch.equal(initial[name], kept[name]) for name in initial)


@pytest.mark.parametrize("init", ["pissa_niter_4", "olora"])
def test_a_start_killed_before_its_first_save_starts_from_the_same_adapter(config: Path, init: str) -> None:
    overrides = [f"finetuning.init_lora_weights={init}", "save_steps=6"]
    train(config, overrides)
    run = config.parent / "run"
    forget_after(run, 0)
    train(config, overrides)
    assert_same(run / "checkpoint-6", run / "gone-checkpoint-6")


def test_a_pissa_run_without_its_initial_adapter_is_refused(config: Path) -> None:
    overrides = ["finetuning.init_lora_weights=pissa_niter_4"]
    train(config, overrides)
    forget_after(config.parent / "run", 4)
    shutil.rmtree(config.parent / "run" / "pissa_init")
    with pytest.raises(CheckpointError, match="initial adapter of this run is gone"):
        train(config, overrides)


def test_trained_minus_initial_adapter_on_the_base_is_the_trained_model(config: Path, base: Path) -> None:
    """W + s * (B @ A - B0 @ A0) is what was trained, of which the run keeps the logits."""
    train(config, ["finetuning.init_lora_weights=pissa_niter_4"])
    run = config.parent / "run"
    checkpoint = run / "checkpoint-6"
    expected, rows = logits.load(checkpoint / ".burnish" / "trained_logits.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(model, run / "pissa_init", adapter_name="initial")
    shutil.copytree(checkpoint, run / "as_lora")
    written = json.loads((run / "as_lora" / "adapter_config.json").read_text())
    (run / "as_lora" / "adapter_config.json").write_text(json.dumps({**written, "init_lora_weights": True}))
    adapted.load_adapter(run / "as_lora", "trained")
    adapted.add_weighted_adapter(["trained", "initial"], [1.0, -1.0], "delta", combination_type="cat")
    adapted.set_adapter("delta")
    last = torch.stack([row[-1] for row in logits.logits(adapted, rows)])
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-4)
    with adapted.disable_adapter():
        untrained = torch.stack([row[-1] for row in logits.logits(adapted, rows)])
    assert (untrained - expected).abs().max() > 0.05


def split_out(folder: Path) -> None:
    """What fix-valuehead leaves: plain weights, and the head in a file of its own."""
    tensors = load_file(folder / "model.safetensors")
    head = {name: tensors.pop(name) for name in value_head.HEAD_KEYS}
    save_file(head, folder / "value_head.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_head_that_was_split_out_meanwhile_is_loaded_on_resume(config: Path) -> None:
    overrides = [*reward(config), "finetuning.method=full"]
    train(config, overrides)
    run = config.parent / "run"
    forget_after(run, 4)
    split_out(run / "checkpoint-4")
    train(config, overrides)
    assert_same(run / "checkpoint-6", run / "gone-checkpoint-6")


def test_a_head_that_is_gone_is_an_error_on_resume(config: Path) -> None:
    overrides = [*reward(config), "finetuning.method=full"]
    train(config, overrides)
    run = config.parent / "run"
    forget_after(run, 4)
    split_out(run / "checkpoint-4")
    (run / "checkpoint-4" / "value_head.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no value head"):
        train(config, overrides)


@pytest.mark.parametrize(("method", "split"), [("full", False), ("full", True), ("lora", False)])
def test_the_best_reward_model_comes_back_with_its_head(
    config: Path, method: str, split: bool, watch: Callable[[TrainerCallback], None]
) -> None:
    pairs = config.parent / "pairs.jsonl"
    evaluation = ["eval_strategy=steps", "eval_steps=2", "load_best_model_at_end=true"]
    best = [
        "metric_for_best_model=eval_rewards/margins",
        "greater_is_better=false",
    ]  # of a run that gets better: the first
    seen: dict[str, dict[str, torch.Tensor]] = {}

    class Watch(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            seen[checkpoint.name] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            if split:
                split_out(checkpoint)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            seen["end"] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    watch(Watch())
    files = [*reward(config), f"data.eval_file={pairs}"]
    report = train(config, [*files, f"finetuning.method={method}", *evaluation, *best])
    chosen = report.details["checkpoint"]
    assert chosen == "checkpoint-2"
    assert all(torch.equal(tensor, seen[chosen][name]) for name, tensor in seen["end"].items())
    assert not all(torch.equal(tensor, seen["checkpoint-6"][name]) for name, tensor in seen["end"].items())


def test_a_finished_run_is_not_trained_again(config: Path) -> None:
    train(config)
    again = train(config)
    assert (again.changed, again.summary) == (False, "already trained; nothing to do")
    assert again.details["checkpoint"] == "checkpoint-6"


def test_a_run_killed_after_its_last_save_is_finished(config: Path) -> None:
    train(config)
    run = config.parent / "run"
    forget_after(run, 6)
    before = weights(run / "checkpoint-6")
    assert not train(config).changed
    assert state.read_state(run).state == "finished"
    assert before.keys() == weights(run / "checkpoint-6").keys()
    assert not (run / "checkpoint-7").exists()


def test_another_configuration_is_refused_by_name(config: Path) -> None:
    train(config)
    with pytest.raises(CheckpointError, match=r"finetuning.r: 2 -> 4") as caught:
        train(config, ["finetuning.r=4"])
    assert "training.seed" not in str(caught.value)


def test_checkpoints_of_somebody_else_are_refused(config: Path) -> None:
    (config.parent / "run" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="checkpoint-3, but not"):
        train(config)


def test_a_run_that_is_trained_by_another_process_is_busy(config: Path) -> None:
    run = config.parent / "run"
    run.mkdir()
    with lock(run), pytest.raises(CheckpointBusy, match=rf"process {os.getpid()} \(since .*\) is changing it"):
        train(config)


def test_a_process_of_that_number_does_not_count(config: Path) -> None:
    """The run may have been trained on another host, or in another container."""
    train(config)
    file = config.parent / "run" / ".burnish" / "train.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "state": "running", "pid": os.getppid()}))
    assert not train(config).changed


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"state": "done"}, "state: Input should be 'running', 'stopped' or 'finished'"),
        ({"pid": "x"}, "pid: Input should be a valid integer"),
        ({"fingerprint": None}, "fingerprint: Input should be"),
        ({"more": 1}, "more: Unexpected keyword argument"),
        (None, "Invalid JSON"),
    ],
)
def test_a_damaged_state_is_one_line(tmp_path: Path, damage: dict[str, Any] | None, reason: str) -> None:
    state.write_state(tmp_path, state.running({}, 0, None))
    file = tmp_path / ".burnish" / "train.json"
    assert state.read_state(tmp_path) is not None
    file.write_text(json.dumps(json.loads(file.read_text()) | damage) if damage else "{")
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: not the state of a run ({reason}")) as caught:
        state.read_state(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["no trainer_state.json", "cut short", "is not there"])
def test_fi_16_an_incomplete_checkpoint_is_skipped_with_its_reason(
    config: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    full = ["finetuning.method=full", "training.max_steps=12"]
    train(config, full)
    run = config.parent / "run"
    forget_after(run, 10)
    newest = run / "checkpoint-10"
    if damage == "no trainer_state.json":
        (newest / "trainer_state.json").unlink()
    elif damage == "cut short":
        with (newest / "model.safetensors").open("r+b") as file:
            file.truncate(5000)
    else:
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (newest / "model.safetensors.index.json").write_text(json.dumps(index))
        (newest / "model.safetensors").unlink()
    assert state.newest_complete(run) == run / "checkpoint-8"  # by number: 8 before 10
    assert any("checkpoint-10" in record.message and damage in record.message for record in caplog.records)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("damage", ["gone", "cut short", "zeros"])
def test_a_checkpoint_that_training_could_not_go_on_from_is_skipped_with_its_reason(
    trained: Path, tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "copy"))
    file = run / "checkpoint-6" / name
    size = file.stat().st_size
    if damage == "gone":
        file.unlink()
    else:
        os.truncate(file, size // 2 if damage == "cut short" else 0)
        os.truncate(file, size // 2 if damage == "cut short" else size)
    assert state.newest_complete(run) == run / "checkpoint-4"
    reason = f"no {name.replace('.pth', '')}" if damage == "gone" else f"{name} is damaged"
    assert f"checkpoint-6 is not resumed from: {reason}" in caplog.text


@pytest.mark.parametrize("step", [0, 2])
def test_an_initial_adapter_that_is_cut_short_is_one_line(config: Path, step: int) -> None:
    pissa = ["finetuning.init_lora_weights=pissa", "training.max_steps=4"]
    train(config, pissa)
    run = config.parent / "run"
    forget_after(run, step)
    weights = run / "pissa_init" / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(weights))}: ") as caught:
        train(config, pissa)
    assert "\n" not in str(caught.value)


def test_stdout_is_left_for_the_report(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(config)
    assert capfd.readouterr().out == ""


def test_what_a_run_leaves_behind(config: Path) -> None:
    report = train(config, ["finetuning.init_lora_weights=pissa_niter_4"])
    run = config.parent / "run"
    written = {path.name for path in run.iterdir()}
    assert {"checkpoint-2", "checkpoint-4", "checkpoint-6", "pissa_init", "train_log.jsonl", ".burnish"} <= written
    assert (run / "checkpoint-4" / ".burnish" / "trained_logits.safetensors").exists()
    rows = [json.loads(line) for line in (run / "train_log.jsonl").read_text().splitlines()]
    assert [row["current_steps"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert {"grad_norm", "mean_token_accuracy", "total_tokens", "throughput"} <= rows[0].keys()
    assert report.details["train_loss"] > 0
    assert state.read_state(run).state == "finished"
    kept = json.loads((run / "pissa_init" / "adapter_config.json").read_text())
    trained = json.loads((run / "checkpoint-6" / "adapter_config.json").read_text())
    assert (kept["init_lora_weights"], trained["init_lora_weights"]) == (True, "pissa_niter_4")
    assert kept["base_model_name_or_path"] == trained["base_model_name_or_path"]


def test_the_config_of_the_model_is_not_changed_by_training(config: Path, base: Path) -> None:
    train(config, ["finetuning.method=full"])
    before = json.loads((base / "config.json").read_text())
    after = json.loads((config.parent / "run" / "checkpoint-6" / "config.json").read_text())
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} <= {
        "pad_token_id",
        "eos_token_id",
    }


def test_only_the_answer_is_learnt(config: Path, watch: Callable[[TrainerCallback], None]) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
            seen.extend(train_dataloader)

    watch(Watch())
    train(config, ["max_steps=1"])
    tokenizer = AutoTokenizer.from_pretrained(json.loads(config.read_text())["model"]["model_name_or_path"])
    for batch in seen:
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            learnt = "".join(tokenizer.convert_ids_to_tokens(labels[labels != -100]))
            assert learnt.startswith(" it is ")
            assert learnt.endswith("<eos>")
            assert torch.equal(labels[labels != -100], ids[labels != -100])
            assert (labels[mask == 0] == -100).all()


def test_pairs_are_batched_chosen_first() -> None:
    pairs = [
        {"chosen_input_ids": [1, 2, 3], "rejected_input_ids": [4]},
        {"chosen_input_ids": [5], "rejected_input_ids": [6, 7]},
    ]
    batch = PairCollator(pad_token_id=0)(pairs)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 0, 0], [4, 0, 0], [6, 7, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 1, 0]]


class StopAt(TrainerCallback):
    """Asks for a stop, in one of the ways there are, while the step after `step` is computed."""

    def __init__(self, step: int, how: str, event: str = "on_pre_optimizer_step"):
        self.step, self.how = step, how
        setattr(self, event, self._ask)

    def _ask(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            if self.how == "file":
                (Path(args.output_dir) / "stop").touch()
            else:
                os.kill(os.getpid(), getattr(signal, self.how))


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "file"])
def test_a_stopped_run_is_saved_and_goes_on_to_the_same_end(
    config: Path, how: str, watch: Callable[[TrainerCallback], None]
) -> None:
    train(config, [run_in(config, "whole")])
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    watch(StopAt(2, how))
    with pytest.raises(TrainingStopped, match=r"stopped at step 3; checkpoint-3 is saved") as caught:
        train(config)
    run = config.parent / "run"
    assert caught.value.exit_code == 4
    assert state.read_state(run).state == "stopped"
    assert state.read_state(run).checkpoint == "checkpoint-3"
    assert not (run / "stop").exists()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert train(config).details["steps"] == 6
    assert_same(run / "checkpoint-6", config.parent / "whole" / "checkpoint-6")


def test_a_stop_in_the_last_step_changes_nothing(config: Path, watch: Callable[[TrainerCallback], None]) -> None:
    watch(StopAt(5, "SIGTERM"))
    assert train(config).details["state"] == "finished"


def test_signal_handlers_are_put_back_when_training_raises(
    config: Path, watch: Callable[[TrainerCallback], None]
) -> None:
    class Broken(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("broken")

    before = signal.getsignal(signal.SIGTERM)
    watch(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        train(config)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("writes ")]


def test_a_model_path_that_does_not_exist_is_not_asked_of_a_hub(config: Path, tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), "./nowhere", "a/b/c"):
        with pytest.raises(CheckpointError, match="not found"):
            train(config, [f"model.model_name_or_path={name}", run_in(config, "other")])


def test_a_model_that_lacks_a_weight_is_refused(config: Path, base: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(base, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no model.norm.weight"):
        train(config, [f"model.model_name_or_path={copy}"])


def test_a_run_without_saves_still_ends_with_a_checkpoint(config: Path) -> None:
    report = train(config, ["training.save_strategy='no'"])
    assert (config.parent / "run" / report.details["checkpoint"] / "adapter_model.safetensors").exists()


def test_c4_a_packed_run_trains_and_resumes(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    overrides = ["data.packing=true", "data.max_length=64"]
    with caplog.at_level("INFO", logger="tools"):
        train(config, overrides)
    assert "train: packed into" in caplog.text
    run = config.parent / "run"
    forget_after(run, 4)
    train(config, overrides)
    assert_same(run / "checkpoint-6", run / "gone-checkpoint-6")


def test_c3_the_template_of_a_run_is_saved_with_its_checkpoints(config: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "yes"}]}
        for row in ROWS
    ]
    (config.parent / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        CheckpointError, match=r"sft\.jsonl:1: has messages, but the tokenizer has no chat template; set"
    ):
        train(config)
    train(config, ["data.template=chatml", "max_steps=2"])
    saved = AutoTokenizer.from_pretrained(config.parent / "run" / "checkpoint-2")
    assert "<|im_start|>" in saved.apply_chat_template(rows[0]["messages"], tokenize=False)


def test_rows_longer_than_the_model_are_refused_before_training(config: Path, base: Path) -> None:
    short = Path(shutil.copytree(base, config.parent / "short"))
    written = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**written, "max_position_embeddings": 12}))
    with pytest.raises(CheckpointError, match=r"sft\.jsonl:\d+: has \d\d tokens, but the model has 12 positions"):
        train(config, [f"model_name_or_path={short}"])
    assert not (config.parent / "run" / ".burnish" / "train.json").exists()
