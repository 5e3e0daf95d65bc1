# ruff: noqa: TID253 - imported only when packed rows are trained
"""Attention row by row inside a packed sequence: what lies between two rows is masked, and need not be computed."""

from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_by_document"


def use_document_attention(model: Any) -> bool:
    """Let a model on a CPU that attends by sdpa do so row by row, and say whether it does.

    The result is the same. It pays where a kernel computes what the mask then hides; the GPU's kernels for one long
    sequence are faster than a loop.
    """
    inner = getattr(model, "get_base_model", lambda: model)()
    if inner.device.type != "cpu" or inner.config._attn_implementation != "sdpa":
        return bool(inner.config._attn_implementation == NAME)
    AttentionInterface.register(NAME, _by_document)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    inner.set_attn_implementation(NAME)
    return bool(inner.config._attn_implementation == NAME)


def _by_document(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, tokens, size] three times -> [1, tokens, heads, size]; by plain sdpa unless one sequence is packed."""
    bounds = _bounds(query, key, position_ids) if options.get("position_bias") is None else []
    if attention_mask is None or len(bounds) < 3:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    parts = []
    for begin, end in pairwise(bounds):
        sides = (side[:, :, begin:end] for side in (query, key, value))
        parts.append(sdpa_attention_forward(module, *sides, attention_mask[..., begin:end, begin:end], **options)[0])
    return torch.cat(parts, dim=1), None


def _bounds(query: torch.Tensor, key: torch.Tensor, position_ids: torch.Tensor | None) -> list[int]:
    """Where rows begin in one packed sequence, and its end; nothing when this is none."""
    tokens = query.shape[2]
    if position_ids is None or position_ids.shape != (1, tokens) or query.shape[0] != 1 or key.shape[2] != tokens:
        return []
    starts: list[int] = (position_ids[0] == 0).nonzero().flatten().tolist()
    return [*starts, tokens] if starts[:1] == [0] else []
