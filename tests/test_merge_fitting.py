"""merge-adapter: what an adapter brings has its place in the base, in shape, rows and number; else it is refused."""

import json
from pathlib import Path
from typing import Any

import merging
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.merge_adapter import merge_adapter


def test_a_saved_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    merging.adapter(base, tmp_path / "adapter", modules_to_save=["norm"])
    merging.rewritten(
        tmp_path / "adapter", lambda held: {n: torch.ones(40) if ".norm." in n else t for n, t in held.items()}
    )
    with pytest.raises(CheckpointError, match=r"model.norm.weight is \[40\], model.norm.weight of .* \[32\]; is it"):
        merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_classifier_takes_the_labels_of_the_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    kind = AutoModelForSequenceClassification
    causal = merging.model(tmp_path / "causal")
    kind.from_pretrained(causal, num_labels=2, pad_token_id=0).save_pretrained(tmp_path / "base")
    loaded = kind.from_pretrained(tmp_path / "base", num_labels=5, pad_token_id=0, ignore_mismatched_sizes=True)
    wrapped = get_peft_model(loaded, LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False)).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", base=str(tmp_path / "base"), output=tmp_path / "merged")
    assert len(json.loads((tmp_path / "merged/config.json").read_text())["id2label"]) == 5
    with torch.no_grad():
        found = kind.from_pretrained(tmp_path / "merged").eval()(merging.IDS).logits
        assert torch.allclose(found, wrapped(merging.IDS).logits, atol=1e-6)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_a_trained_token_may_be_a_new_one(tie: bool, tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", tie_word_embeddings=tie)
    trained = merging.adapter(base, tmp_path / "adapter", rows=66, trainable_token_indices=[1, 65])
    report = merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert report.details["vocabulary"] == "64 -> 66 rows"
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is tie
    assert (merging.logits(tmp_path / "merged") - trained).abs().max() < 1e-5


TOKENS: dict[str, tuple[list[int], str]] = {
    "beyond the vocabulary": (
        [1, 500],
        r"trains token 500, and model.embed_tokens.weight of .* has 64 rows; save the adapter with save_embedding",
    ),
    "before it": ([1, -1], "trains token -1, "),
    "more than rows": ([1, 5, 7], "has 2 rows, trainable_token_indices names 3 tokens; save the adapter again"),
}


@pytest.mark.parametrize("case", TOKENS)
def test_a_token_without_a_row_is_refused(case: str, tmp_path: Path) -> None:
    tokens, problem = TOKENS[case]
    base = merging.model(tmp_path / "base")
    merging.adapter(base, tmp_path / "adapter", trainable_token_indices=[1, 5])
    merging.edit(tmp_path / "adapter/adapter_config.json", trainable_token_indices=tokens)
    with pytest.raises(CheckpointError, match=problem):
        merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_tokens_and_lora_of_a_tied_output_matrix_are_refused(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", tie_word_embeddings=True)
    options: dict[str, Any] = {"target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": [1, 5]}}
    merging.adapter(base, tmp_path / "adapter", **options)
    expected = "trains tokens of model.embed_tokens.weight and LoRA of lm_head.weight, which is tied to it; use it as"
    with pytest.raises(CheckpointError, match=expected):
        merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_tensor_that_is_saved_and_adapted_too_is_refused(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    merging.adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    merging.rewritten(tmp_path / "adapter", lambda held: held | {f"{name}.weight": torch.ones(32, 32)})
    merging.edit(tmp_path / "adapter/adapter_config.json", modules_to_save=["q_proj"])
    with pytest.raises(CheckpointError, match=r"changes model.layers.0.self_attn.q_proj.weight in two ways"):
        merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
