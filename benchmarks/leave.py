"""A callback that ends the process when the first step begins, so that its time is that from command to first step."""

import os
from typing import Any

from transformers import TrainerCallback


class LeaveAtFirstStep(TrainerCallback):
    """Exit code 0 at once, without a save."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        os._exit(0)
