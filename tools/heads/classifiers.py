"""Classifiers: which classes transformers has for a family of decoders, and what their one linear layer is called.

Only families whose classifier is that layer on the last hidden state, behind the same decoder as the causal LM's
(transformers 5.24). Such a layer with one output is a value head under another name.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError

# The layer of every sequence classifier below; it has no bias.
SEQUENCE_HEAD = "score"
# What config.json keeps of a value head's bias, which a sequence classifier has no place for.
SCORE_BIAS = "score_bias"


@dataclass(frozen=True)
class Family:
    """One `model_type`. `base` is the prefix of its decoder, `token` the layer of its token classifier, with a bias."""

    causal: str
    sequence: str | None
    token_class: str | None
    base: str = "model"
    token: str = "score"
    tied: bool = False  # what config.json means where it does not say tie_word_embeddings

    @property
    def token_head(self) -> frozenset[str]:
        return frozenset({f"{self.token}.weight", f"{self.token}.bias"})

    def is_tied(self, config: Mapping[str, Any]) -> bool:
        """Whether lm_head is the input embedding, and so has no tensor of its own."""
        return bool(config.get("tie_word_embeddings", self.tied))

    def classifier_of(self, head: Set[str]) -> str | None:
        """The classifier whose layer has exactly these tensors."""
        if head == {f"{SEQUENCE_HEAD}.weight"}:
            return self.sequence
        return self.token_class if head == self.token_head else None


def _both(stem: str, **fields: Any) -> Family:
    return Family(f"{stem}ForCausalLM", f"{stem}ForSequenceClassification", f"{stem}ForTokenClassification", **fields)


def _sequence_only(stem: str, **fields: Any) -> Family:
    return Family(f"{stem}ForCausalLM", f"{stem}ForSequenceClassification", None, **fields)


# Decoders from before Llama: `transformer.` and another name for the token classifier's layer.
_OLD: Mapping[str, Any] = {"base": "transformer", "token": "classifier", "tied": True}

FAMILIES: Mapping[str, Family] = {
    "apertus": Family("ApertusForCausalLM", None, "ApertusForTokenClassification"),
    "arcee": _both("Arcee"),
    "bloom": _both("Bloom", **_OLD),
    "deepseek_v2": _sequence_only("DeepseekV2"),
    "deepseek_v3": _both("DeepseekV3"),
    "diffllama": _both("DiffLlama"),
    "doge": _sequence_only("Doge"),
    "exaone4": _both("Exaone4"),
    "falcon": _both("Falcon", **_OLD),
    "gemma": _both("Gemma", tied=True),
    "gemma2": _both("Gemma2", tied=True),
    "gemma3_text": Family("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification", None, tied=True),
    "glm": _both("Glm"),
    "glm4": _both("Glm4"),
    "gpt2": Family("GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2ForTokenClassification", **_OLD),
    "gpt_bigcode": _both("GPTBigCode", **_OLD),
    "gpt_neo": _both("GPTNeo", **_OLD),
    "gpt_neox": _both("GPTNeoX", base="gpt_neox", token="classifier"),
    "gpt_oss": _both("GptOss"),
    "gptj": _sequence_only("GPTJ", base="transformer"),
    "helium": _both("Helium"),
    "hunyuan_v1_dense": _sequence_only("HunYuanDenseV1"),
    "hunyuan_v1_moe": _sequence_only("HunYuanMoEV1"),
    "jetmoe": _sequence_only("JetMoe", tied=True),
    "llama": _both("Llama"),
    "minimax": _both("MiniMax"),
    "ministral": _both("Ministral"),
    "ministral3": _both("Ministral3"),
    "mistral": _both("Mistral"),
    "mixtral": _both("Mixtral"),
    "mpt": _both("Mpt", **_OLD),
    "nemotron": _both("Nemotron"),
    "olmo": _sequence_only("Olmo"),
    "olmo2": _sequence_only("Olmo2"),
    "olmo3": _sequence_only("Olmo3"),
    "opt": _sequence_only("OPT", tied=True),
    "persimmon": _both("Persimmon"),
    "phi": _both("Phi"),
    "phi3": _both("Phi3"),
    "phimoe": _sequence_only("Phimoe"),
    "qwen2": _both("Qwen2"),
    "qwen2_moe": _both("Qwen2Moe"),
    "qwen3": _both("Qwen3"),
    "qwen3_moe": _both("Qwen3Moe"),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification", None),
    "qwen3_next": _both("Qwen3Next"),
    "seed_oss": _both("SeedOss"),
    "smollm3": _both("SmolLM3", tied=True),
    "stablelm": _both("StableLm"),
    "starcoder2": _both("Starcoder2", tied=True),
}
# Decoders for which transformers has neither class.
WITHOUT = frozenset(
    {"bamba", "bitnet", "codegen", "cohere", "cohere2", "dbrx", "ernie4_5", "ernie4_5_moe", "falcon_h1", "falcon_mamba"}
    | {"gemma3n_text", "glm4_moe", "granite", "granitemoe", "mamba", "mamba2", "nemotron_h", "olmoe", "recurrent_gemma"}
    | {"rwkv", "xglm"}
)


def family_of(path: Path, config: Mapping[str, Any] | None) -> Family:
    """The family that config.json names.

    Raises CheckpointError for one without classifiers, or with classifiers that are more than one linear layer.
    """
    if config is None:
        raise CheckpointError(path, "has no config.json", "copy it from the base model")
    kind = config.get("model_type")
    if family := FAMILIES.get(str(kind)):
        return family
    if str(kind) in WITHOUT:
        raise CheckpointError(path, f"transformers has no classifier for {kind}", "keep it as a value-head model")
    problem = f"model_type {kind!r} is not known to have a classifier that is one linear layer"
    raise CheckpointError(path, problem, f"known are {', '.join(FAMILIES)}")


def classifier_config(config: Mapping[str, Any], architecture: str, pad_token_id: int | None) -> dict[str, Any]:
    """The config.json of a classifier with one output, as transformers and vLLM want it.

    One label is told by an `id2label` of one; `regression` says that a score is meant as it is, not its sigmoid.
    """
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    pad = {} if pad_token_id is None else {"pad_token_id": pad_token_id}
    kept = {key: value for key, value in config.items() if key not in ("num_labels", "auto_map", SCORE_BIAS)}
    return {**kept, "architectures": [architecture], **labels, **pad}


def has_one_label(config: Mapping[str, Any]) -> bool:
    """Whether transformers makes a classifier of this config.json with one output; without labels it has two."""
    labels = config.get("id2label")
    named = len(labels) if isinstance(labels, dict) else None
    return named in (1, None) and config.get("num_labels", named) == 1


def causal_config(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The config.json of the plain causal LM in place of that of its classifier."""
    of_classifier = ("id2label", "label2id", "num_labels", "problem_type", SCORE_BIAS)
    kept = {key: value for key, value in config.items() if key not in of_classifier}
    return {**kept, "architectures": [family.causal]}
