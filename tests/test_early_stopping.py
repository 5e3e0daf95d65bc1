"""Early stopping: it ends with the best model, evaluates and saves in step, and survives a resume."""

import json
from pathlib import Path

import pytest
from runs import assert_same, forget_after, reward

from tools.checkpoint.errors import CheckpointError
from tools.training import state
from tools.training.train import train


@pytest.fixture
def worse(config: Path) -> list[str]:
    """A run of which each evaluation counts as worse than the one before: it ends after three of them."""
    best = ["training.metric_for_best_model=loss", "training.greater_is_better=true"]
    patience = ["finetuning.early_stopping_patience=2", "max_steps=20"]
    return [f"data.eval_file={config.parent / 'sft.jsonl'}", *patience, *best]


def evaluated(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "train_log.jsonl").read_text().splitlines()]
    return [row["current_steps"] for row in rows if row.get("eval_loss") is not None]


def test_b3_a_run_that_gets_worse_ends_with_its_best_model(config: Path, worse: list[str]) -> None:
    report = train(config, worse)
    run = config.parent / "run"
    assert (report.details["state"], report.details["steps"]) == ("finished", 6)
    assert report.details["checkpoint"] == "checkpoint-2"
    assert evaluated(run) == [2, 4, 6]  # as often as it saves
    assert not train(config, worse).changed


def test_b3_a_resumed_run_goes_on_counting(config: Path, worse: list[str]) -> None:
    train(config, worse)
    run = config.parent / "run"
    forget_after(run, 4)
    assert train(config, worse).details["steps"] == 6
    assert_same(run / "checkpoint-6", run / "gone-checkpoint-6")


def test_b3_a_run_killed_after_it_lost_patience_is_over(config: Path, worse: list[str]) -> None:
    train(config, worse)
    run = config.parent / "run"
    forget_after(run, 6)
    assert not train(config, worse).changed
    assert state.read_state(run).state == "finished"
    assert state.read_state(run).checkpoint == "checkpoint-2"


def test_b3_a_reward_model_stops_early_too(config: Path) -> None:
    pairs = [*reward(config), f"data.eval_file={config.parent / 'pairs.jsonl'}"]
    patience = ["finetuning.early_stopping_patience=1", "finetuning.early_stopping_threshold=100"]
    report = train(config, [*pairs, *patience, "max_steps=8"])
    assert (report.details["steps"], report.details["checkpoint"]) == (4, "checkpoint-4")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.eval_file=null"], "finetuning.early_stopping_patience waits for evaluations"),
        (["training.load_best_model_at_end=false"], "training.load_best_model_at_end does not go with"),
        (["training.save_strategy='no'"], "training.save_strategy does not go with"),
        (["training.eval_strategy=epoch", "training.save_strategy=steps"], "make them the same"),
        (["training.eval_steps=3"], "multiple of"),
    ],
)
def test_b3_what_does_not_fit_is_said_before_anything_is_loaded(
    config: Path, worse: list[str], overrides: list[str], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        train(config, [*worse, *overrides])
    assert not (config.parent / "run" / ".burnish" / "train.json").exists()
