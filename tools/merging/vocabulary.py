"""The vocabulary of a merged model: embedding, output matrix and tokenizer must agree on its size."""

from collections.abc import Mapping

from tools.checkpoint.change import Source
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.merging.base import Base, is_head


def require_vocabulary(base: Base, adapter: Checkpoint, tensors: Mapping[str, Source]) -> None:
    """Raise CheckpointError when the output matrix or the adapter's tokenizer has other tokens than the embedding."""
    if base.embedding is None:
        return
    rows = tensors[base.embedding].shape[0]
    for name, source in tensors.items():
        if is_head(name) and source.shape[0] != rows:
            problem = f"{name} would have {source.shape[0]} rows, {base.embedding} {rows}"
            raise CheckpointError(adapter.path, problem, "the adapter must hold both, or neither; save it again")
    tokens = _tokens(adapter)
    if tokens > rows:
        problem = f"its tokenizer has {tokens} tokens, and {base.embedding} of {base.path} has {rows} rows"
        raise CheckpointError(adapter.path, problem, "save the adapter with save_embedding_layers=True")


def _tokens(adapter: Checkpoint) -> int:
    """One more than the greatest token id of the adapter's own tokenizer.json; 0 where there is none."""
    tokenizer = adapter.read_json("tokenizer.json")
    if not isinstance(tokenizer, dict):
        return 0
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    # A map from tokens to ids, or (unigram) a list by id.
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [token.get("id", 0) for token in tokenizer.get("added_tokens") or ()]
    return max((number for number in ids if isinstance(number, int)), default=-1) + 1
