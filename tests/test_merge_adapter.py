"""merge-adapter: equal to PEFT's merge where that is right, to the trained model everywhere."""

import json
from pathlib import Path
from typing import Any

import merging
import pytest
import torch

from tools.postprocess.merge_adapter import merge_adapter

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "all linear": {"target_modules": ALL},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3}},
    "rslora and patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 5}},
    "dora": {"use_dora": True, "target_modules": ALL},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding with dora": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "output matrix": {"target_modules": ["lm_head", "q_proj"]},
    "modules to save": {"modules_to_save": ["norm", "lm_head", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [1, 5]},
    "tokens of both": {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [2, 3]}},
    "some layers": {"layers_to_transform": [1]},
}


# Half precision shows every rounding; in fp32 the order in which products are added up shows in small sums.
DTYPES = {"fp32": (torch.float32, 1e-6), "bf16": (torch.bfloat16, 2e-2), "fp16": (torch.float16, 2e-3)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_the_merge_of_peft_and_the_trained_model(kind: str, dtype: str, tmp_path: Path) -> None:
    number, tolerance = DTYPES[dtype]
    base = merging.model(tmp_path / "base", dtype=number)
    trained = merging.adapter(base, tmp_path / "adapter", **KINDS[kind])
    report = merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert report.changed
    units = 2 if KINDS[kind].get("use_dora") else 1  # a norm is a long sum
    merging.assert_same(tmp_path / "merged", merging.merged_by_peft(base, tmp_path / "adapter"), base, units)
    assert (merging.logits(tmp_path / "merged") - trained).abs().max() < tolerance


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Conv1D of GPT-2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "Conv1D with DoRA": (
        "gpt2",
        {
            "target_modules": ["c_attn", "c_proj"],
            "fan_in_fan_out": True,
            "use_dora": True,
            "modules_to_save": [],
        },
    ),
    "experts in files apart": ("qwen3_moe", {"target_parameters": EXPERTS}),
    "experts of one parameter": ("qwen3_moe", {"target_parameters": EXPERTS[1:], "target_modules": []}),
    "experts of Mixtral": ("mixtral", {"target_parameters": EXPERTS, "target_modules": ["q_proj", "mlp.gate"]}),
    "experts in one tensor": ("gpt_oss", {"target_parameters": EXPERTS}),
    "biases": ("llama", {"bias": "all"}),
    "biases of targets": ("llama", {"bias": "lora_only"}),
    "bias of LoRA": ("llama", {"lora_bias": True}),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_the_merge_of_peft(family: str, dtype: str, tmp_path: Path) -> None:
    name, options = FAMILIES[family]
    number, tolerance = DTYPES[dtype]
    base = merging.model(tmp_path / "base", name, number, **({"attention_bias": True} if "ias" in family else {}))
    trained = merging.adapter(base, tmp_path / "adapter", **options)
    merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    units = 2 if options.get("use_dora") else 1
    merging.assert_same(tmp_path / "merged", merging.merged_by_peft(base, tmp_path / "adapter"), base, units)
    assert (merging.logits(tmp_path / "merged") - trained).abs().max() < tolerance


TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "output matrix targeted": ({"target_modules": ["lm_head", "q_proj"]}, False),
    "embedding targeted": ({"target_modules": ["embed_tokens", "q_proj"]}, False),
    "both targeted": ({"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, False),
    "both as one": ({"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}, True),
    "output matrix saved": ({"modules_to_save": ["lm_head"]}, False),
    "embedding saved": ({"modules_to_save": ["embed_tokens"]}, False),
    "both saved": ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "both saved as one": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "tokens": ({"trainable_token_indices": [1, 5]}, True),
    "other tokens of each": ({"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [2, 3]}}, False),
    "neither": ({}, True),
}


@pytest.mark.parametrize("stored_twice", [False, True], ids=["one in the files", "copy in the files"])
@pytest.mark.parametrize("case", TIED)
def test_a_tied_model_comes_out_as_it_was_trained(case: str, stored_twice: bool, tmp_path: Path) -> None:
    options, stays = TIED[case]
    base = merging.model(tmp_path / "base", tie_word_embeddings=True)
    trained = merging.adapter(base, tmp_path / "adapter", **options)
    if stored_twice:
        merging.store_head(base)
    merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["tie_word_embeddings"] is stays
    assert ("lm_head.weight" in merging.tensors(tmp_path / "merged")) is (not stays or (stored_twice and not options))
    assert (merging.logits(tmp_path / "merged") - trained).abs().max() < 1e-5
