"""Heads that contradict each other, are damaged or belong to something else: refused by name, nothing written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import state

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.report import Report
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.inspect import inspect
from tools.postprocess.join_valuehead import join_valuehead

Recorded = Callable[[str], Path]
ONE, TWO = torch.ones(1, 32), torch.ones(2, 32)
OTHER = {name: tensor + 1 for name, tensor in heads.HEAD.items()}


def refused(step: Callable[..., Report], path: Path, message: str, **options: Any) -> None:
    before = state(path)
    with pytest.raises(CheckpointError, match=message):
        step(path, **options)
    assert state(path) == before


def model_with(tiny: Path, path: Path, extra: dict[str, torch.Tensor], prefix: str = "") -> Path:
    heads.flat(tiny, path)
    decoder = {prefix + name: tensor for name, tensor in load_file(tiny / "model.safetensors").items()}
    save_file({name: t.clone() for name, t in (decoder | extra).items()}, path / "model.safetensors")
    return path


# the tensors beside those of the model, and what both commands say
IN_THE_WEIGHTS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "un-gathered": (
        {"v_head.summary.weight": torch.ones(0)},
        r"v_head.summary.weight has 0 elements: looks like an un-gathered ZeRO-3",
    ),
    "twice, wrapped and not": (
        {"v_head.weight": ONE, "module.v_head.weight": ONE + 1},
        r"the value head is there twice: .*v_head.weight, .*v_head.weight; keep one",
    ),
    "two of one framework": (
        {"v_head.weight": ONE, "v_head.bias": torch.ones(1)},
        r"v_head.bias beside v_head.weight: no known head has such a tensor",
    ),
    "two candidates": (
        {"value_head.weight": ONE, "score.weight": ONE},
        r"several value heads: value_head.weight, score.weight; choose one with --head",
    ),
    "a policy and a critic": (
        {"policy.lm_head.weight": ONE, "value_model.score.weight": ONE},
        r"a policy with its value model: policy.lm_head.weight, value_model.score.weight; run tools split-actor-critic",
    ),
}


@pytest.mark.parametrize("step", [fix_valuehead, join_valuehead])
@pytest.mark.parametrize("why", IN_THE_WEIGHTS)
def test_bad_heads_in_the_weights(why: str, step: Callable[..., Report], tiny: Path, tmp_path: Path) -> None:
    extra, message = IN_THE_WEIGHTS[why]
    refused(step, model_with(tiny, tmp_path / "checkpoint", extra), message)


@pytest.mark.parametrize("wrapper", ["pretrained_model.", "module.", "_orig_mod.", "rwtransformer."])
def test_half_of_the_names_wrapped(wrapper: str, tiny: Path, tmp_path: Path) -> None:
    path = model_with(tiny, tmp_path / "checkpoint", {f"{wrapper}a": torch.ones(1), "v_head.weight": ONE})
    message = rf"only a part of the names have a wrapper prefix: .*{wrapper}a"
    refused(fix_valuehead, path, message)
    tensors = load_file(path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "v_head.weight"}, path / "model.safetensors")
    if wrapper == "module.":  # without a head it may be a part of the model
        assert not fix_valuehead(path).changed
    else:
        refused(fix_valuehead, path, message)


def test_two_names_of_one_tensor(tiny: Path, tmp_path: Path) -> None:
    extra = {"model._orig_mod.norm.weight": torch.ones(32), "v_head.weight": ONE}
    path = model_with(tiny, tmp_path / "checkpoint", extra)
    refused(fix_valuehead, path, r"model._orig_mod.norm.weight and model.norm.weight are the same tensor of the model")


@pytest.mark.parametrize("step", [fix_valuehead, join_valuehead])
def test_a_head_file_with_other_values(step: Callable[..., Report], tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    save_file(OTHER, path / "value_head.safetensors")
    refused(step, path, r"v_head.summary.* in the weights differ from what value_head.safetensors holds")
    save_file(heads.HEAD, path / "value_head.safetensors")
    report = step(path)
    assert report.changed
    assert step(path).changed is False


@pytest.mark.parametrize("step", [fix_valuehead, join_valuehead])
def test_a_head_in_safetensors_and_in_bin(step: Callable[..., Report], tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    save_file(heads.HEAD, path / "value_head.safetensors")
    torch.save(OTHER, path / "value_head.bin")
    refused(
        step, path, r"both value_head.safetensors and value_head.bin are here for v_head.summary.*; remove the older"
    )


@pytest.mark.parametrize("where", ["single", "sharded"])
@pytest.mark.parametrize("step", [fix_valuehead, join_valuehead])
def test_a_head_in_weights_of_both_kinds(step: Callable[..., Report], where: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    torch.save(OTHER, path / "pytorch_model-1.bin")
    if where == "single":
        (path / "pytorch_model-1.bin").rename(path / "pytorch_model.bin")
    else:
        weight_map = dict.fromkeys(OTHER, "pytorch_model-1.bin")
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(step, path, r"v_head.summary.* in pytorch_model.bin and in model.safetensors; keep one of the two")


@pytest.mark.parametrize("step", [fix_valuehead, join_valuehead])
def test_an_index_that_names_a_head_no_shard_holds(step: Callable[..., Report], tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    last = path / "model-00003-of-00003.safetensors"
    save_file({name: t for name, t in load_file(last).items() if "v_head" not in name}, last)
    refused(step, path, r"says v_head.summary.bias is in model-00003-of-00003.safetensors, but it is in None")


@pytest.mark.parametrize("listed", ["v_head", "score"])
@pytest.mark.parametrize("step", [fix_valuehead, join_valuehead])
def test_modules_to_save_without_the_head(step: Callable[..., Report], listed: str, recorded: Recorded) -> None:
    path = recorded("trl-valuehead-lora")
    (path / "pytorch_model.bin").unlink()
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"modules_to_save": [listed]}))
    refused(step, path, rf"modules_to_save lists {listed}, of which adapter_model.safetensors has no tensor; was the")


@pytest.mark.parametrize("name", ["model.safetensors", "value_head.safetensors"])
@pytest.mark.parametrize("step", [fix_valuehead, join_valuehead])
def test_vh_12_a_partitioned_placeholder_is_no_head(
    name: str, step: Callable[..., Report], tiny: Path, tmp_path: Path
) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    placeholder = {"v_head.summary.weight": torch.ones(0), "v_head.summary.bias": torch.ones(1)}
    save_file({**load_file(tiny / "model.safetensors"), **placeholder} if "model" in name else placeholder, path / name)
    refused(step, path, r"weight has 0 elements: looks like an un-gathered ZeRO-3")


def test_two_labels_are_no_value_head(tiny: Path, tmp_path: Path) -> None:
    path = model_with(tiny, tmp_path / "checkpoint", {"score.weight": TWO})
    assert not fix_valuehead(path).changed
    refused(fix_valuehead, path, r"one output, and these are score.weight \[2, 32\]", head="score")
    refused(fix_valuehead, path, r"no value head called scores; known names are v_head, value_head", head="scores")


@pytest.mark.parametrize(
    "odd",
    [{"score.weight": TWO}, {"v_head.weight": ONE, "extra": ONE}, {"v_head.weight": ONE, "score.weight": ONE}, {}],
    ids=["two labels", "more than a head", "two heads", "empty"],
)
def test_a_head_file_that_is_not_one_head(odd: dict[str, torch.Tensor], tiny: Path, tmp_path: Path) -> None:
    path = model_with(tiny, tmp_path / "checkpoint", {})
    save_file({name: tensor.clone() for name, tensor in odd.items()}, path / "value_head.safetensors")
    refused(join_valuehead, path, r"value_head.safetensors: .*not one value head of a known framework")


def test_a_name_of_the_model_that_the_head_would_take(tiny: Path, tmp_path: Path) -> None:
    path = model_with(tiny, tmp_path / "checkpoint", {"score.weight": TWO})
    save_file({"score.weight": ONE}, path / "value_head.safetensors")
    refused(join_valuehead, path, r"score.weight is there already, and is no value head")


def test_a_name_in_another_shard_that_the_head_would_take(tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    fix_valuehead(path)
    first, index = path / "model-00001-of-00003.safetensors", path / "model.safetensors.index.json"
    save_file(load_file(first) | {"v_head.summary.weight": TWO}, first)
    changed = json.loads(index.read_text())
    changed["weight_map"]["v_head.summary.weight"] = first.name
    index.write_text(json.dumps(changed))
    refused(join_valuehead, path, r"00001-of-00003.*v_head.summary.weight is there already, and is no value head")


def test_a_classifier_with_another_head_in_a_file(recorded: Recorded) -> None:
    path = recorded("hf-reward-model")
    own = load_file(path / "model.safetensors")["score.weight"]
    save_file({"score.weight": own + 1}, path / "value_head.safetensors")
    refused(join_valuehead, path, r"score.weight in the weights differ from what value_head.safetensors holds")
    save_file({"score.weight": own}, path / "value_head.safetensors")
    assert join_valuehead(path).removed == ("value_head.safetensors",)


def test_another_head_in_the_weights(tiny: Path, tmp_path: Path) -> None:
    path = model_with(tiny, tmp_path / "checkpoint", {"score.weight": ONE})
    save_file(heads.HEAD, path / "value_head.safetensors")
    refused(join_valuehead, path, r"score.weight in the weights differ from what value_head.safetensors holds")
    refused(fix_valuehead, path, r"score.weight in the weights differ from what value_head.safetensors holds")


def test_vh_09_of_two_candidates_one_is_chosen(tiny: Path, tmp_path: Path) -> None:
    path = model_with(tiny, tmp_path / "checkpoint", {"value_head.weight": ONE, "score.weight": ONE})
    fix_valuehead(path, head="score")
    assert load_file(path / "value_head.safetensors").keys() == {"score.weight"}
    assert "value_head.weight" in load_file(path / "model.safetensors")


def test_vh_13_a_classifier_that_has_a_head_keeps_it(tiny: Path, tmp_path: Path) -> None:
    path = model_with(tiny, tmp_path / "checkpoint", {"score.weight": ONE})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    before = state(path)
    report = fix_valuehead(path)
    expected = "score.weight belongs to LlamaForSequenceClassification; nothing to do (--head score splits it out)"
    assert (report.changed, report.summary) == (False, expected)
    assert state(path) == before
    assert "part of the model" in inspect(path).details["value head in the weights"]["score.weight"]
