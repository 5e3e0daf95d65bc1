"""A reward model is the same reward model as a classifier, and as a value head again."""

import json
import shutil
from pathlib import Path
from typing import Any

import actor_critic
import heads
import pytest
import torch
from loading import loaded
from safetensors.torch import load_file, save_file, save_model
from snapshots import contents, state
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.export_reward_model import export_reward_model
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.scores import largest_difference
from tools.training.value_head import load

SEQUENCE, TOKEN, VALUE_HEAD = "sequence-classification", "token-classification", "value-head"
AUTO = {SEQUENCE: AutoModelForSequenceClassification, TOKEN: AutoModelForTokenClassification}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "qwen2": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": True},
    "phi": {},
}


def reward_model(path: Path, model_type: str = "llama", **fields: Any) -> Path:
    """A causal LM of this family with TRL's head among its tensors."""
    model = actor_critic.build(model_type, **{**FAMILIES[model_type], **fields}).policy
    model.save_pretrained(path, state_dict={**model.state_dict(), **heads.HEAD})
    return path


def padded(path: Path) -> Path:
    """With a padding token in config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    return path


def scores(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What a classifier says at the last token of each row, positions counted from the first."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    shifted = {} if mask[:, 0].all() else {"position_ids": positions}
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, **shifted).logits
    if logits.dim() == 2:
        return logits[:, 0]
    last = (mask * torch.arange(mask.shape[1])).argmax(-1)
    return logits[torch.arange(len(last)), last, 0]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three rows of 9, 6 and 3 tokens, padded right and left."""
    rows = [list(range(3, 12)), list(range(20, 26)), [40, 41, 42]]
    right = torch.tensor([row + [0] * (9 - len(row)) for row in rows])
    left = torch.tensor([[0] * (9 - len(row)) + row for row in rows])
    return [(ids, (ids != 0).long()) for ids in (right, left)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", [SEQUENCE, TOKEN])
def test_a_classifier_scores_as_the_value_head_did(family: str, form: str, tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm", family)
    before = state(path)
    report = export_reward_model(path, output=tmp_path / "classifier", to=form)
    assert report.changed
    assert state(path) == before
    original, classifier = load(path), loaded(AUTO[form], tmp_path / "classifier")
    bias = classifier.config.score_bias if form == SEQUENCE else 0.0
    for ids, mask in batches():
        with torch.no_grad():
            expected = original(ids, mask)
        torch.testing.assert_close(scores(classifier, ids, mask) + bias, expected, rtol=0, atol=1e-6)
    assert classifier.config.num_labels == 1
    assert classifier.config.architectures == [type(classifier).__name__]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", [SEQUENCE, TOKEN])
def test_the_way_back_gives_every_tensor_again(family: str, form: str, tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm", family)
    export_reward_model(path, output=tmp_path / "classifier", to=form)
    export_reward_model(tmp_path / "classifier", output=tmp_path / "back", to=VALUE_HEAD, base=path)
    ours = load_file(tmp_path / "back/model.safetensors") | load_file(tmp_path / "back/value_head.safetensors")
    theirs = load_file(path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    loaded(AutoModelForCausalLM, tmp_path / "back")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path / "back"))
    assert after == before


@pytest.mark.parametrize("layout", ["flat", "prefixed", "sharded", "pickled", "at_start_prefixed"])
def test_every_layout_of_the_files(layout: str, tiny: Path, tmp_path: Path) -> None:
    path = padded(heads.LAYOUTS[layout](tiny, tmp_path / "rm"))
    export_reward_model(path, output=tmp_path / "classifier")
    classifier = loaded(AutoModelForSequenceClassification, tmp_path / "classifier")
    found = {}
    for file in (tmp_path / "classifier").glob("*.safetensors"):
        found |= load_file(file)
    assert torch.equal(found["score.weight"], heads.HEAD["v_head.summary.weight"])
    assert classifier.config.score_bias == 0.25
    assert not list((tmp_path / "classifier").glob("*.bin"))


def test_a_head_in_a_file_of_its_own(tiny: Path, tmp_path: Path) -> None:
    path = padded(heads.flat(tiny, tmp_path / "rm"))
    export_reward_model(path, output=tmp_path / "one")
    fix_valuehead(path)
    export_reward_model(path, output=tmp_path / "other")
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    assert not (tmp_path / "other/value_head.safetensors").exists()


def test_a_fp32_head_on_a_bf16_decoder_keeps_its_bytes(tiny: Path, tmp_path: Path) -> None:
    path = padded(heads.at_start(tiny, tmp_path / "rm"))
    export_reward_model(path, output=tmp_path / "classifier", to=TOKEN)
    found = load_file(tmp_path / "classifier/model.safetensors")
    assert torch.equal(found["score.weight"], heads.HEAD["v_head.summary.weight"])
    assert found["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_bias_survives_config_json_to_the_bit(dtype: torch.dtype, tiny: Path, tmp_path: Path) -> None:
    path = padded(heads.flat(tiny, tmp_path / "rm"))
    head = {name: tensor.to(dtype) for name, tensor in heads.HEAD.items()}
    head["v_head.summary.bias"] = torch.tensor([0.1]).to(dtype)
    save_file(load_file(path / "model.safetensors") | head, path / "model.safetensors")
    export_reward_model(path, output=tmp_path / "classifier")
    assert (
        json.loads((tmp_path / "classifier/config.json").read_text())["score_bias"]
        == head["v_head.summary.bias"].double().item()
    )
    export_reward_model(tmp_path / "classifier", output=tmp_path / "back", to=VALUE_HEAD, base=tiny)
    assert torch.equal(
        load_file(tmp_path / "back/value_head.safetensors")["v_head.summary.bias"], head["v_head.summary.bias"]
    )


@pytest.mark.parametrize(
    ("dtype", "bias", "expected"),
    [
        (torch.float16, 100000.0, torch.float32),
        (torch.bfloat16, 0.10000000149011612, torch.float32),  # of a float32 head
        (torch.float16, 0.1, torch.float64),
        (torch.float16, 0.25, torch.float16),
        (torch.float8_e4m3fn, 0.25, torch.float32),
        (torch.float32, 1e300, torch.float64),
    ],
)
def test_a_bias_that_the_dtype_of_the_weight_does_not_hold(
    dtype: torch.dtype, bias: float, expected: torch.dtype, tiny: Path, tmp_path: Path
) -> None:
    export_reward_model(padded(heads.flat(tiny, tmp_path / "rm")), output=tmp_path / "classifier")
    tensors = load_file(tmp_path / "classifier/model.safetensors")
    tensors["score.weight"] = tensors["score.weight"].to(dtype)
    save_file(tensors, tmp_path / "classifier/model.safetensors")
    config = json.loads((tmp_path / "classifier/config.json").read_text())
    (tmp_path / "classifier/config.json").write_text(json.dumps(config | {"score_bias": bias}))
    export_reward_model(tmp_path / "classifier", output=tmp_path / "back", to=VALUE_HEAD, base=tiny)
    found = load_file(tmp_path / "back/value_head.safetensors")["v_head.summary.bias"]
    assert (found.dtype, found.double().item()) == (expected, bias)


OTHER_HEADS = {
    "DeepSpeed-Chat": ("v_head.weight", "rwtransformer.", "LlamaForCausalLM"),
    "OpenRLHF": ("score.weight", "model.", "RewardModel"),
    "older OpenRLHF": ("value_head.weight", "model.", "LlamaForCausalLM"),
}


OF_OPENRLHF = {"normalize_reward": True, "mean": 0.5, "std": 2.0, "pad_token_id": 0}


@pytest.mark.parametrize("framework", OTHER_HEADS)
def test_heads_of_other_frameworks(framework: str, tiny: Path, tmp_path: Path) -> None:
    name, prefix, architecture = OTHER_HEADS[framework]
    path = Path(shutil.copytree(tiny, tmp_path / "rm"))
    decoder = {n: t for n, t in load_file(path / "model.safetensors").items() if n != "lm_head.weight"}
    renamed = {prefix + n.removeprefix("model."): tensor for n, tensor in decoder.items()}
    weight = heads.HEAD["v_head.summary.weight"]
    save_file(renamed | {name: weight}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture], **OF_OPENRLHF}))
    report = export_reward_model(path, output=tmp_path / "classifier", verify=True)
    assert report.details["reward"] == "(score - 0.5) / 2.0, by mean and std in config.json"
    found = load_file(tmp_path / "classifier/model.safetensors")
    assert found.keys() == decoder.keys() | {"score.weight"}
    assert torch.equal(found["score.weight"], weight)
    classifier = loaded(AutoModelForSequenceClassification, tmp_path / "classifier")
    assert not hasattr(classifier.config, "score_bias")
    export_reward_model(path, output=tmp_path / "token", to=TOKEN)
    assert torch.equal(load_file(tmp_path / "token/model.safetensors")["score.bias"], torch.zeros(1))


