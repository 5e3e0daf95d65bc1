"""Whether what an adapter brings has a place in the base: shapes, rows of tokens, one change of each tensor."""

from collections import Counter
from collections.abc import Iterable, Mapping

from tools.checkpoint.change import Stored
from tools.checkpoint.errors import CheckpointError
from tools.lora.adapters import EMBEDDINGS, OUTPUT_MATRICES
from tools.merging.adapter import Adapter
from tools.merging.base import Base

# The head of a classifier that was trained beside the adapter; the base of a causal LM has none.
CLASSIFIER_HEADS = ("score.", "classifier.")

_WHICH_BASE = "is it the base that the adapter was trained on?"


def require_shapes(adapter: Adapter, base: Base, weights: Mapping[str, Stored], saved: Mapping[str, Stored]) -> None:
    """Raise CheckpointError for a tensor that the base lacks or has in another shape; tokens and labels may be more."""
    require_there(adapter, base, weights, saved)
    for name, source in saved.items():
        now, before = source.shape, weights[name].shape
        if _has_rows(name) and len(now) == len(before):
            now, before = now[1:], before[1:]
        if now != before:
            raise _misfit(adapter, base, source, weights[name])


def require_there(adapter: Adapter, base: Base, weights: Mapping[str, Stored], names: Iterable[str]) -> None:
    """Raise CheckpointError with the first of these names that the base does not have."""
    if name := next((name for name in names if name not in weights), None):
        raise CheckpointError(adapter.checkpoint.path, f"brings {name}, which {base.path} does not have", _WHICH_BASE)


def require_rows(
    adapter: Adapter, base: Base, weights: Mapping[str, Stored], tokens: Mapping[str, tuple[tuple[int, ...], Stored]]
) -> None:
    """Raise CheckpointError unless each token has one row in the adapter, and one of the same width in the base."""
    require_there(adapter, base, weights, tokens)
    for name, (indices, rows) in tokens.items():
        held = weights[name]
        if rows.shape[1:] != held.shape[1:]:
            raise _misfit(adapter, base, rows, held)
        if len(indices) != rows.shape[0]:
            problem = f"{rows.name} has {rows.shape[0]} rows, trainable_token_indices names {len(indices)} tokens"
            raise CheckpointError(adapter.checkpoint.path, problem, "save the adapter again")
        if (beyond := next((index for index in indices if not 0 <= index < held.shape[0]), None)) is not None:
            problem = f"trains token {beyond}, and {name} of {base.path} has {held.shape[0]} rows"
            raise CheckpointError(adapter.checkpoint.path, problem, "save the adapter with save_embedding_layers=True")


def require_one_change(adapter: Adapter, *kinds: Iterable[str]) -> None:
    """Raise CheckpointError for a tensor that is changed in more than one way: which comes first is not known here."""
    counts = Counter(name for names in kinds for name in names)
    if name := next((name for name, count in counts.items() if count > 1), None):
        problem = f"changes {name} in two ways (LoRA, modules_to_save, trainable_token_indices)"
        raise CheckpointError(adapter.checkpoint.path, problem, "use it as an adapter; it cannot be merged")


def _has_rows(name: str) -> bool:
    """Whether the first dimension is the vocabulary, or the labels of a classifier."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return name.startswith(CLASSIFIER_HEADS) or module in (*EMBEDDINGS, *OUTPUT_MATRICES)


def _misfit(adapter: Adapter, base: Base, source: Stored, held: Stored) -> CheckpointError:
    problem = f"{source.name} is {list(source.shape)}, {held.name} of {base.path} {list(held.shape)}"
    return CheckpointError(adapter.checkpoint.path, problem, _WHICH_BASE)
