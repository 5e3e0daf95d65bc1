"""The catalogue: each framework's head is known by names and shapes, and what only resembles one is not."""

from pathlib import Path

import pytest

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import Tensor
from tools.heads.finding import choose_head, find_heads
from tools.heads.wrappers import bare_names, wrapper_of

H, V = 8, 11
MLP = {"0.weight": (2 * H, H), "0.bias": (2 * H,), "2.weight": (1, 2 * H), "2.bias": (1,)}
Q_HEAD = {"0.weight": (2 * H, H), "0.bias": (2 * H,), "2.weight": (V, 2 * H), "2.bias": (V,)}
DENSE = {"dense.weight": (H, H), "dense.bias": (H,), "out_proj.weight": (1, H), "out_proj.bias": (1,)}


def under(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


# framework, label, form, and the tensors as they lie in the file
ROWS = {
    "trl": ("TRL", "v_head", "linear", under("v_head.summary", {"weight": (1, H), "bias": (1,)})),
    "deepspeed-chat": ("DeepSpeed-Chat", "v_head", "linear", {"v_head.weight": (1, H)}),
    "openrlhf": ("OpenRLHF", "value_head", "linear", {"value_head.weight": (1, H)}),
    "reward-head": ("reward models", "reward_head", "linear", {"reward_head.weight": (1, H)}),
    "nemo-aligner": ("NeMo-Aligner", "rm_head", "linear", {"rm_head.weight": (1, H), "rm_head.bias": (1,)}),
    "megatron": ("Megatron", "output_layer", "linear", {"output_layer.weight": (1, H)}),
    "trlx": ("trlx PPO", "v_head", "mlp", under("v_head", MLP)),
    "trlx-value-layers": (
        "trlx PPO with value layers",
        "v_head",
        "branch",
        {
            "v_head.decoder_blocks.0.mlp.weight": (3, 5),
            "v_head.final_norm.weight": (H,),
            **under("v_head.lm_head", MLP),
        },
    ),
    "trlx-ilql": (
        "trlx ILQL",
        "ilql_heads",
        "q-heads",
        {
            **under("ilql_heads.v_head", MLP),
            **under("ilql_heads.q_heads.0", Q_HEAD),
            **under("ilql_heads.q_heads.1", Q_HEAD),
            **under("ilql_heads.target_q_heads.0", Q_HEAD),
            **under("ilql_heads.target_q_heads.1", Q_HEAD),
        },
    ),
    "classifier": ("sequence and token classifiers", "score", "linear", {"score.weight": (1, H)}),
    "token-classifier": ("sequence and token", "score", "linear", under("score", {"weight": (1, H), "bias": (1,)})),
    "bert": ("token classifiers", "classifier", "linear", under("classifier", {"weight": (1, H), "bias": (1,)})),
    "roberta": ("RoBERTa", "classifier", "dense", under("classifier", DENSE)),
    "t5": ("T5", "classification_head", "dense", under("classification_head", DENSE)),
    "qwen": (
        "Qwen",
        "score",
        "mlp",
        under("score", {"0.weight": (H, H), "0.bias": (H,), "2.weight": (1, H), "2.bias": (1,)}),
    ),
    "peft": ("PEFT", "score", "linear", {"base_model.model.score.weight": (1, H)}),
}


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: Tensor("F32", shape, 0, 0) for name, shape in shapes.items()}


