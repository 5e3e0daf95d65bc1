"""Scores of a reward model on fixed tokens, whichever layout it was saved in: what two of them must share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.heads.classifiers import SCORE_BIAS
from tools.heads.finding import architectures_of
from tools.heads.padding import pad_token_id
from tools.logits import LENGTH, fixed_rows, loaded

if TYPE_CHECKING:
    import torch

Scorer = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def largest_difference(one: Path, other: Path) -> float:
    """How far the scores of two reward models lie apart, in float32, on eight rows of tokens padded at either side."""
    import torch

    opened = Checkpoint.open(other)
    pad = pad_token_id(opened)
    vocab_size = (opened.config or {}).get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise CheckpointError(other, f"vocab_size in config.json is {vocab_size}, so there are no tokens to score")
    fixed = fixed_rows(vocab_size)
    rows = [[token for token in row[: LENGTH - i] if token != pad] for i, row in enumerate(fixed)]
    batches = [_padded(rows, pad or 0, left) for left in (False, True)]

    def scores(path: Path) -> "torch.Tensor":
        score = scorer(path)
        with torch.no_grad():
            return torch.cat([score(ids, mask) for ids, mask in batches])

    return float((scores(one) - scores(other)).abs().max())


def scorer(path: Path) -> Scorer:
    """A function from token ids and attention mask, int64 [batch, length], to the score of each row, float32 [batch].

    The score stands at the last token that is no padding, and positions count from the first. The bias that a sequence
    classifier keeps in config.json is added; OpenRLHF's mean and deviation are left out, as classifiers leave them out.
    Raises CheckpointError where transformers does not load it, or would with random weights.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    from tools.training.value_head import at_last_token, positions
    from tools.training.value_head import load as load_value_head

    config = Checkpoint.open(path).config or {}
    names = architectures_of(config)

    def load(auto: Any) -> Any:
        return loaded(auto, path, "a classifier", dtype=torch.float32).eval()

    if any(name.endswith("ForSequenceClassification") for name in names):
        sequence, bias = load(AutoModelForSequenceClassification), config.get(SCORE_BIAS, 0.0)
        return lambda ids, mask: sequence(ids, attention_mask=mask, **positions(sequence, mask)).logits[:, 0] + bias
    if any(name.endswith("ForTokenClassification") for name in names):
        token = load(AutoModelForTokenClassification)

        def score(ids: "torch.Tensor", mask: "torch.Tensor") -> "torch.Tensor":
            return at_last_token(token(ids, attention_mask=mask, **positions(token, mask)).logits[..., 0], mask)

        return score
    return load_value_head(path, normalised=False).float()  # type: ignore[no-any-return]


def _padded(rows: list[list[int]], pad: int, left: bool) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Token ids and attention mask, int64 [rows, longest]."""
    import torch

    longest = max(map(len, rows))
    fill = [[pad] * (longest - len(row)) for row in rows]
    ids = [empty + row if left else row + empty for row, empty in zip(rows, fill, strict=True)]
    ones = [[1] * len(row) for row in rows]
    mask = [[0] * len(e) + o if left else o + [0] * len(e) for o, e in zip(ones, fill, strict=True)]
    return torch.tensor(ids), torch.tensor(mask)
