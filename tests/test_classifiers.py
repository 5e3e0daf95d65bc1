"""The table of classifiers says what transformers has, for every family in it."""

from typing import Any

import actor_critic
import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from tools.heads.classifiers import FAMILIES, SEQUENCE_HEAD, WITHOUT, Family
from tools.heads.reward import LM_HEAD

_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
# What a family needs beside the sizes of all, to be tiny.
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, **_EXPERTS, "n_group": 1, "topk_group": 1, "head_dim": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {**_LATENT, **_EXPERTS, "n_group": 1, "topk_group": 1, "head_dim": 4, "moe_intermediate_size": 16},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "gpt_oss": {**_EXPERTS, "head_dim": 8},
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8, "num_key_value_heads": 2},
    "minimax": {**_EXPERTS, "head_dim": 8},
    "mixtral": _EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phimoe": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _LINEAR,
    "qwen3_next": {**_LINEAR, **_EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 16},
}
_HEAD_DIM = ("gemma", "gemma2", "gemma3_text", "glm", "glm4", "helium", "qwen3", "qwen3_moe", "ministral", "ministral3")


def tiny_config(model_type: str) -> Any:
    """A configuration of two small layers."""
    head_dim = {"head_dim": 8} if model_type in _HEAD_DIM else {}
    fields = {**actor_critic.SIZES, **actor_critic.ENDS, **head_dim, **FIELDS.get(model_type, {})}
    config = AutoConfig.for_model(model_type, **fields)
    config.num_labels = 1
    return config


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_has_the_classes_of_transformers(kind: str) -> None:
    family = FAMILIES[kind]
    assert family.causal == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    assert family.sequence == MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    assert family.token_class == MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(kind)


@pytest.mark.parametrize("kind", sorted(WITHOUT))
def test_a_family_without_a_classifier_has_none_in_transformers(kind: str) -> None:
    assert kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    assert kind not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES


def classifiers(family: Family) -> list[tuple[str, set[str]]]:
    """The classes of a family, each with the tensors of its layer."""
    both = [(family.sequence, {f"{SEQUENCE_HEAD}.weight"}), (family.token_class, set(family.token_head))]
    return [(name, head) for name, head in both if name]


@pytest.mark.parametrize("kind", FAMILIES)
def test_its_layer_scores_the_last_hidden_state_of_the_causal_lm(kind: str) -> None:
    family, config = FAMILIES[kind], tiny_config(kind)
    torch.manual_seed(0)
    causal = getattr(transformers, family.causal)(config).eval()
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        hidden = causal(ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
    decoder = {name: t for name, t in causal.state_dict().items() if name.startswith(f"{family.base}.")}
    assert causal.state_dict().keys() - decoder.keys() <= set(LM_HEAD)
    assert type(config)().tie_word_embeddings is family.tied
    for name, head in classifiers(family):
        classifier = getattr(transformers, name)(config).eval()
        loading = classifier.load_state_dict(decoder, strict=False)
        assert (set(loading.missing_keys), loading.unexpected_keys) == (head, [])
        tensors = classifier.state_dict()
        [weight] = [tensors[name] for name in head if name.endswith(".weight")]
        bias = sum(tensors[name] for name in head if name.endswith(".bias"))
        assert weight.shape == (1, 32)
        with torch.no_grad():
            scores = classifier(ids, use_cache=False).logits if name == family.sequence else classifier(ids).logits
            expected = hidden @ weight.T + bias
        torch.testing.assert_close(scores, expected[:, -1] if name == family.sequence else expected)
