"""What the config.json of a base says that an adapter on it depends on."""

from collections.abc import Mapping
from typing import Any

from tools.heads.finding import architectures_of

Config = Mapping[str, Any]

WITH_OUTPUT_MATRIX = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")


def is_tied(config: Config) -> bool:
    """Whether the output matrix of a model without one in its files is the embedding."""
    has_one = any(name.endswith(WITH_OUTPUT_MATRIX) for name in architectures_of(config))
    return has_one and says_tied(config) is not False


def says_tied(config: Config) -> bool | None:
    """`tie_word_embeddings`, None where the file leaves it to the default of its class, which is to tie."""
    text = config.get("text_config") or {}
    flag = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return None if flag is None else bool(flag)
