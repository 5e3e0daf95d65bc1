"""What is no value head, or not only one, is named and never scored with."""

import shutil
from pathlib import Path

import heads
import pytest
import torch
from frameworks import FRAMEWORKS, classifier, recorded
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tools.checkpoint.errors import CheckpointError
from tools.training.value_head import load

MORE_THAN_A_HEAD = {
    "trlx-value-layers": "more than layers on the last hidden state",
    "trlx-ilql": "more than layers on the last hidden state",
    "roberta": "more than layers on the last hidden state",
    "t5": "more than layers on the last hidden state",
    "qwen-prm": "has 2 outputs, and a value head has one",
    "trl-t5": "does not load as a causal LM",
    "bert": r"bert\.pooler\.dense\.bias is neither of BertLMHeadModel nor of the value head",
}


@pytest.mark.parametrize("name", MORE_THAN_A_HEAD)
def test_a_head_that_scores_something_else(name: str, tiny: Path, tmp_path: Path) -> None:
    FRAMEWORKS[name].build(tiny, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=MORE_THAN_A_HEAD[name]):
        load(tmp_path / "checkpoint")


@pytest.mark.parametrize("head", [None, "score"])
def test_a_classifier_of_two_labels(head: str | None, tiny: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=2).save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"one output, and these are score\.weight \[2, 32\]"):
        load(tmp_path / "checkpoint", head=head)


def with_more(tiny: Path, path: Path, more: dict[str, torch.Tensor]) -> Path:
    """A flat checkpoint of TRL with further tensors."""
    heads.flat(tiny, path)
    save_file(load_file(path / "model.safetensors") | more, path / "model.safetensors", {"format": "pt"})
    return path


def test_one_of_several_heads_is_chosen_by_name(tiny: Path, tmp_path: Path) -> None:
    path = with_more(tiny, tmp_path / "checkpoint", {"score.weight": torch.full((1, 32), 0.5)})
    with pytest.raises(CheckpointError, match=r"several value heads: v_head.*score\.weight.*choose one by head="):
        load(path)
    assert torch.equal(load(path, head="v_head").v_head.summary.weight, heads.HEAD["v_head.summary.weight"])
    assert torch.equal(load(path, head="score").v_head.summary.weight, torch.full((1, 32), 0.5))
    with pytest.raises(CheckpointError, match="no value head called reward_head"):
        load(path, head="reward_head")


def test_a_tensor_that_belongs_to_nothing(tiny: Path, tmp_path: Path) -> None:
    path = with_more(tiny, tmp_path / "checkpoint", {"adapter.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"adapter\.weight is neither of LlamaForCausalLM nor of the value head"):
        load(path)


def test_a_weight_that_would_be_random(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights .* would be random: model\.norm\.weight"):
        load(path)


def test_a_head_in_the_weights_and_another_in_its_file(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    save_file(heads.HEAD, path / "value_head.safetensors", {"format": "pt"})
    assert torch.equal(load(path).v_head.summary.bias, torch.tensor([0.25]))
    save_file({name: tensor + 1 for name, tensor in heads.HEAD.items()}, path / "value_head.safetensors")
    with pytest.raises(CheckpointError, match=r"differ from what value_head\.safetensors holds"):
        load(path)


def test_a_head_in_safetensors_and_in_a_pickle(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    save_file(heads.HEAD, path / "value_head.safetensors", {"format": "pt"})
    torch.save(heads.HEAD, path / "value_head.bin")
    with pytest.raises(CheckpointError, match=r"both value_head\.safetensors and value_head\.bin"):
        load(path)


def test_a_head_that_is_there_twice(tiny: Path, tmp_path: Path) -> None:
    more = {f"pretrained_model.{name}": tensor for name, tensor in heads.HEAD.items()}
    path = with_more(tiny, tmp_path / "checkpoint", more)
    with pytest.raises(CheckpointError, match="twice"):
        load(path)


def test_vh_12_a_head_that_zero3_did_not_gather(tiny: Path, tmp_path: Path) -> None:
    more = {"v_head.summary.weight": torch.zeros(0), "v_head.summary.bias": torch.zeros(1)}
    path = with_more(tiny, tmp_path / "checkpoint", more)
    with pytest.raises(CheckpointError, match=r"v_head\.summary\.weight has 0 elements"):
        load(path)


def test_a_head_without_decoder(tmp_path: Path) -> None:
    recorded("hf-trainer-valuehead-lora")(tmp_path, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="only the value head is here, no decoder"):
        load(tmp_path / "checkpoint")


def test_a_policy_with_its_value_model(tiny: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    decoder = load_file(tiny / "model.safetensors")
    both = {f"{part}.{name}": tensor.clone() for part in ("policy", "value_model") for name, tensor in decoder.items()}
    save_file(both | {"value_model.score.weight": torch.ones(1, 32)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="split-actor-critic"):
        load(path)


def test_an_adapter_among_the_gathered_weights(tiny: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=2, target_modules=["q_proj"]))
    path = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    state = {f"pretrained_model.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(state | heads.HEAD, path / "model.safetensors", {"format": "pt"})
    model.peft_config["default"].save_pretrained(path)
    with pytest.raises(CheckpointError, match="run tools fix-valuehead first"):
        load(path)


def test_a_classifier_that_is_an_adapter_needs_its_base(tiny: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = tmp_path / "base"
    classifier("LlamaForSequenceClassification")(tiny, base)
    shutil.copytree(tiny, tmp_path / "causal")
    model = AutoModelForSequenceClassification.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")).save_pretrained(
        tmp_path / "l"
    )
    with pytest.raises(CheckpointError, match="has no lm_head; name the causal LM"):
        load(tmp_path / "l")
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match="is not on this machine"):
        load(tmp_path / "l")
    assert load(tmp_path / "l", tmp_path / "causal").has_adapter
