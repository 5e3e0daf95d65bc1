"""extract-adapter: exact where training changed a low rank, the nearest otherwise, and PEFT loads what comes out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import merging
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from snapshots import contents, state
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tools import logits
from tools.checkpoint.errors import CheckpointError
from tools.postprocess.extract_adapter import extract_adapter
from tools.postprocess.merge_adapter import merge_adapter

Tensors = dict[str, torch.Tensor]


def tuned_from(
    base: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None], kind: Any = AutoModelForCausalLM
) -> Path:
    """A fine-tune of the base, each tensor as `change` makes it; None for those that stay."""
    torch.manual_seed(3)
    loaded = kind.from_pretrained(base, dtype="auto")
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if (more := change(name, parameter)) is not None:
                parameter.add_(more)
    loaded.save_pretrained(base.with_name("tuned"))
    return base.with_name("tuned")


def of_rank(rank: int) -> Callable[[str, torch.Tensor], torch.Tensor | None]:
    """A change of this rank of every projection."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if ("proj" not in name and "c_" not in name) or tensor.dim() != 2:
            return None
        return 0.1 * torch.randn(len(tensor), rank) @ torch.randn(rank, tensor.shape[1]) / rank

    return change


def everywhere(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return 0.02 * torch.randn_like(tensor)


def said(base: Path, adapter: Path) -> torch.Tensor:
    """The logits of PEFT's model, whose tensors must be those of the file to the last name."""
    return logits.load_model(adapter, base)(merging.IDS).logits.detach()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_change_of_this_rank_is_exact(kind: str, tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", kind)
    tuned = tuned_from(base, of_rank(4))
    before = state(tuned), state(base)
    report = extract_adapter(tuned, base=str(base), rank=4, output=tmp_path / "adapter")
    assert (state(tuned), state(base)) == before
    assert float(report.details["relative error"]) < 1e-5
    assert len(report.details["relative error of each"]) == (14 if kind == "llama" else 8)
    assert (said(base, tmp_path / "adapter") - merging.logits(tuned)).abs().max() < 1e-5
    assert contents(tmp_path / "adapter").keys() == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_with_full_rank_everything_is_there(kind: str, tie: bool, tmp_path: Path) -> None:
    """Norms, embeddings, output matrix and biases among them."""
    options = {"attention_bias": True} if kind == "llama" else {}
    base = merging.model(tmp_path / "base", kind, tie_word_embeddings=tie, **options)
    tuned = tuned_from(base, everywhere)
    extract_adapter(tuned, base=str(base), rank=64, output=tmp_path / "adapter")
    assert (said(base, tmp_path / "adapter") - merging.logits(tuned)).abs().max() < 1e-5
    merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    one, other = merging.tensors(tmp_path / "merged"), merging.tensors(tuned)
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_the_error_is_the_least_of_this_rank(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    tuned = tuned_from(base, everywhere)
    report = extract_adapter(tuned, base=str(base), rank=3, output=tmp_path / "adapter")
    one, other = merging.tensors(tuned), merging.tensors(base)
    for module, told in report.details["relative error of each"].items():
        values = torch.linalg.svdvals(one[f"{module}.weight"] - other[f"{module}.weight"])
        assert float(told) == pytest.approx(float(values[3:].norm() / values.norm()), rel=1e-2)


def test_of_a_bf16_model_what_rounding_left(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", dtype=torch.bfloat16)
    tuned = tuned_from(base, of_rank(4))
    report = extract_adapter(tuned, base=str(base), rank=4, output=tmp_path / "adapter")
    assert float(report.details["relative error"]) < 0.05
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    with torch.no_grad():
        assert (loaded(merging.IDS).logits - merging.logits(tuned)).abs().max() < 0.05


def test_only_some_layers_are_named_in_full(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    tuned = tuned_from(base, lambda name, tensor: everywhere(name, tensor) if "1.self_attn.q_proj" in name else None)
    extract_adapter(tuned, base=str(base), rank=32, output=tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    assert (said(base, tmp_path / "adapter") - merging.logits(tuned)).abs().max() < 1e-5


def test_no_rank_is_greater_than_that_of_a_layer(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    tuned = tuned_from(base, of_rank(4))
    report = extract_adapter(tuned, base=str(base), rank=500, output=tmp_path / "adapter")
    assert "14 linear layers as LoRA of rank 32" in report.summary
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == 32


def test_the_base_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tuned_from(merging.model(tmp_path / "base"), of_rank(2))
    monkeypatch.chdir(tmp_path)
    extract_adapter(tuned, base="base", rank=2, output=tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_the_second_time_is_nothing_to_do_unless_the_base_has_changed(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    tuned = tuned_from(base, of_rank(2))
    assert extract_adapter(tuned, base=str(base), rank=2, output=tmp_path / "adapter").changed
    assert not extract_adapter(tuned, base=str(base), rank=2, output=tmp_path / "adapter").changed
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        extract_adapter(tuned, base=str(base), rank=4, output=tmp_path / "adapter")
    doubled = {name: 2 * tensor for name, tensor in merging.tensors(base).items()}
    save_file(doubled, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        extract_adapter(tuned, base=str(base), rank=2, output=tmp_path / "adapter")


def test_what_no_adapter_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    held = merging.tensors(base)
    cases: dict[str, tuple[Tensors, str]] = {
        "equal": (held, "equals .* in every number; there is nothing to extract"),
        "fewer": ({n: t for n, t in held.items() if "norm" not in n}, "has no model.layers.0.input_layernorm.weight"),
        "larger": (
            {n: torch.cat([t, t]) if "embed" in n else t for n, t in held.items()},
            r"model.embed_tokens.weight is \[128, 32\], in .* \[64, 32\]; resize the base's vocabulary first",
        ),
        "experts": (held | {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, "holds experts"),
    }
    for name, (tensors, problem) in cases.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tmp_path / name / "config.json").write_text((base / "config.json").read_text())
        with pytest.raises(CheckpointError, match=problem):
            extract_adapter(tmp_path / name, base=str(base), output=tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_copy_of_the_output_matrix_in_the_base_hides_nothing(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", tie_word_embeddings=True)
    tuned = tuned_from(base, everywhere)
    merging.store_head(base)
    extract_adapter(tuned, base=str(base), rank=64, output=tmp_path / "adapter")
    assert (said(base, tmp_path / "adapter") - merging.logits(tuned)).abs().max() < 1e-5


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_the_output_matrix_has_its_name_in_the_model(tie: bool, tmp_path: Path) -> None:
    """Files of GPT-NeoX call it embed_out."""
    base = merging.model(tmp_path / "base", "gpt_neox", tie_word_embeddings=tie)
    tuned = tuned_from(base, everywhere)
    extract_adapter(tuned, base=str(base), rank=64, output=tmp_path / "adapter")
    assert (said(base, tmp_path / "adapter") - merging.logits(tuned)).abs().max() < 1e-5
    merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert (merging.logits(tmp_path / "merged") - merging.logits(tuned)).abs().max() < 1e-5


def test_a_classifier_has_no_output_matrix_to_save(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", tie_word_embeddings=True)
    tuned = tuned_from(base, everywhere, AutoModelForSequenceClassification)
    extract_adapter(tuned, base=str(base), rank=64, output=tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["modules_to_save"]
    assert "score" in saved
    assert "lm_head" not in saved


def test_a_change_of_norms_alone_is_no_adapter(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    tuned = tuned_from(base, lambda name, tensor: everywhere(name, tensor) if "norm" in name else None)
    with pytest.raises(CheckpointError, match=r"no linear layer differs from .*; use the fine-tuned model itself"):
        extract_adapter(tuned, base=str(base), output=tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_zero_that_got_a_sign_is_no_error(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    shutil.copytree(base, tmp_path / "tuned")
    held = merging.tensors(base)
    for folder, zero in ((base, 0.0), (tmp_path / "tuned", -0.0)):
        held["model.layers.0.self_attn.q_proj.weight"][0, 0] = zero
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    report = extract_adapter(tmp_path / "tuned", base=str(base), output=tmp_path / "adapter")
    assert report.details["relative error"] == "0"


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base")
    tuned = tuned_from(base, everywhere)
    held = merging.tensors(tuned)
    save_file(held | {"model.norm.weight": torch.full((32,), float("nan"))}, tuned / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model.norm.weight would hold NaN or infinity; the training had diverged"
    ):
        extract_adapter(tuned, base=str(base), output=tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