def test_a_wrapper_of_bare_decoders_before_the_names_of_a_whole_model(tiny: Path, tmp_path: Path) -> None:
    path = padded(heads.flat(tiny, tmp_path / "rm", prefix="rwtransformer."))
    export_reward_model(path, output=tmp_path / "classifier")
    loaded(AutoModelForSequenceClassification, tmp_path / "classifier")


def test_one_classifier_becomes_the_other(tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm")
    export_reward_model(path, output=tmp_path / "token", to=TOKEN)
    export_reward_model(tmp_path / "token", output=tmp_path / "sequence", to=SEQUENCE, head="score")
    export_reward_model(tmp_path / "sequence", output=tmp_path / "token again", to=TOKEN)
    names = [tmp_path / name / "model.safetensors" for name in ("token", "token again")]
    one, other = (load_file(name) for name in names)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert largest_difference(path, tmp_path / "sequence") <= 1e-6
    assert "score_bias" not in json.loads((tmp_path / "token again/config.json").read_text())


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_embeddings_that_a_save_kept_as_lm_head_alone(family: str, tmp_path: Path) -> None:
    """As safetensors' save_model leaves tied weights: one name, the other noted in the metadata."""
    path = reward_model(tmp_path / "rm", family, vocab_size=80)
    model = AutoModelForCausalLM.from_pretrained(path)
    expected = model.get_input_embeddings().weight
    model.v_head = torch.nn.ModuleDict({"summary": torch.nn.Linear(32, 1)})
    save_model(model, str(path / "model.safetensors"))
    assert [n for n, t in load_file(path / "model.safetensors").items() if t.shape == expected.shape] == [
        "lm_head.weight"
    ]
    export_reward_model(path, output=tmp_path / "classifier", verify=True)
    classifier = loaded(AutoModelForSequenceClassification, tmp_path / "classifier")
    assert torch.equal(classifier.get_input_embeddings().weight, expected)
    save_model(torch.nn.ModuleDict({"pretrained_model": model}), str(path / "model.safetensors"))
    fix_valuehead(path)
    export_reward_model(path, output=tmp_path / "of split", verify=True)
    save_file(load_file(path / "model.safetensors"), path / "model.safetensors")  # nobody noted the other name
    with pytest.raises(CheckpointError, match=r"the tied embeddings are here as lm_head.weight alone"):
        export_reward_model(path, output=tmp_path / "other")


def test_vh_13_a_model_that_is_a_classifier_already_is_copied(tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm")
    export_reward_model(path, output=tmp_path / "classifier")
    report = export_reward_model(tmp_path / "classifier", output=tmp_path / "copy")
    assert report.summary == "a sequence-classification model already; copied unchanged"
    assert contents(tmp_path / "classifier") == contents(tmp_path / "copy")


@pytest.mark.parametrize("form", [SEQUENCE, TOKEN])
@pytest.mark.parametrize("labels", [None, {"0": "bad", "1": "good"}])
def test_a_classifier_of_one_output_gets_one_label(labels: Any, form: str, tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm")
    export_reward_model(path, output=tmp_path / "classifier", to=form)
    config = json.loads((tmp_path / "classifier/config.json").read_text())
    fields = {name: value for name, value in config.items() if name not in ("id2label", "label2id")}
    odd = fields | ({"id2label": labels, "label2id": {"bad": 0, "good": 1}} if labels else {})
    (tmp_path / "classifier/config.json").write_text(json.dumps(odd))
    export_reward_model(tmp_path / "classifier", output=tmp_path / "out", to=form)
    loaded(AUTO[form], tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == config
    assert largest_difference(path, tmp_path / "out") <= 1e-6


def test_a_bias_beyond_every_float_is_refused(tiny: Path, tmp_path: Path) -> None:
    export_reward_model(padded(heads.flat(tiny, tmp_path / "rm")), output=tmp_path / "classifier")
    config = json.loads((tmp_path / "classifier/config.json").read_text())
    (tmp_path / "classifier/config.json").write_text(json.dumps(config | {"score_bias": 10**400}))
    with pytest.raises(CheckpointError, match="not a finite number"):
        export_reward_model(tmp_path / "classifier", output=tmp_path / "out", to=TOKEN)


def test_verify_compares_scores_and_fails_beyond_the_tolerance(tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm")
    report = export_reward_model(path, output=tmp_path / "classifier", verify=True)
    assert report.details["largest difference of scores"] <= 1e-6
    assert "; scores within " in report.summary
    with pytest.raises(CheckpointError, match=r"scores differ from .* by up to .*, more than -1"):
        export_reward_model(path, output=tmp_path / "token", to=TOKEN, verify=True, tolerance=-1)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"v_head.summary.bias": torch.tensor([0.5])}, path / "model.safetensors")
    assert largest_difference(path, tmp_path / "classifier") == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"vocab_size": None}, "vocab_size in config.json is None, so there are no tokens to score"),
        ({"tie_word_embeddings": "false"}, r"does not load as a .* \(.*tie_word_embeddings"),
        ({"id2label": "none"}, r"does not load as a causal LM \("),
    ],
)
def test_verify_says_why_nothing_can_be_compared(
    fields: dict[str, Any], problem: str, tiny: Path, tmp_path: Path
) -> None:
    path = padded(heads.flat(tiny, tmp_path / "rm"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError, match=problem):
        export_reward_model(path, output=tmp_path / "classifier", verify=True)


def test_a_classifier_that_lacks_weights_has_no_scores(tmp_path: Path) -> None:
    export_reward_model(reward_model(tmp_path / "rm"), output=tmp_path / "classifier")
    tensors = load_file(tmp_path / "classifier/model.safetensors")
    save_file({n: t for n, t in tensors.items() if "embed" not in n}, tmp_path / "classifier/model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 weights are missing and would be random: model.embed_tokens.weight"):
        largest_difference(tmp_path / "rm", tmp_path / "classifier")


REFUSED: dict[str, dict[str, torch.Tensor | None]] = {
    r"(?=.*v_head.0.weight \[64, 32\])(?=.*one linear layer)": {
        "v_head.0.weight": torch.zeros(64, 32),
        "v_head.0.bias": torch.zeros(64),
        "v_head.2.weight": torch.zeros(1, 64),
        "v_head.2.bias": torch.zeros(1),
        **dict.fromkeys(heads.HEAD),
    },
    r"no value head in the weights or beside them": dict.fromkeys(heads.HEAD),
    r"visual.proj.weight is neither of the decoder of LlamaForCausalLM nor of its value head": {
        "visual.proj.weight": torch.zeros(2, 2)
    },
    r"several value heads: v_head.summary.bias, v_head.summary.weight, score.weight; choose one with --head": {
        "score.weight": torch.zeros(1, 32)
    },
    r"v_head.summary.weight \[1, 16\]: no tensor of the decoder is as wide": {
        "v_head.summary.weight": torch.ones(1, 16)
    },
    r"the bias of its head is nan, not a finite number": {"v_head.summary.bias": torch.tensor([float("nan")])},
    r"v_head.summary.weight has 0 elements": {"v_head.summary.weight": torch.zeros(0)},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_not_understood_is_refused_by_name(problem: str, tiny: Path, tmp_path: Path) -> None:
    path = padded(heads.flat(tiny, tmp_path / "rm"))
    tensors = load_file(path / "model.safetensors") | REFUSED[problem]
    save_file({n: t for n, t in tensors.items() if t is not None}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=problem):
        export_reward_model(path, output=tmp_path / "classifier")
    assert not (tmp_path / "classifier").exists()


@pytest.mark.parametrize("form", [SEQUENCE, TOKEN, VALUE_HEAD])
def test_a_classifier_with_a_head_in_a_file_is_refused(form: Any, tiny: Path, tmp_path: Path) -> None:
    export_reward_model(padded(heads.flat(tiny, tmp_path / "rm")), output=tmp_path / "classifier")
    save_file(heads.HEAD, tmp_path / "classifier/value_head.safetensors")
    with pytest.raises(CheckpointError, match=r"score.weight is in the weights, and a head in value_head.safetensors"):
        export_reward_model(tmp_path / "classifier", output=tmp_path / "out", to=form, base=tiny)
    (tmp_path / "classifier/value_head.safetensors").unlink()
    fix_valuehead(tmp_path / "classifier", head="score")
    with pytest.raises(CheckpointError, match=r"its head was split into .*; run tools join-valuehead first"):
        export_reward_model(tmp_path / "classifier", output=tmp_path / "out", to=form, base=tiny)


def test_an_untied_lm_head_is_asked_for(tiny: Path, tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm")
    export_reward_model(path, output=tmp_path / "classifier")
    with pytest.raises(CheckpointError, match=r"has no lm_head, .*; name the model it was trained from with --base"):
        export_reward_model(tmp_path / "classifier", output=tmp_path / "back", to=VALUE_HEAD)
    small = actor_critic.build(vocab_size=48).policy
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is \[48, 32\], the decoder of .* needs \[64, 32\]"):
        export_reward_model(tmp_path / "classifier", output=tmp_path / "back", to=VALUE_HEAD, base=tmp_path / "small")


def test_an_adapter_is_to_be_merged_first(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1)}, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="an adapter, not a whole model; merge it first: tools merge-adapter"):
        export_reward_model(tmp_path / "adapter", output=tmp_path / "classifier")


@pytest.mark.parametrize(
    ("kind", "form", "problem"),
    [
        ("olmo2", TOKEN, "transformers has no token classifier for olmo2; try --to sequence-classification"),
        ("apertus", SEQUENCE, "transformers has no sequence classifier for apertus; try --to token-classification"),
        ("granite", SEQUENCE, "transformers has no classifier for granite"),
        ("bert", SEQUENCE, "model_type 'bert' is not known to have a classifier that is one linear layer"),
    ],
)
def test_a_family_without_such_a_class_is_refused_by_name(
    kind: str, form: Any, problem: str, tiny: Path, tmp_path: Path
) -> None:
    path = padded(heads.flat(tiny, tmp_path / "rm"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    with pytest.raises(CheckpointError, match=problem):
        export_reward_model(path, output=tmp_path / "classifier", to=form)


def test_a_sequence_classifier_needs_a_padding_token(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "rm")
    with pytest.raises(CheckpointError, match=r"no pad_token_id in config.json or the tokenizer.*; add pad_token_id"):
        export_reward_model(path, output=tmp_path / "classifier")
    export_reward_model(path, output=tmp_path / "classifier", to=TOKEN)
    (path / "generation_config.json").write_text('{"pad_token_id": 7}')
    export_reward_model(path, output=tmp_path / "other")
    assert json.loads((tmp_path / "other/config.json").read_text())["pad_token_id"] == 7


def test_a_padding_token_that_ends_texts_is_pointed_out(tmp_path: Path) -> None:
    report = export_reward_model(reward_model(tmp_path / "rm", pad_token_id=2), output=tmp_path / "classifier")
    assert report.details["pad_token_id"].startswith("2, which is the end token too")
