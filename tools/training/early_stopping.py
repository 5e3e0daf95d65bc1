"""Early stopping: evaluation, saving and the best model kept in step, and what a checkpoint says of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.training.config import TrainConfig


def in_step(config: TrainConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments of the Trainer need besides `arguments`, so that early stopping works.

    Saving follows evaluation or evaluation saving, whichever is given; the best model is loaded at the end. Raises
    CheckpointError when there is nothing to evaluate on, and when both are given and do not fit together.
    """
    if config.finetuning.early_stopping_patience is None:
        return {}
    key = "finetuning.early_stopping_patience"
    if config.data.eval_file is None:
        raise CheckpointError(key, "there is nothing to evaluate on", "give data.eval_file")
    given = {name: arguments[name] for name in ("eval_strategy", "save_strategy") if name in arguments}
    plain = {name: getattr(value, "value", value) for name, value in given.items()}
    if "no" in plain.values() or len(set(plain.values()) - {"best"}) > 1:
        said = " and ".join(f"training.{name}={value}" for name, value in plain.items())
        raise CheckpointError(key, f"does not fit {said}", "evaluate and save at the same steps or epochs")
    strategy = next((value for value in plain.values() if value != "best"), "steps")
    steps = next((arguments[name] for name in ("eval_steps", "save_steps") if name in arguments), None)
    found: dict[str, Any] = {"eval_strategy": strategy, "save_strategy": strategy, "load_best_model_at_end": True}
    found |= {"metric_for_best_model": "loss", "restore_callback_states_from_checkpoint": True}
    return found | ({} if steps is None else {"eval_steps": steps, "save_steps": steps})


def has_ended(checkpoint: Path) -> bool:
    """Whether training had run out of patience when it saved this checkpoint."""
    written = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    state = written.get("stateful_callbacks", {}).get("EarlyStoppingCallback")
    if not isinstance(state, dict):
        return False
    counted = state["attributes"]["early_stopping_patience_counter"]
    return bool(counted >= state["args"]["early_stopping_patience"])
