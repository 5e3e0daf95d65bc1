# ruff: noqa: TID253 - imported only when packed rows are trained
"""Packed rows kept apart: by their positions, which is tried on a few tokens before training starts."""

from typing import Any

import torch

from tools.checkpoint.errors import CheckpointError
from tools.training.document_attention import use_document_attention

_LENGTH = 8


def isolate(model: Any) -> bool:
    """Let the model tell packed rows apart by their positions while it trains, and make sure that it does.

    transformers builds the mask of packed rows from `position_ids` where there is neither `attention_mask` nor cache:
    the mask of the batch, by which the trainer counts tokens, is kept from the model. Returns whether it takes all rows
    of a batch in one sequence. Raises CheckpointError naming a model in which a row sees its neighbour or reads
    otherwise than alone: recurrent ones, and those without positions.
    """
    takes_one = use_document_attention(model) or "flash" in (model.config._attn_implementation or "")
    check(model)
    model.register_forward_pre_hook(_by_positions, with_kwargs=True)
    return takes_one


def _by_positions(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if not model.training or "position_ids" not in kwargs:
        return args, kwargs
    return args, {**kwargs, "attention_mask": None, "use_cache": False}


def check(model: Any) -> None:
    """Raise CheckpointError unless a row's logits are, behind any neighbour, those that it has alone."""
    name = type(getattr(model, "get_base_model", lambda: model)()).__name__
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers are left alone
    tokens = torch.randint(vocabulary, (3, _LENGTH), generator=generator).to(model.device)
    first, second, row = tokens
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = _last(model, row)
            after = [_last(model, neighbour, row) for neighbour in (first, second)]
    except (TypeError, ValueError) as error:
        raise _refused(name, f"does not take positions ({error})") from error
    finally:
        model.train(was_training)
    tolerance = torch.finfo(alone.dtype).eps ** 0.5 * alone.abs().max()  # rounding, through all the layers
    if (after[0] - after[1]).abs().max() > tolerance:
        raise _refused(name, "lets a packed row see its neighbour")
    if (after[0] - alone).abs().max() > tolerance:
        raise _refused(name, "reads a packed row otherwise than alone")


def _last(model: Any, *rows: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocabulary] of the last of these packed rows."""
    positions = torch.cat([torch.arange(len(row), device=row.device) for row in rows])
    logits = model(input_ids=torch.cat(rows)[None], position_ids=positions[None], use_cache=False).logits
    last: torch.Tensor = logits[0, -len(rows[-1]) :]
    return last


def _refused(name: str, problem: str) -> CheckpointError:
    return CheckpointError("data.packing", f"{name} {problem}", "train it with data.packing=false")
