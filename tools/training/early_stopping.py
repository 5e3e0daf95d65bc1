"""Early stopping: what the Trainer needs for it, and what a checkpoint says of it."""

import json
from pathlib import Path
from typing import Any

from tools.training.config import FinetuningArguments


def needed(finetuning: FinetuningArguments) -> dict[str, Any]:
    """The arguments of the Trainer by which early stopping works, and goes on counting after a resume.

    The best model is loaded at the end; with it, evaluating and saving are kept in step (`config_rules.in_step`).
    """
    if finetuning.early_stopping_patience is None:
        return {}
    kept = {"load_best_model_at_end": True, "restore_callback_states_from_checkpoint": True}
    return {**kept, "metric_for_best_model": "loss"}


def has_ended(checkpoint: Path) -> bool:
    """Whether training had run out of patience when it saved this checkpoint."""
    written = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    state = written.get("stateful_callbacks", {}).get("EarlyStoppingCallback")
    if not isinstance(state, dict):
        return False
    counted = state["attributes"]["early_stopping_patience_counter"]
    return bool(counted >= state["args"]["early_stopping_patience"])
