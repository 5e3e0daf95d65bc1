"""A value head scores as the framework that left it does, whatever it called its tensors and wherever they lie."""

import json
import shutil
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
import transformers
from frameworks import FRAMEWORKS, H, peft_classifier, recorded
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.heads.layouts import LAYOUTS
from tools.heads.wrappers import bare_names
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.training.stored_head import read
from tools.training.value_head import HEAD_KEYS, load, restore, save

LINEAR = ("trl", "trl-sharded", "trl-bf16", "deepspeed-chat", "internlm2", "reward-head", "nemo-aligner", "megatron")
MLP = ("trlx", "trlx-hydra", "qwen")
OPENRLHF = ("openrlhf-score", "openrlhf-value-head", "openrlhf-other-name")
ROWS = [[5, 6, 7, 8, 9], [10, 11, 12]]
RIGHT = (torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
LEFT = (torch.tensor([[5, 6, 7, 8, 9], [0, 0, 10, 11, 12]]), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]))


def build(name: str, tiny: Path, path: Path) -> Path:
    torch.manual_seed(0)
    FRAMEWORKS[name].build(tiny, path)
    return path


def scores(path: Path, batch: tuple[torch.Tensor, torch.Tensor] = RIGHT, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return load(path, **options)(*batch)


def bare_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the weights, without wrapper prefixes."""
    weights = Checkpoint.open(path).model
    assert weights
    bare = bare_names(weights.tensors)
    return {bare[name]: tensor for name, tensor in read(weights, weights.tensors).items()}


def by_hand(path: Path) -> torch.Tensor:
    """The head, put on the last hidden state of each row alone by what the framework's own class does."""
    tensors = bare_tensors(path)
    starts = ("v_head", "score", "value_head", "critic_value", "reward_head", "rm_head", "output_layer", "frozen_head")
    decoder = {n: t for n, t in tensors.items() if not n.startswith(tuple(f"{start}." for start in starts))}
    head = {n: t for n, t in tensors.items() if n not in decoder and not n.startswith("frozen_head.")}
    model = AutoModel.from_config(AutoModel.from_pretrained(path).config).to(next(iter(decoder.values())).dtype)
    plain = {n.removeprefix("model."): t for n, t in decoder.items() if n != "lm_head.weight"}
    model.load_state_dict(plain)
    kinds = {n.split(".", 1)[1].removeprefix("summary."): t for n, t in head.items()}
    layers: nn.Module = nn.Linear(H, 1, bias="bias" in kinds)
    if "0.weight" in kinds:
        width, inner = kinds["0.weight"].shape
        layers = nn.Sequential(nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, 1))
    elif kinds["weight"].shape[1] != H:
        layers = nn.Linear(kinds["weight"].shape[1], 1)
    layers.load_state_dict(kinds)
    with torch.no_grad():
        hidden = [model.eval()(torch.tensor([row])).last_hidden_state[0, -1].float() for row in ROWS]
        return torch.cat([layers(state) for state in hidden])


