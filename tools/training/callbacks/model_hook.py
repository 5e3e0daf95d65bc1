# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""ModelHookCallback: a model that wants to know of each step is told."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from transformers import TrainerCallback


@runtime_checkable
class HasStepHook(Protocol):
    """A model with a method `on_step_end(step, logs)`."""

    def on_step_end(self, step: int, logs: Mapping[str, Any]) -> None:
        """`step` steps are done; `logs` are the newest metrics, and its `step` says of which step they are."""


class ModelHookCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Calls the model's own `on_step_end(step, logs)` after each step, if it has one, also inside an adapter, a value
    head or a wrapper for several processes. Other models are left alone."""

    def __init__(self) -> None:
        self._hooked: HasStepHook | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._hooked = next((module for module in model.modules() if isinstance(module, HasStepHook)), None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._hooked is not None:
            self._hooked.on_step_end(state.global_step, dict(state.log_history[-1]) if state.log_history else {})