MODEL = {"model.embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_catalogue_is_found_alone_and_whole(row: str) -> None:
    framework, label, form, names = ROWS[row]
    [head] = find_heads(tensors({**MODEL, **names}), None)
    assert framework in head.layout.frameworks
    assert (head.label, head.layout.form, head.outputs) == (label, form, 1)
    assert dict(head.names) == {name: name for name in names}


WRAPPED = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod.", "_fsdp_wrapped_module.module.")


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("row", [row for row in ROWS if row != "peft"])
def test_wrappers_do_not_hide_it(row: str, wrapper: str) -> None:
    _, _, _, names = ROWS[row]
    [head] = find_heads(tensors({wrapper + name: shape for name, shape in names.items()}), None)
    assert dict(head.names) == {wrapper + name: name for name in names}


@pytest.mark.parametrize("row", [row for row in ROWS if row != "peft"])
def test_another_shape_is_no_head(row: str) -> None:
    _, _, _, names = ROWS[row]
    for name in names:
        if ".decoder_blocks." in name or ".final_norm." in name:  # layers have any shape
            continue
        assert not find_heads(tensors({**names, name: (*names[name], 7)}), None)
        assert not find_heads(tensors({**names, name: tuple(length + 1 for length in names[name])}), None) or (
            row == "nemo-aligner" or len(names) == 1
        )


FALSE_FRIENDS = {
    "a size, as DeepSeek has": {"model.layers.0.v_head_dim": (1,), "model.num_v_heads": (1,)},
    "a layer inside the model": {"model.v_head.summary.weight": (1, H)},
    "layers without the mlp behind them": {"v_head.decoder_blocks.0.weight": (1, H)},
    "two labels": {"score.weight": (2, H)},
    "an attribute of that name": {"score.weight": (H, H, 3), "score.bias": (H,)},
    "a map to the hidden state": {"classifier.dense.weight": (H, H)},
    "an output layer over the vocabulary": {"output_layer.weight": (V, H)},
    "a longer word": {"v_heads.weight": (1, H), "scores.weight": (1, H)},
    "a bias alone": {"v_head.summary.bias": (1,)},
}


@pytest.mark.parametrize("why", FALSE_FRIENDS)
def test_what_only_resembles_a_head_is_none(why: str) -> None:
    assert not find_heads(tensors({**MODEL, **FALSE_FRIENDS[why]}), None)


DECLARED = {
    "LlamaForSequenceClassification": "classifier",
    "LlamaForTokenClassification": "token-classifier",
    "BertForSequenceClassification": "bert",
    "T5ForSequenceClassification": "t5",
    "RewardModel": "openrlhf",
    "CriticModel": "openrlhf",
    "InternLM2ForRewardModel": "deepspeed-chat",
    "Qwen2ForProcessRewardModel": "qwen",
}


@pytest.mark.parametrize("architecture", DECLARED)
def test_a_head_of_the_architecture_belongs_to_the_model(architecture: str) -> None:
    config = {"architectures": [architecture]}
    _, label, _, names = ROWS[DECLARED[architecture]]
    assert choose_head(Path("x"), tensors(names), config) is None
    assert choose_head(Path("x"), tensors(names), config, label) is not None
    [trl] = find_heads(tensors(ROWS["trl"][3]), config)
    assert not trl.declared


def test_openrlhf_names_its_head_in_the_config() -> None:
    shapes = {**MODEL, "critic_value.weight": (1, H)}
    assert find_heads(tensors(shapes), {}) == ()
    [head] = find_heads(tensors(shapes), {"value_head_prefix": "critic_value", "architectures": ["CriticModel"]})
    assert (head.label, head.declared) == ("critic_value", True)
    for odd in (7, "", "a b", "model.layers"):
        assert find_heads(tensors(shapes), {"value_head_prefix": odd}) == ()


def test_a_process_reward_model_has_two_outputs_and_is_taken_by_request_alone() -> None:
    prm = under("score", {"0.weight": (H, H), "0.bias": (H,), "2.weight": (2, H), "2.bias": (2,)})
    [head] = find_heads(tensors(prm), None)
    assert head.outputs == 2
    assert choose_head(Path("x"), tensors(prm), None) is None
    assert choose_head(Path("x"), tensors(prm), None, "score") == head


def test_names_that_no_head_has_are_refused_beside_one() -> None:
    for odd in ("v_head.bias", "v_head.3.weight"):
        with pytest.raises(CheckpointError, match=rf"{odd} beside v_head.weight: no known head has such a tensor"):
            choose_head(Path("x"), tensors({"v_head.weight": (1, H), odd: (1,)}), None)


TRLX = {**{f"base_model.{name}": shape for name, shape in MODEL.items()}, **ROWS["trlx"][3]}


def test_trlx_wraps_in_base_model_and_peft_does_not() -> None:
    assert bare_names(TRLX)["base_model.lm_head.weight"] == "lm_head.weight"
    decoder = [name for name in TRLX if name.startswith("base_model.")]
    assert wrapper_of(Path("x"), decoder, TRLX) == "base_model."
    inside = "base_model.model.model.layers.0.q_proj.lora_A.weight"
    assert bare_names([inside])[inside] == inside
    assert bare_names([inside, *ROWS["trlx"][3]])[inside] == inside
    assert bare_names([f"base_model.{inside}", *ROWS["trlx"][3]])[f"base_model.{inside}"] == inside
    [head] = find_heads(tensors({**TRLX, "frozen_head.lm_head.weight": (V, H)}), None)
    assert dict(head.companions) == {"frozen_head.lm_head.weight": "frozen_head.lm_head.weight"}


NESTED = {
    "module.model.layers.0.a": ("module.", "model.layers.0.a"),
    "_orig_mod.module.model.a": ("_orig_mod.module.", "model.a"),
    "pretrained_model._orig_mod.model.a": ("pretrained_model._orig_mod.", "model.a"),
    "_fsdp_wrapped_module.pretrained_model.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.a": (
        "_fsdp_wrapped_module.pretrained_model.",
        "model.layers.0.a",
    ),
    "model.layers.0._orig_mod.a": ("", "model.layers.0.a"),
    "rwtransformer.layers.0.a": ("rwtransformer.", "layers.0.a"),
    "model.module.a": ("", "model.module.a"),
    "model.my_orig_mod.a": ("", "model.my_orig_mod.a"),
}


@pytest.mark.parametrize("name", NESTED)
def test_wrappers_in_any_nesting(name: str) -> None:
    wrapper, bare = NESTED[name]
    assert (wrapper_of(Path("x"), [name]), bare_names([name])[name]) == (wrapper, bare)


def test_a_mixture_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"only a part of the names have a wrapper prefix: b, module.a"):
        wrapper_of(Path("x"), ["module.a", "b"])
    with pytest.raises(CheckpointError, match=r"a.b and a._orig_mod.b are the same tensor of the model, a.b"):
        wrapper_of(Path("x"), ["a.b", "a._orig_mod.b"])
