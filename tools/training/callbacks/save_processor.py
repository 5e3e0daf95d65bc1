# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""SaveProcessorCallback: the tokenizer and processor beside every checkpoint and the final model."""

from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback


class Processor(Protocol):
    """A processor, tokenizer, image processor or feature extractor of transformers."""

    def save_pretrained(self, save_directory: Any) -> Any: ...


class SaveProcessorCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Writes all files of the processor, its tokenizer among them, into each checkpoint when it is saved and into the
    output directory when training ends, on the main process."""

    def __init__(self, processor: Processor):
        self.processor = processor

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.processor.save_pretrained(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.processor.save_pretrained(Path(args.output_dir))
