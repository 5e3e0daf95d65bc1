# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""MemoryCallback: what each step holds, to find what grows; and how memory is read."""

from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from tools.training.callbacks.json_lines import JsonLines, start

MEMORY_FILE = "memory.jsonl"
GIB = 2**30
_PROCESS = psutil.Process()


def memory() -> dict[str, float]:
    """`vram_allocated` and `vram_reserved` of this process on CUDA, elsewhere its resident memory `rss`, in GiB."""
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return {"vram_allocated": round(allocated / GIB, 3), "vram_reserved": round(reserved / GIB, 3)}
    return {"rss": round(_PROCESS.memory_info().rss / GIB, 3)}


class MemoryCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Writes `memory.jsonl` in the output directory: two rows a step, with gradients (`at: gradients`) and after the
    update (`at: end`), each with `step` and GiB as in the log."""

    def __init__(self) -> None:
        self._rows: JsonLines | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()
        if state.is_world_process_zero:
            path = Path(args.output_dir) / MEMORY_FILE
            start(path, state.global_step, "step")
            self._rows = JsonLines(path)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._write("gradients", state.global_step + 1)  # the Trainer counts a step when it is over

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._write("end", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Wait until every row is written."""
        if self._rows:
            self._rows.close()
            self._rows = None

    def _write(self, at: str, step: int) -> None:
        if self._rows:
            self._rows.write({"step": step, "at": at, **memory()})
