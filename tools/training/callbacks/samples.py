# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""SamplesCallback: what the model answers to fixed prompts while it learns."""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.training.callbacks.json_lines import JsonLines, start

if TYPE_CHECKING:
    from tools.training.callbacks.stop import StopCallback

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"
WIDTH = 38  # characters of a cell of the table


class SamplesCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Answers fixed prompts before the first step, every epoch or every N steps, and at the end.

    `samples.jsonl` in the output directory gets a row for each answer, with `step`, `epoch`, `prompt` and `text`; at
    the end a table of first and last answers is logged. `settings` are arguments of `model.generate`. A prompt is a
    user's turn where the tokenizer has a chat template, else plain text.

    Training does not notice: random state and the mode of every module are put back. The draw is seeded by the seed of
    the training arguments, the same each time, so that answers differ only because models do. One process answers; all
    take part where the model is in shards. `stop` says whether somebody outside asked to stop, who is not to wait.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        settings: Mapping[str, Any],
        every: int | Literal["epoch"] = "epoch",
        stop: "StopCallback | None" = None,
    ):
        self.prompts = list(prompts)
        self.settings = dict(settings)
        self.every = every
        self.stop = stop
        self._rows: JsonLines | None = None
        self._sampled_step = -1
        self._first: dict[str, str] = {}
        self._last: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not hasattr(model, "generate"):
            raise CheckpointError("report.samples", "this model writes no text", "leave the samples out")
        self._sampled_step = -1
        path = Path(args.output_dir) / SAMPLES_FILE
        if state.is_world_process_zero:
            self.close()
            start(path, state.global_step, "step")
            self._rows = JsonLines(path)
        if state.global_step == 0:
            self._sample(args, state, model, **kwargs)
        else:
            self._first, self._sampled_step = _first_of(path), state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every != "epoch" and state.global_step % self.every == 0:
            self._sample(args, state, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every == "epoch" and not self._is_stopped():
            self._sample(args, state, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_another = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if not self._is_stopped() and (is_another or state.global_step > self._sampled_step):
            self._sample(args, state, **kwargs)
        self.close()
        if state.is_world_process_zero and self._last:
            logger.info("%s", table(self._first, self._last))

    def close(self) -> None:
        """Wait until every row is written."""
        if self._rows:
            self._rows.close()
            self._rows = None

    def _is_stopped(self) -> bool:
        return self.stop is not None and self.stop.reason is not None

    def _sample(self, args: Any, state: Any, model: Any = None, processing_class: Any = None, **_: Any) -> None:
        self._sampled_step = state.global_step
        if not (state.is_world_process_zero or _is_sharded(model)):
            return
        with undisturbed(model, args.seed):
            texts = generate(model, processing_class, self.prompts, self.settings)
        answers = dict(zip(self.prompts, texts, strict=True))
        self._first = self._first or answers
        self._last = answers
        epoch = None if state.epoch is None else round(state.epoch, 4)
        for prompt, text in answers.items():
            if self._rows:
                self._rows.write({"step": state.global_step, "epoch": epoch, "prompt": prompt, "text": text})


def generate(model: Any, tokenizer: Any, prompts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """What the model writes after each prompt, special tokens left out."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    written = bool(tokenizer.chat_template)
    texts = [_as_turn(tokenizer, prompt) for prompt in prompts] if written else list(prompts)
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=not written).to(
        model.device
    )
    tokens = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        ids = model.generate(**tokens, use_cache=True, pad_token_id=tokenizer.pad_token_id, **settings)
    answers: list[str] = tokenizer.batch_decode(ids[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


@contextlib.contextmanager
def undisturbed(model: Any, seed: int) -> Iterator[None]:
    """The model in evaluation mode and the random state seeded; both are afterwards what they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def table(first: Mapping[str, str], last: Mapping[str, str]) -> str:
    """Prompt, first and last answer side by side, each cut to a line."""
    rows = [("prompt", "before", "after"), *((prompt, first.get(prompt, ""), text) for prompt, text in last.items())]
    cells = [[_cut(" ".join(cell.split())).ljust(WIDTH) for cell in row] for row in rows]
    return "\n".join(" | ".join(row).rstrip() for row in cells)


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _as_turn(tokenizer: Any, prompt: str) -> str:
    turn = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return text


def _is_sharded(model: Any) -> bool:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def _first_of(path: Path) -> dict[str, str]:
    """The answers of step 0 in a file that an earlier start wrote; none without it."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["prompt"]: row["text"] for row in rows if row["step"] == 0}
