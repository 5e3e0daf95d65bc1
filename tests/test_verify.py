"""verify passes what is whole and equal, and names each thing that is not."""

import shutil
from pathlib import Path

import heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tools import logits
from tools.checkpoint.errors import CheckpointError
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.verify import verify


@pytest.fixture
def split(tiny: Path, tmp_path: Path) -> Path:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    fix_valuehead(path)
    return path


def spoiled(path: Path) -> Path:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt", "origin": "a test"})
    return path


def test_whole(split: Path) -> None:
    report = verify(split, deep=True)
    assert report.summary == "whole"
    assert report.details["tensors"] == 23
    assert set(report.details["sha256"]) == {path.name for path in split.iterdir() if path.is_file()}


def test_a_copied_checkpoint_is_still_what_the_receipt_says(split: Path, tmp_path: Path) -> None:
    shutil.copytree(split, tmp_path / "copy", copy_function=shutil.copy)
    assert verify(tmp_path / "copy").summary == "whole"


def test_a_file_that_changed_since_a_step_wrote_it(split: Path) -> None:
    (split / "value_head.safetensors").unlink()
    save_file(load_file(split / "model.safetensors"), split / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        verify(split)
    changed, gone = sorted(str(caught.value).splitlines())
    assert "model.safetensors: has changed since fix-valuehead wrote it on" in changed
    assert "value_head.safetensors: is not there since fix-valuehead wrote it on" in gone


def test_against_compares_every_byte(split: Path, tiny: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(split, tmp_path / "other"))
    assert "every tensor equals" in verify(split, against=other).summary
    spoiled(other)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has other values than in"):
        verify(split, against=other)
    with pytest.raises(CheckpointError, match=r"has no v_head.summary.bias in its head file, which"):
        verify(split, against=tiny)


def test_logits_of_another_checkpoint(split: Path, tiny: Path, tmp_path: Path) -> None:
    report = verify(split, logits=tiny)
    assert report.details["logits"]["largest difference"] == 0
    assert report.details["logits"]["same most likely token"] == "128 of 128 positions"
    other = spoiled(Path(shutil.copytree(tiny, tmp_path / "other")))
    with pytest.raises(
        CheckpointError, match=r"logits differ from .* more than 0.001; the most likely token agrees at"
    ):
        verify(split, logits=other)
    assert verify(split, logits=other, tolerance=100).details["logits"]["largest difference"] > 0.001


def test_logits_that_training_recorded(split: Path, tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny).train()
    logits.save(model, tmp_path / "trained_logits.safetensors")
    assert model.training
    assert verify(split, logits=tmp_path / "trained_logits.safetensors").details["logits"]["rows"] == 8
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    logits.save(model, tmp_path / "trained_logits.safetensors")
    with pytest.raises(CheckpointError, match="logits differ"):
        verify(split, logits=tmp_path / "trained_logits.safetensors")


def test_a_prefix_that_would_load_as_random_weights(tiny: Path, tmp_path: Path) -> None:
    path = heads.prefixed(tiny, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"21 names such as pretrained_model.* have a wrapper prefix"):
        verify(path)
    with pytest.raises(CheckpointError, match=r"21 weights are missing and would be random: lm_head.weight"):
        verify(tiny, logits=path)


def test_a_directory_that_nothing_loads(recorded: "object") -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        verify(recorded("zero3-checkpoint"))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"has no config.json; copy it from the base model"):
        verify(recorded("hf-trainer-valuehead"))  # type: ignore[operator]


def test_a_checkpoint_of_our_training_stands_for_the_model_it_recorded(split: Path, tiny: Path, tmp_path: Path) -> None:
    trained = Path(shutil.copytree(tiny, tmp_path / "trained"))
    logits.save(AutoModelForCausalLM.from_pretrained(tiny), trained / ".burnish" / "trained_logits.safetensors")
    spoiled(trained)  # what was recorded counts, not what a load gives now
    assert verify(split, logits=trained).details["logits"]["largest difference"] < 1e-6


def test_options_that_compare_need_something_to_compare_with(split: Path, tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="say how to compare; add --logits"):
        verify(split, base=tiny)


