# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""StopCallback: a request from outside ends the training after one last save."""

import logging
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from tools.training.ranks import Peers, peers

logger = logging.getLogger(__name__)

STOP_FILE = "stop"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
BY_FILE = 1000  # beyond the numbers of signals


class StopCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """SIGTERM, SIGINT or a file `stop` in the output directory: the step is finished, a checkpoint saved, and training
    ends as if it were done. `reason` then says what asked for it, and the file is removed.

    The handlers are installed while training runs, in the main thread only; a second signal acts as it would without
    this callback. If training raises, call `close` to put the previous handlers back.

    Several processes stop after the same step, whichever of them was asked; the first looks for the file, and each
    waits for the others for up to `timeout_s`. There it is for the launcher to end those that take too long: any
    further signal is taken for the first one, come by another way.
    """

    def __init__(self, timeout_s: float = 1800) -> None:
        self.timeout_s = timeout_s
        self.reason: str | None = None
        self._asked = 0  # by this signal, which the other processes may not have had
        self._peers: Peers | None = None
        self._saved_step = -1
        self._previous: dict[signal.Signals, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reason, self._asked = None, 0
        self._peers = peers(Path(args.output_dir), self.timeout_s)
        self._saved_step = state.global_step  # what was just loaded needs no second save
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._peers is not None
        file, is_first = Path(args.output_dir) / STOP_FILE, self._peers.rank == 0
        if self.reason is None:
            asked = self._asked or (BY_FILE if is_first and file.exists() else 0)
            asked = self._peers.largest(asked, f"the end of step {state.global_step}")
            if asked:
                self.reason = f"the file {file}" if asked == BY_FILE else signal.Signals(asked).name
        if self.reason is None or control.should_training_stop:
            return
        logger.info("asked to stop by %s: saving step %d", self.reason, state.global_step)
        control.should_training_stop = True
        control.should_save = control.should_save or state.global_step > self._saved_step
        if is_first:
            file.unlink(missing_ok=True)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer ends the epoch early; nothing that belongs to its real end is due."""
        if self.reason and state.epoch % 1:
            control.should_evaluate = False
            control.should_save = state.global_step > self._saved_step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved_step = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Put the previous signal handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        if self._peers is None or self._peers.group is None:
            self.reason = signal.Signals(number).name
            self.close()
