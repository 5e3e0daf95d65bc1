"""Whether embedding and output matrix of a merged model are one, as they were for the adapter when it was trained."""

from collections.abc import Sequence

from tools.checkpoint.change import Stored, same_bytes
from tools.checkpoint.errors import CheckpointError
from tools.lora.base_config import is_tied, says_tied
from tools.merging.adapter import Adapter
from tools.merging.base import Base, is_head
from tools.merging.parameters import Parameters, Rows


def output_matrix(base: Base, parameters: Parameters, adapters: Sequence[Adapter]) -> tuple[str | None, Stored | None]:
    """The name of an output matrix that a tied model gets as its own, and the tensor it starts from.

    The name is None where there is none to add: nothing was tied, or it still is. Then a tensor without a name is the
    copy of the embedding in the files, which would be stale and goes. Raises CheckpointError for tokens that PEFT 0.21
    trains in both, in one of them below LoRA.
    """
    embedding, copy = base.embedding, _copy(base)
    if embedding is None or not (copy or (base.head is None and is_tied(base.config))):
        return None, None
    head = base.head or next((name for name in sorted(parameters.touched) if is_head(name)), "lm_head.weight")
    if not parameters.touched & {embedding, head}:
        return None, None
    if head in parameters.low_rank and embedding in parameters.tokens:
        problem = f"trains tokens of {embedding} and LoRA of {head}, which is tied to it"
        raise CheckpointError(adapters[0].checkpoint.path, problem, "use it as an adapter; it cannot be merged")
    if _stay_one(embedding, head, parameters, adapters):
        return None, copy
    return head, parameters.weights.get(head, parameters.weights[embedding])


def _copy(base: Base) -> Stored | None:
    """The output matrix in the files of a base that says it is tied; None when it has other values all the same."""
    if base.head is None or base.embedding is None or says_tied(base.config) is not True:
        return None
    head, embedding = base.tensors[base.head], base.tensors[base.embedding]
    return head if same_bytes(head, embedding) else None


def _stay_one(embedding: str, head: str, parameters: Parameters, adapters: Sequence[Adapter]) -> bool:
    """PEFT 0.21 adapts one of two tied modules alone, unless `ensure_weight_tying` says otherwise.

    Rows of single tokens always go to both, and so does what a resized vocabulary makes it save.
    """
    if any(adapter.ties for adapter in adapters):
        return True
    if head in parameters.low_rank or embedding in parameters.low_rank:
        return False
    if head in parameters.tokens:
        return embedding in parameters.tokens and _same_rows(parameters.tokens[embedding], parameters.tokens[head])
    saved = [parameters.saved[name] for name in (embedding, head) if name in parameters.saved]
    if len(saved) == 2:
        return same_bytes(*saved)
    return head not in parameters.saved and not any(
        adapter.saves(embedding.removesuffix(".weight")) for adapter in adapters
    )


def _same_rows(one: Rows, other: Rows) -> bool:
    return one[0] == other[0] and same_bytes(one[1], other[1])
