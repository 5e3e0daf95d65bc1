# ruff: noqa: TID253 - imported only by callers that have torch loaded
"""A checkpoint whose value head was split out, put back into the live model that was saved there."""

from pathlib import Path

import torch
from torch import nn

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.heads.wrappers import bare_names
from tools.training.stored_head import read, stored_heads

_OF_THIS_RUN = "is it a checkpoint of this run?"


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
def restore_valuehead_checkpoint(model: nn.Module, folder: Path) -> None:
    """Load decoder or adapter, and the value head, into the model in place, whichever wrappers its names are in.

    The model may be any module that holds a causal LM, plain or under PEFT, and a head. Raises CheckpointError when the
    checkpoint holds a tensor that the model has not, or lacks one that it has.
    """
    checkpoint = Checkpoint.open(folder)
    if not stored_heads(checkpoint):
        raise CheckpointError(folder, "no value head, neither in a file of its own nor in the weights", _OF_THIS_RUN)
    live = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    by_bare = {bare: live[name] for name, bare in bare_names(live).items()}
    files = [weights for weights in (checkpoint.model, checkpoint.head) if weights]
    stored = {bare: weights for weights in files for bare in bare_names(weights.tensors).values()}
    if foreign := sorted(stored.keys() - by_bare.keys()):
        raise CheckpointError(folder, f"{foreign[0]} is not of this model", _OF_THIS_RUN)
    loaded = {by_bare[bare].data_ptr() for bare in stored}  # a tied tensor is saved under one of its names
    missing = [name for name, parameter in model.named_parameters() if parameter.data_ptr() not in loaded]
    if missing and checkpoint.adapter is None:
        raise CheckpointError(folder, f"no {missing[0]}", _OF_THIS_RUN)
    for weights in files:
        names = bare_names(weights.tensors)
        for name, tensor in read(weights, names).items():
            by_bare[names[name]].copy_(tensor)
    if checkpoint.adapter:
        _load_adapter(model, folder)


def _load_adapter(model: nn.Module, folder: Path) -> None:
    from peft import PeftModel

    adapted = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    if adapted is None:
        raise CheckpointError(folder, "holds an adapter, and the model has none", _OF_THIS_RUN)
    adapted.load_adapter(str(folder), adapted.active_adapters[0], is_trainable=True)