@pytest.mark.parametrize("batch", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", [*LINEAR, *MLP])
def test_it_scores_as_the_layers_of_the_framework(
    name: str, batch: tuple[torch.Tensor, torch.Tensor], tiny: Path, tmp_path: Path
) -> None:
    path = build(name, tiny, tmp_path / "checkpoint")
    atol = 0.02 if name == "trl-bf16" else 1e-6  # padding moves a bf16 hidden state by its last bit
    torch.testing.assert_close(scores(path, batch), by_hand(path), rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["trl", "trl-sharded", "trl-bf16"])
def test_a_recorded_model_of_trl_scores_as_it_did(name: str, tiny: Path, tmp_path: Path) -> None:
    path = build(name, tiny, tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    tensors = bare_tensors(path)
    ids = torch.tensor([ROWS[0]])
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1].float()
        values = nn.functional.linear(hidden, *(tensors[key] for key in HEAD_KEYS)).squeeze(-1)
    torch.testing.assert_close(scores(path, (ids, torch.ones_like(ids))), values[:, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", ["classifier", "token-classifier"])
def test_it_scores_as_the_classifier_of_transformers(
    name: str, batch: tuple[torch.Tensor, torch.Tensor], tiny: Path, tmp_path: Path
) -> None:
    path = build(name, tiny, tmp_path / "checkpoint")
    ids, mask = batch
    with torch.no_grad():
        if name == "classifier":
            model = AutoModelForSequenceClassification.from_pretrained(path)
            model.config.pad_token_id = 0
            expected = model(input_ids=ids, attention_mask=mask).logits[:, 0]
        else:
            logits = AutoModelForTokenClassification.from_pretrained(path)(input_ids=ids, attention_mask=mask).logits
            expected = logits[torch.arange(2), (mask * torch.arange(5)).argmax(-1), 0]
    torch.testing.assert_close(scores(path, batch), expected, rtol=0, atol=1e-6)


def test_the_constant_that_a_classifier_keeps_in_its_config_is_added(tiny: Path, tmp_path: Path) -> None:
    path = build("classifier", tiny, tmp_path / "checkpoint")
    before = scores(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"score_bias": 1.5}))
    torch.testing.assert_close(scores(path), before + 1.5)


@pytest.mark.parametrize("name", OPENRLHF)
def test_a_reward_model_of_openrlhf_is_normalised_as_it_does(name: str, tiny: Path, tmp_path: Path) -> None:
    path = build(name, tiny, tmp_path / "checkpoint")
    torch.testing.assert_close(scores(path), (by_hand(path) - 0.5) / 2.0, rtol=0, atol=1e-6)
    torch.testing.assert_close(scores(path, normalised=False), by_hand(path), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*LINEAR, *MLP, *OPENRLHF, "classifier", "token-classifier"])
def test_split_it_scores_the_same(name: str, tiny: Path, tmp_path: Path) -> None:
    path = build(name, tiny, tmp_path / "checkpoint")
    before = scores(path)
    assert fix_valuehead(path, head=FRAMEWORKS[name].head).changed
    assert torch.equal(scores(path), before)


@pytest.mark.parametrize("name", [*LINEAR, *MLP, *OPENRLHF, "classifier", "token-classifier"])
def test_saved_again_it_scores_the_same_and_can_be_restored(name: str, tiny: Path, tmp_path: Path) -> None:
    model = load(build(name, tiny, tmp_path / "checkpoint"))
    save(model, tmp_path / "again")
    with torch.no_grad():
        expected = model(*RIGHT)
        assert torch.equal(scores(tmp_path / "again"), expected)
        for parameter in model.parameters():
            parameter.zero_()
        restore(model, tmp_path / "again")
        assert torch.equal(model(*RIGHT), expected)


