"""The stages of training: the name of each, and the module that defines it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

STAGES = {
    "sft": "tools.training.stages.sft",
    "reward": "tools.training.stages.reward",
}


class Stage(Protocol):
    """What the module of a stage defines.

    `ARGUMENTS` is its config class, and `DEFAULTS` what Burnish sets in it whatever the user wrote;
    `load_rows(data, tokenizer, split)` gives a `Tokenised`, read from one file of `data`; `load_decoder(model, dtype)`
    loads the decoder; `build_model(decoder, model)` completes it once it is prepared, with or without adapter;
    `build_trainer(model, ...)` gives the trainer, ready to run.
    """

    ARGUMENTS: type
    DEFAULTS: Mapping[str, Any]
    load_rows: Callable[..., Any]
    load_decoder: Callable[..., Any]
    build_model: Callable[..., Any]

    def build_trainer(
        self, model: Any, args: Any, train_rows: Any, eval_rows: Any, tokenizer: Any, callbacks: Sequence[Any]
    ) -> Any: ...


def load_stage(name: str) -> Stage:
    """Import the module of one stage of the table."""
    from importlib import import_module

    return cast(Stage, import_module(STAGES[name]))
