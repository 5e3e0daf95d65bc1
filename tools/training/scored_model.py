"""The model that a stage with a value head starts from: its decoder, and the trained head where it has one."""

import logging
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.hub import local_copy
from tools.training import decoder as scored_decoder
from tools.training import model as causal
from tools.training.config import ModelArguments
from tools.training.stored_head import StoredHead, choose, stored_heads
from tools.training.value_head import ValueHeadModel, module_of

logger = logging.getLogger(__name__)

NEW = "new"
_CHOICE = f"choose with model.value_head, or start one with model.value_head={NEW}"


def load_decoder(model: ModelArguments, dtype: str) -> Any:
    """The decoder of any checkpoint with a value head, and else the causal LM, every weight of it found.

    Raises CheckpointError for an adapter with a head: training would put a second adapter on it.
    """
    _trained_head(model)  # so that what is refused is so before a run begins
    checkpoint = _local(model)
    heads = stored_heads(checkpoint) if checkpoint else ()
    if checkpoint is None or not heads:
        return causal.load_decoder(model, dtype)
    if checkpoint.kind == "adapter":
        problem = "an adapter with a value head, and training starts from a whole model"
        raise CheckpointError(checkpoint.path, problem, "merge it first: tools merge-adapter")
    settings = {
        "dtype": dtype,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
    }
    return scored_decoder.load_decoder(checkpoint, heads, None, settings)


def with_head(decoder: Any, model: ModelArguments) -> ValueHeadModel:
    """The decoder with the head that its checkpoint has, else with a new one; the log says which.

    `model.value_head` chooses among several heads, and `new` leaves them all behind. Raises CheckpointError where it
    cannot be told which head is the head: a trained one is never replaced unasked.
    """
    head = _trained_head(model)
    if head is None:
        logger.info("%s: a new value head", model.model_name_or_path)
        return ValueHeadModel(decoder)
    logger.info("%s: goes on from its value head, %s", model.model_name_or_path, head)
    return ValueHeadModel(decoder, module_of(head))


def _trained_head(model: ModelArguments) -> StoredHead | None:
    checkpoint, wanted = _local(model), model.value_head
    if checkpoint is None or wanted == NEW:
        return None
    head = choose(checkpoint, wanted, _CHOICE)
    if wanted and head is None:
        raise CheckpointError(checkpoint.path, f"no value head called {wanted}", "see tools inspect")
    return head


def _local(model: ModelArguments) -> Checkpoint | None:
    """The checkpoint on this machine; None for a name on the hub that was never loaded here."""
    folder = local_copy(Path(causal.source_of(model.model_name_or_path)))
    return Checkpoint.open(folder) if folder else None
