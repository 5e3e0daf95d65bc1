"""SamplesCallback: answers to fixed prompts are kept, and training does not notice."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from characters import save_llama
from runs import assert_same, forget_after, reward, rows, run_in
from tiny_trainer import plain_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.training.callbacks import SamplesCallback, StopCallback
from tools.training.callbacks.samples import generate, undisturbed
from tools.training.state import TrainingStopped
from tools.training.train import train

ASKED = ["report.samples=['what is 3', 'what']", "report.samples_every=2", "generating.max_new_tokens=5"]
DRAWN = ["generating.do_sample=true", "generating.temperature=0.7"]


def test_b2_training_with_samples_equals_training_without_bit_for_bit(config: Path) -> None:
    train(config, [run_in(config, "without")])
    train(config, [*ASKED, *DRAWN])
    for step in (2, 4, 6):
        ours, theirs = (config.parent / name / f"checkpoint-{step}" for name in ("run", "without"))
        assert_same(ours, theirs)
        one, other = (torch.load(folder / "rng_state.pth", weights_only=False) for folder in (ours, theirs))
        assert torch.equal(one["cpu"], other["cpu"])
    losses = [[row["loss"] for row in rows(config.parent / name) if "loss" in row] for name in ("run", "without")]
    assert losses[0] == losses[1]


def test_b2_samples_have_step_epoch_and_prompt_and_end_in_a_table(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="tools"):
        train(config, ASKED)
    written = rows(config.parent / "run", "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in written] == [
        (step, prompt) for step in (0, 2, 4, 6) for prompt in ("what is 3", "what")
    ]
    assert written[0]["epoch"] == 0
    assert written[-1]["epoch"] == 1
    table = next(record.message for record in caplog.records if record.message.startswith("prompt"))
    heading, *lines = table.splitlines()
    assert heading.split() == ["prompt", "|", "before", "|", "after"]
    assert lines[0].startswith("what is 3")
    assert len(lines) == 2


def test_b2_an_answer_depends_on_the_model_alone(base: Path) -> None:
    """Neither on what was drawn before, nor on the longer prompt beside it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    settings = {"max_new_tokens": 8, "do_sample": True, "top_k": 50, "top_p": 1.0, "temperature": 1.0}
    answers = []
    for _ in range(2):
        torch.rand(7)
        with undisturbed(model, seed=3):
            answers.append(generate(model, tokenizer, ["what is 3", "a"], settings))
    assert answers[0] == answers[1]
    plain = {"max_new_tokens": 8, "do_sample": False}
    alone = generate(model, tokenizer, ["a"], plain)
    assert generate(model, tokenizer, ["a much longer prompt", "a"], plain)[1:] == alone


def test_b2_every_module_returns_to_the_mode_it_was_in(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base).train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    with contextlib.suppress(KeyboardInterrupt), undisturbed(model, seed=3):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        raise KeyboardInterrupt
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_b2_samples_every_epoch_in_a_plain_trainer(tmp_path: Path) -> None:
    save_llama(tmp_path, tied=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    samples = SamplesCallback(["a"], {"max_new_tokens": 3, "do_sample": False})
    epochs = {"max_steps": -1, "num_train_epochs": 2}
    plain_trainer(tmp_path / "run", samples, model=model, tokenizer=tokenizer, **epochs).train()
    assert [(row["step"], row["epoch"]) for row in rows(tmp_path / "run", "samples.jsonl")] == [(0, 0), (6, 1), (12, 2)]


def test_b2_a_prompt_is_a_turn_where_there_is_a_chat_template(base: Path) -> None:
    class Seen(Exception):
        pass

    class Listening:
        device = torch.device("cpu")

        def generate(self, input_ids: torch.Tensor, **_: Any) -> None:
            raise Seen(tokenizer.decode(input_ids[0]).replace(" ", ""))

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}>"
    with pytest.raises(Seen, match=r"^\[user:hi\]>$"):
        generate(Listening(), tokenizer, ["hi"], {})


def test_b2_a_resumed_run_goes_on_with_its_samples(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(config, ASKED)
    run = config.parent / "run"
    before = rows(run, "samples.jsonl")
    forget_after(run, 4)
    train(config, ASKED)
    assert rows(run, "samples.jsonl") == before
    (beyond,) = run.glob("samples.jsonl.beyond-step-4.*")
    assert [json.loads(line)["step"] for line in beyond.read_text().splitlines()] == [6, 6]


def test_b2_who_asks_to_stop_does_not_wait_for_samples(config: Path, watch: Callable[[TrainerCallback], None]) -> None:
    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                (Path(args.output_dir) / "stop").touch()

    watch(Stop())
    with pytest.raises(TrainingStopped, match="stopped at step 3"):
        train(config, [ASKED[0], "generating.max_new_tokens=5"])
    assert {row["step"] for row in rows(config.parent / "run", "samples.jsonl")} == {0}


def test_b2_only_the_main_process_answers(tmp_path: Path) -> None:
    class Other(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.is_world_process_zero = False

    samples = SamplesCallback(["a"], {"max_new_tokens": 3}, 1, StopCallback())
    plain_trainer(tmp_path, Other(), samples).train()  # it has no tokenizer, so an answer would raise
    assert not (tmp_path / "samples.jsonl").exists()


def test_b2_a_reward_model_writes_no_samples(config: Path) -> None:
    with pytest.raises(CheckpointError, match=r"report.samples are texts, and a reward model writes none"):
        train(config, [*ASKED, *reward(config)])