def test_another_vocabulary(split: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).save_pretrained(tmp_path / "larger")
    with pytest.raises(CheckpointError, match=r"has 64 tokens, .* has more; the vocabularies differ"):
        verify(split, logits=tmp_path / "larger")
    with pytest.raises(CheckpointError, match="the vocabularies differ"):
        verify(tmp_path / "larger", logits=split)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_never_passes(number: float, split: Path, tiny: Path, tmp_path: Path) -> None:
    """Also where the logits of most rows are numbers: each fault is of the one token that the last rows hold."""
    other = Path(shutil.copytree(tiny, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    last = logits.fixed_rows(len(tensors["model.embed_tokens.weight"]))[-1]
    tensors["model.embed_tokens.weight"][last[0], 3] = number
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    for checked, reference in ((split, other), (other, split)):
        with pytest.raises(CheckpointError, match="other: gives logits that are NaN or infinite"):
            verify(checked, logits=reference, tolerance=1e9)
    assert verify(other).summary == "whole"
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight holds NaN or infinity; the training had diverged"):
        verify(other, deep=True)


def test_options_that_would_not_be_read_are_refused(split: Path, tiny: Path, tmp_path: Path) -> None:
    logits.save(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "trained_logits.safetensors")
    for option in ("prompts", "reference_base"):
        with pytest.raises(CheckpointError, match="recorded, of rows and of a base of their own; leave"):
            verify(split, logits=tmp_path / "trained_logits.safetensors", **{option: tmp_path / "nowhere"})
    assert verify(split, logits=tiny, base=tiny).summary.startswith("whole; logits")  # a full model needs none
    with pytest.raises(CheckpointError, match=r"logits differ from .* more than nan"):
        verify(split, logits=spoiled(Path(shutil.copytree(tiny, tmp_path / "other"))), tolerance=float("nan"))


def test_a_name_in_two_files_hides_no_difference(split: Path, tmp_path: Path) -> None:
    """A head file may repeat a name of the model."""
    for folder, number in (("one", 1.0), ("two", 2.0)):
        shutil.copytree(split, tmp_path / folder)
        tensors = load_file(split / "model.safetensors") | {"v_head.summary.bias": torch.full((1,), number)}
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
        shutil.rmtree(tmp_path / folder / ".burnish")
    with pytest.raises(CheckpointError, match=r"model.safetensors: v_head.summary.bias has other values than in"):
        verify(tmp_path / "one", against=tmp_path / "two")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits_may_differ_by_roundings_and_no_more(dtype: torch.dtype, tiny: Path, tmp_path: Path) -> None:
    """Weights in float32 whose numbers have 16 bits give other roundings than those that are computed in 16 bits."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype)
    model.save_pretrained(tmp_path / "narrow")
    model.float().save_pretrained(tmp_path / "wide")
    compared = verify(tmp_path / "wide", logits=tmp_path / "narrow").details["logits"]
    assert 0 < compared["largest difference"] <= compared["tolerance"] < 0.1
    with pytest.raises(CheckpointError, match="logits differ"):
        verify(spoiled(tmp_path / "wide"), logits=tmp_path / "narrow")


def test_prompts_need_a_tokenizer(split: Path, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hello\n\nworld\n")
    with pytest.raises(CheckpointError, match="has no tokenizer for --prompts; run tools bundle-processor"):
        verify(split, logits=tiny, prompts=tmp_path / "prompts.txt")
    with pytest.raises(CheckpointError, match=r"nowhere.txt: not found"):
        verify(split, logits=tiny, prompts=tmp_path / "nowhere.txt")


def test_prompts(recorded: "object", tmp_path: Path) -> None:
    path = recorded("hf-trainer-valuehead")  # type: ignore[operator]
    shutil.copy(Path(__file__).parent / "fixtures" / "trl-valuehead-single" / "config.json", path)
    (tmp_path / "prompts.txt").write_text("the licence\nand what follows from it\n")
    report = verify(path, logits=path, prompts=tmp_path / "prompts.txt")
    assert report.details["logits"]["rows"] == 2