@pytest.mark.parametrize("layout", [name for name in heads.LAYOUTS if name != "in_the_middle"])
def test_every_place_in_the_files(layout: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.LAYOUTS[layout](tiny, tmp_path / "checkpoint")
    head = load(path).v_head.summary
    assert torch.equal(head.weight, heads.HEAD["v_head.summary.weight"])
    assert torch.equal(head.bias, heads.HEAD["v_head.summary.bias"])
    torch.testing.assert_close(scores(path), by_hand(path), rtol=0, atol=0.02 if "start" in layout else 1e-6)


def test_wrappers_inside_of_names(tiny: Path, tmp_path: Path) -> None:
    flat = heads.flat(tiny, tmp_path / "flat")
    path = Path(shutil.copytree(flat, tmp_path / "wrapped"))
    tensors = load_file(path / "model.safetensors")
    inner = {n.replace("layers.1.", "layers.1._checkpoint_wrapped_module._orig_mod."): t for n, t in tensors.items()}
    save_file(
        {f"module.pretrained_model.{n}" if n not in heads.HEAD else n: t for n, t in inner.items()},
        path / "model.safetensors",
    )
    assert torch.equal(scores(path), scores(flat))


def test_a_head_in_a_pickle_beside_the_adapter_of_trl(tmp_path: Path) -> None:
    base = tmp_path / "base"
    recorded("trl-valuehead-single")(tmp_path, base)
    path = tmp_path / "lora"
    recorded("trl-valuehead-lora")(tmp_path, path)
    with_head = load(path, base)
    stored = torch.load(path / "pytorch_model.bin", weights_only=True)
    assert torch.equal(with_head.v_head.summary.weight, stored["v_head.summary.weight"])
    assert with_head.has_adapter
    before = scores(path, base=base)
    assert fix_valuehead(path).changed
    assert torch.equal(scores(path, base=base), before)


def test_an_adapter_of_a_classifier_scores_as_peft_does(tiny: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForSequenceClassification

    torch.manual_seed(0)
    peft_classifier(tiny, tmp_path / "lora")
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    changed = {name: tensor + 0.1 if "lora_B" in name else tensor for name, tensor in tensors.items()}
    save_file(changed, tmp_path / "lora" / "adapter_model.safetensors", {"format": "pt"})
    live = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "lora", num_labels=1).eval()
    ids = torch.tensor([ROWS[0]])
    with torch.no_grad():
        expected = live(input_ids=ids).logits[:, 0]
    torch.testing.assert_close(scores(tmp_path / "lora", (ids, torch.ones_like(ids))), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["zero3-valuehead-final", "hf-trainer-valuehead"])
def test_a_model_without_config_takes_that_of_its_base(name: str, tmp_path: Path) -> None:
    recorded("trl-valuehead-single")(tmp_path, tmp_path / "base")
    recorded(name)(tmp_path, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(tmp_path / "checkpoint")
    found = scores(tmp_path / "checkpoint", base=tmp_path / "base")
    shutil.copy(tmp_path / "base/config.json", tmp_path / "checkpoint")
    torch.testing.assert_close(found, by_hand(tmp_path / "checkpoint"), rtol=0, atol=1e-6)


def test_padding_on_the_left_does_not_move_learned_positions(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    decoder = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=H, n_layer=2, n_head=4, n_positions=32))
    decoder.save_pretrained(tmp_path, state_dict={**decoder.state_dict(), **heads.HEAD})
    torch.testing.assert_close(scores(tmp_path, LEFT), scores(tmp_path, RIGHT), rtol=0, atol=1e-6)


def test_the_page_on_value_heads_has_every_layout_of_the_catalogue() -> None:
    page = (Path(__file__).parents[1] / "docs" / "value-heads.md").read_text()
    for layout in LAYOUTS:
        for framework in layout.frameworks.split(", "):
            assert framework in page
        assert layout.label in page


FAMILIES: dict[str, dict[str, int]] = {
    "Qwen2ForSequenceClassification": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "Gemma2ForSequenceClassification": {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    "GPT2ForSequenceClassification": {"n_embd": H, "n_layer": 2, "n_head": 4},
    "GPT2ForTokenClassification": {"n_embd": H, "n_layer": 2, "n_head": 4},
    "GPTNeoXForTokenClassification": {"num_hidden_layers": 2, "num_attention_heads": 4},
    "OPTForSequenceClassification": {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48},
    "BloomForSequenceClassification": {"n_layer": 2, "n_head": 4},
    "FalconForTokenClassification": {"num_hidden_layers": 2, "num_attention_heads": 4},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_it_scores_as_the_classifier_of_each_family(name: str, tmp_path: Path) -> None:
    model_class = getattr(transformers, name)
    sizes = {"vocab_size": 64, "hidden_size": H, "intermediate_size": 48, "num_labels": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**sizes, **FAMILIES[name]})).eval()
    model.save_pretrained(tmp_path)
    ids, mask = RIGHT
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[..., 0]
    expected = logits if logits.dim() == 1 else logits[torch.arange(2), (mask * torch.arange(5)).argmax(-1)]
    torch.testing.assert_close(scores(tmp_path), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(scores(tmp_path, LEFT), expected, rtol=0, atol=1e-6)
