"""Preview: what it shows is what training then does."""

import json
import os
from pathlib import Path

import pytest
from characters import save_llama, write_run
from typer.testing import CliRunner

from tools.checkpoint.errors import CheckpointError
from tools.cli import app
from tools.training.collate import RowCollator
from tools.training.preview import preview
from tools.training.train import train


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "base", tied=True)


@pytest.fixture
def config(base: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, base)


@pytest.fixture
def seen(monkeypatch):
    """Every batch that the collator of a stage makes."""
    batches = []
    collate = RowCollator.__call__

    def spy(self, rows):
        batches.append(collate(self, rows))
        return batches[-1]

    monkeypatch.setattr(RowCollator, "__call__", spy)
    return batches


def test_c10_the_batches_are_those_that_training_gets(config, seen):
    shown = preview(config, batches=2).details["batches"]
    assert [batch["tensors"]["input_ids"] for batch in shown] == [["int64", *b["input_ids"].shape] for b in seen[:2]]
    previewed, seen[:] = [batch["input_ids"].tolist() for batch in seen[:2]], []
    train(config)
    assert [batch["input_ids"].tolist() for batch in seen[:2]] == previewed


def test_c10_a_row_is_shown_as_text_with_what_is_masked(config):
    report = preview(config)
    (batch,) = report.details["batches"]
    for row in batch["rows"]:
        (asked, learnt_of_asked), (answer, learnt_of_answer) = row["pieces"]
        assert asked.replace(" ", "").startswith("whatis")
        assert (learnt_of_asked, learnt_of_answer) == (False, True)
        assert answer.replace(" ", "").startswith("itis")
        assert answer.endswith("<eos>")
        assert row["learnt"] < row["tokens"]
    assert not report.changed


def test_c10_what_is_trained_is_listed_with_counts_and_dtypes(config):
    details = preview(config, ["target_modules=[q_proj]", "dtype=bfloat16"]).details
    lines = {line["name"]: line for line in details["parameters"]}
    adapter = lines["model.layers.*.self_attn.q_proj.lora_A.weight"]
    assert (adapter["tensors"], adapter["shape"], adapter["parameters"]) == (2, (2, 16), 64)
    assert adapter["requires_grad"]
    frozen = lines["model.layers.*.self_attn.q_proj.weight"]
    assert (frozen["requires_grad"], frozen["dtype"]) == (False, "bfloat16")
    assert "adapters on q_proj" in details["trained"]


def test_c10_steps_and_memory_are_estimated(config):
    by_steps = preview(config).details
    assert (by_steps["steps"], by_steps["rows"]) == (4, 24)
    by_epochs = preview(config, ["max_steps=-1", "num_train_epochs=2", "gradient_accumulation_steps=3"]).details
    assert by_epochs["steps"] == 8  # 24 rows, 2 a batch, 3 batches a step, twice
    full = preview(config, ["method=full"]).details
    assert full["memory_bytes"]["weights"] == sum(line["parameters"] for line in full["parameters"]) * 4
    assert full["memory_bytes"]["optimizer"] == 2 * full["memory_bytes"]["gradients"]
    assert by_steps["memory_bytes"]["optimizer"] < full["memory_bytes"]["optimizer"]


def test_c10_pairs_are_shown_as_the_reward_model_sees_them(config):
    pairs = [{"prompt": f"{n} and", "chosen": f" yes {n}", "rejected": f" no {n}!"} for n in range(8)]
    file = config.parent / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    details = preview(config, ["finetuning.stage=reward", f"train_file={file}"]).details
    (batch,) = details["batches"]
    assert len(batch["rows"]) == 4  # two pairs
    assert any(line["name"] == "v_head.summary.weight" for line in details["parameters"])


def test_c10_nothing_is_written(config):
    preview(config, ["init_lora_weights=pissa"])
    assert not (config.parent / "run").exists()


def test_c10_what_training_would_refuse_is_refused(config):
    with pytest.raises(CheckpointError, match="the model has no layer c_attn"):
        preview(config, ["target_modules=[c_attn]"])
    with pytest.raises(CheckpointError, match="--batches: must be at least 1, not 0"):
        preview(config, batches=0)


def test_c10_the_command_marks_what_is_masked_where_there_is_no_terminal(config):
    shown = CliRunner().invoke(app, ["preview", str(config), "--batches", "1"], env=os.environ | {"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert "«w h a t" in shown.output
    assert "  trained model.layers.*.self_attn.q_proj.lora_A.weight" in shown.output
    assert "4 steps of 2 rows" in shown.output
    as_json = CliRunner().invoke(app, ["preview", str(config), "--json"])
    assert json.loads(as_json.stdout)["details"]["steps"] == 4


def test_b3_the_best_model_is_loaded_with_only_one_strategy_given(config):
    """Evaluated every second step, so saved every second step."""
    best = [
        "load_best_model_at_end=true",
        "eval_strategy=steps",
        "eval_steps=2",
        f"eval_file={config.parent}/rows.jsonl",
    ]
    written = json.loads(config.read_text())
    del written["training"]["save_steps"]
    config.write_text(json.dumps(written))
    report = train(config, best)
    run = config.parent / "run"
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    state = json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).name == report.details["checkpoint"]
