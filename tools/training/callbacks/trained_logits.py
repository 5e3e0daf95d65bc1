# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""TrainedLogitsCallback: what the model in memory answers, kept in each checkpoint for later proof."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

LOGITS_FILE = Path(".burnish") / "trained_logits.safetensors"


class TrainedLogitsCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """At each save, writes the logits of the live model on fixed token rows to `.burnish/trained_logits.safetensors` in
    the checkpoint, so that what is loaded or converted from it can be compared with what was trained. A decoder without
    lm_head, as under the head of a classifier, has none to write."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        from tools import logits
        from tools.training.value_head import ValueHeadModel

        decoder = model.decoder if isinstance(model, ValueHeadModel) else model
        if state.is_world_process_zero and decoder.get_output_embeddings() is not None:
            logits.save(decoder, Path(args.output_dir) / f"checkpoint-{state.global_step}" / LOGITS_FILE)
