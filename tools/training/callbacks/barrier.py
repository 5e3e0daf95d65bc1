# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""BarrierCallback: a process that keeps the others waiting ends the training and is named."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tools.training.ranks import Peers, peers


class BarrierCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """All processes of a run meet before training, before each step and after each save. When one does not come within
    `timeout_s`, raises CheckpointError naming the output directory, the process and the step, rather than to hang.

    Callbacks that come earlier in the list are waited for. One process alone waits for nobody.
    """

    def __init__(self, timeout_s: float = 600):
        self.timeout_s = timeout_s
        self._peers: Peers | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._peers = peers(Path(args.output_dir), self.timeout_s)
        self._peers.meet("the start of training")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meet(f"step {state.global_step + 1}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meet(f"the end of the save at step {state.global_step}")

    def _meet(self, where: str) -> None:
        if self._peers is not None:
            self._peers.meet(where)
