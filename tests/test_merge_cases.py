"""merge-adapter: what lies in the new directory, with heads and vocabularies, in how much memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import merging
import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import contents, state
from transformers import AutoModelForSequenceClassification

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.postprocess.merge_adapter import merge_adapter
from tools.postprocess.verify import verify


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return merging.model(tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    merging.adapter(base, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_what_lies_in_the_new_directory(base: Path, adapter: Path, tmp_path: Path) -> None:
    merging.tokenizer_of(base, 64)
    for name in ("LICENSE", "modeling_own.py", "model.gguf", "optimizer.pt", "README.md", "preprocessor_config.json"):
        (base / name).write_text("of the base")
    (adapter / "trainer_state.json").write_text("{}")
    (adapter / "training_args.bin").write_text("")
    (adapter / "notes.txt").write_text("of the adapter")
    before = state(adapter), state(base)
    report = merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert contents(tmp_path / "merged").keys() == {
        *("LICENSE", "config.json", "generation_config.json", "model.safetensors", "modeling_own.py", "notes.txt"),
        *("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"),
    }
    assert report.details["left in the base"] == ["README.md", "model.gguf"]
    assert (state(adapter), state(base)) == before
    verify(tmp_path / "merged", logits=adapter, reference_base=base, tolerance=1e-5)


def test_a_tokenizer_is_the_adapters_or_the_bases_but_never_a_mixture(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    merging.tokenizer_of(base, 64)
    (base / "merges.txt").write_text("of the base")
    (base / "preprocessor_config.json").write_text("of the base")
    (adapter / "tokenizer.json").write_text("{}")
    merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    found = contents(tmp_path / "merged")
    assert (tmp_path / "merged/tokenizer.json").read_text() == "{}"
    assert "merges.txt" not in found
    assert "preprocessor_config.json" in found


@pytest.mark.parametrize("file", ["model.safetensors", "chat_template.jinja"])
def test_the_second_time_is_nothing_to_do_unless_the_base_has_changed(
    file: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    (base / "chat_template.jinja").write_text("as it was")
    merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert not merge_adapter(adapter, base=str(base), output=tmp_path / "merged").changed
    tensors = merging.tensors(base)
    if file == "model.safetensors":
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, base / file, {"format": "pt"})
    else:
        (base / file).write_text("as it is")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        merge_adapter(adapter, base=str(base), output=tmp_path / "merged")


def test_dry_run_writes_nothing(base: Path, adapter: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    report = merge_adapter(adapter, base=str(base), output=tmp_path / "merged", dry_run=True)
    assert "model.safetensors" in report.details["plan"]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("layout", ["shards", "pickle"])
def test_the_layout_is_that_of_the_base(layout: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(base)
    if layout == "shards":
        loaded.save_pretrained(tmp_path / "other", max_shard_size="30kB")
    else:
        shutil.copytree(base, tmp_path / "other")
        (tmp_path / "other/model.safetensors").unlink()
        torch.save(loaded.state_dict(), tmp_path / "other/pytorch_model.bin")
    merge_adapter(adapter, base=str(tmp_path / "other"), output=tmp_path / "merged")
    merge_adapter(adapter, base=str(base), output=tmp_path / "plain")
    one, other = merging.tensors(tmp_path / "merged"), merging.tensors(tmp_path / "plain")
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    assert merging.logits(tmp_path / "merged").equal(merging.logits(tmp_path / "plain"))
    if layout == "shards":
        held = Checkpoint.open(tmp_path / "other").model
        assert held is not None
        assert {file.name for file in held.files} <= contents(tmp_path / "merged").keys()


def test_shards_of_a_given_size(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(adapter, base=str(base), output=tmp_path / "merged", max_shard_size="30kB")
    shards = list((tmp_path / "merged").glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 33_000 for shard in shards)
    assert verify(tmp_path / "merged").summary == "whole"
    merging.logits(tmp_path / "merged")
    with pytest.raises(CheckpointError, match="--max-shard-size: big is not a size; write it as 5GB or 300MB"):
        merge_adapter(adapter, base=str(base), output=tmp_path / "other", max_shard_size="big")


def test_the_report_says_what_was_replaced_and_which_base_was_meant(base: Path, tmp_path: Path) -> None:
    merging.adapter(base, tmp_path / "adapter", trainable_token_indices=[1, 5])
    shutil.copytree(base, tmp_path / "another")
    report = merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert report.summary.startswith(f"{base} with 4 of 4 modules merged in; 2 token rows replaced")
    assert "note" not in report.details
    report = merge_adapter(tmp_path / "adapter", base=str(tmp_path / "another"), output=tmp_path / "other")
    assert report.details["note"] == f"the adapter names {base} as its base"


def test_several_adapters_are_added_with_their_weights(base: Path, adapter: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    merging.adapter(base, tmp_path / "more", r=2, target_modules=["v_proj", "o_proj"], use_rslora=True)
    merge_adapter(adapter, base=str(base), weight=0.5, more=[f"{tmp_path / 'more'}=-2"], output=tmp_path / "merged")
    before, one, other, both = (
        merging.tensors(folder)
        for folder in (base, merging.alone(adapter, base), merging.alone(tmp_path / "more", base), tmp_path / "merged")
    )
    for name, tensor in both.items():
        expected = before[name] + 0.5 * (one[name] - before[name]) - 2 * (other[name] - before[name])
        assert torch.allclose(tensor, expected, atol=1e-6)


def test_what_replaces_or_scales_has_no_weighted_sum(base: Path, adapter: Path, tmp_path: Path) -> None:
    merging.adapter(base, tmp_path / "dora", use_dora=True)
    merging.adapter(base, tmp_path / "saves", modules_to_save=["norm"])
    for folder in ("dora", "saves"):
        with pytest.raises(CheckpointError, match="has no weighted sum with others; merge it alone, with weight 1"):
            merge_adapter(adapter, base=str(base), more=[str(tmp_path / folder)], output=tmp_path / "merged")
        with pytest.raises(CheckpointError, match="merge it alone, with weight 1"):
            merge_adapter(tmp_path / folder, base=str(base), weight=0.5, output=tmp_path / "merged")


def test_mg_01_a_base_that_says_tied_and_is_not_comes_out_untied(adapter: Path, base: Path, tmp_path: Path) -> None:
    merging.adapter(base, tmp_path / "saves", modules_to_save=["lm_head"])
    merging.edit(base / "config.json", tie_word_embeddings=True)
    merge_adapter(tmp_path / "saves", base=str(base), output=tmp_path / "merged")
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False


def test_mg_04_every_tensor_keeps_its_dtype(tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", dtype=torch.bfloat16)
    mixed = {n: t.float() if "norm" in n else t for n, t in merging.tensors(base).items()}
    save_file(mixed, base / "model.safetensors", {"format": "pt"})
    merging.adapter(base, tmp_path / "adapter", dtype=torch.float32, modules_to_save=["norm"])
    merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert {n: t.dtype for n, t in merging.tensors(tmp_path / "merged").items()} == {
        n: t.dtype for n, t in mixed.items()
    }
    one, other = (json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "merged"))
    assert one == other
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (base, tmp_path / "merged")]
    assert abs(sizes[1] / sizes[0] - 1) < 0.01


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}, {"target_modules": ["lm_head", "v_proj"]}]
)
def test_mg_05_a_grown_vocabulary_grows_the_model(tie: bool, options: dict[str, list[str]], tmp_path: Path) -> None:
    base = merging.model(tmp_path / "base", tie_word_embeddings=tie)
    trained = merging.adapter(base, tmp_path / "adapter", rows=66, **options)
    merging.tokenizer_of(tmp_path / "adapter", 66)
    if "target_modules" in options and not tie:  # PEFT then saves lm_head alone
        with pytest.raises(CheckpointError, match=r"lm_head.weight would have 66 rows, model.embed_tokens.weight 64"):
            merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
        return
    report = merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert report.details["vocabulary"] == "64 -> 66 rows"
    assert json.loads((tmp_path / "merged/config.json").read_text())["vocab_size"] == 66
    assert (tmp_path / "merged/tokenizer.json").exists()
    assert (merging.logits(tmp_path / "merged") - trained).abs().max() < 1e-5


def test_mg_05_without_rows_for_the_new_tokens(base: Path, adapter: Path, tmp_path: Path) -> None:
    merging.tokenizer_of(adapter, 66)
    with pytest.raises(
        CheckpointError, match=r"its tokenizer has 66 tokens, and model.embed_tokens.weight .* has 64 rows"
    ):
        merge_adapter(adapter, base=str(base), output=tmp_path / "merged")


@pytest.mark.parametrize("beside", ["safetensors", "pickle"])
def test_vh_07_a_value_head_is_carried_along(beside: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    head = {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.randn(1)}
    if beside == "safetensors":
        save_file(head, adapter / "value_head.safetensors")
    else:
        torch.save(head, adapter / "pytorch_model.bin")
    report = merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert "value head carried along in value_head.safetensors" in report.summary
    carried = load_file(tmp_path / "merged/value_head.safetensors")
    assert all(torch.equal(carried[name], head[name]) for name in head)
    assert not (tmp_path / "merged/pytorch_model.bin").exists()
    merging.logits(tmp_path / "merged")


def test_vh_07_a_score_head_makes_the_model_a_classifier(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    loaded = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    wrapped = get_peft_model(loaded, LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False)).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert "head score.weight carried along" in report.summary
    assert report.details["architectures"] == "LlamaForSequenceClassification"
    merged, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "merged", pad_token_id=0, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.allclose(merged.eval()(merging.IDS).logits, wrapped(merging.IDS).logits, atol=1e-6)


def test_mg_03_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    base = merging.model(
        tmp_path / "base",
        dtype=torch.bfloat16,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        vocab_size=4096,
    )
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(base, dtype="auto").save_pretrained(tmp_path / "shards", max_shard_size="8MB")
    merging.adapter(base, tmp_path / "adapter", r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    (tmp_path / "small").mkdir()
    small = merging.model(tmp_path / "small/base")
    merging.adapter(small, tmp_path / "small/adapter")
    peaks = [
        _peak(small, tmp_path / "small/adapter", tmp_path / "small/merged"),
        _peak(tmp_path / "shards", tmp_path / "adapter", tmp_path / "merged"),
    ]
    assert peaks[1] - peaks[0] < 24e6, peaks


def _peak(base: Path, adapter: Path, output: Path) -> int:
    """Greatest resident memory of the command as a process of its own, in bytes."""
    script = (
        "import resource, sys; from pathlib import Path; from tools.postprocess.merge_adapter import merge_adapter;"
        "merge_adapter(Path(sys.argv[1]), base=sys.argv[2], output=Path(sys.argv[3]));"
        "assert 'torch' not in sys.modules; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, adapter, base, output], capture_output=True, text=True, check=True
    )
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
