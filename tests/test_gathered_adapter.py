"""A LoRA adapter among the gathered weights of its model becomes the adapter that PEFT itself saves."""

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
from tools.postprocess.fix_valuehead import fix_valuehead

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "rslora with patterns": {
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"v_proj": 3},
    },
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "lora bias": {"target_modules": ["q_proj"], "lora_bias": True},
}


def gathered(
    tiny: Path, path: Path, *, wrapper: str = "pretrained_model.", suffix: str = ".safetensors", **options: Any
) -> dict[str, torch.Tensor]:
    """What HF Trainer leaves of TRL's wrapper over a PEFT model under ZeRO-3; returns what PEFT saves of it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    expected = path.with_name("expected")
    model.save_pretrained(expected)
    path.mkdir()
    (path / "adapter_config.json").write_bytes((expected / "adapter_config.json").read_bytes())
    tensors = {wrapper + name: tensor.clone() for name, tensor in model.state_dict().items()} | heads.HEAD
    if suffix == ".bin":
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return load_file(expected / "adapter_model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_adapter_is_the_one_that_peft_saves(option: str, tiny: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = tmp_path / "checkpoint"
    expected = gathered(tiny, path, **OPTIONS[option])
    report = fix_valuehead(path)
    assert report.written == ("adapter_model.safetensors", "value_head.safetensors")
    assert report.removed == ("model.safetensors",)
    assert "tensors of its base left out" in report.summary
    assert same(load_file(path / "adapter_model.safetensors"), expected)
    assert same(load_file(path / "value_head.safetensors"), heads.HEAD)
    models = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), folder).eval()
        for folder in (path, tmp_path / "expected")
    ]
    with torch.no_grad():
        ours, theirs = (model(torch.arange(10)[None]).logits for model in models)
    assert torch.equal(ours, theirs)
    assert "nothing to do" in fix_valuehead(path).summary


def test_what_deepspeed_gathered_is_what_peft_loads(recorded: Callable[[str], Path], tiny: Path) -> None:
    from peft import PeftModel
    from transformers import AutoConfig, LlamaForCausalLM

    path = recorded("zero3-valuehead-lora")
    live = load_file(path / "model.safetensors")
    wrapper, inside = "pretrained_model.", "pretrained_model.base_model.model."
    report = fix_valuehead(path)
    assert "8 tensors of the LoRA adapter under the names of PEFT; 21 tensors of its base left out" in report.summary
    base = {n.removeprefix(inside).replace(".base_layer", ""): t for n, t in live.items() if n.startswith(inside)}
    model = LlamaForCausalLM(AutoConfig.from_pretrained(tiny))
    model.load_state_dict({name: tensor for name, tensor in base.items() if ".lora_" not in name})
    loaded = PeftModel.from_pretrained(model, path).state_dict()
    assert {wrapper + name for name in loaded} | heads.HEAD.keys() == live.keys()
    assert all(torch.equal(tensor, live[wrapper + name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("wrapper", ["", "module.pretrained_model.", "_fsdp_wrapped_module.pretrained_model."])
def test_whatever_the_wrapper_and_the_file(wrapper: str, suffix: str, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    expected = gathered(tiny, path, wrapper=wrapper, suffix=suffix, **OPTIONS["plain"])
    fix_valuehead(path)
    found = path / f"adapter_model{suffix}"
    ours = torch.load(found, weights_only=True) if suffix == ".bin" else load_file(found)
    assert same(ours, expected)


def test_an_adapter_that_peft_saved_as_well_is_kept_when_it_is_the_same(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    expected = gathered(tiny, path, **OPTIONS["plain"])
    save_file({name: tensor + 1 for name, tensor in expected.items()}, path / "adapter_model.safetensors")
    before = state(path)
    with pytest.raises(CheckpointError, match=r"lora_A.weight in model.safetensors differs from that in adapter_model"):
        fix_valuehead(path)
    assert state(path) == before
    save_file(expected, path / "adapter_model.safetensors")
    report = fix_valuehead(path)
    assert (report.written, report.removed) == (("value_head.safetensors",), ("model.safetensors",))


def _without_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def _configured(**fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _with_tensor(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors") | {f"pretrained_model.{name}": torch.ones(2)}
        save_file(tensors, path / "model.safetensors")

    return change


Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED = {
    "no config": (_without_config, r"belongs to an adapter, and adapter_config.json is not here; copy it from"),
    "trained biases": (_configured(bias="all"), r"an adapter with LORA with bias=all among the weights"),
    "another method": (_configured(peft_type="IA3"), r"an adapter with IA3 with bias=none"),
    "tokens": (_configured(trainable_token_indices=[1]), r"an adapter with trainable_token_indices"),
    "a second adapter": (_with_tensor(f"{Q}.lora_A.reward.weight"), r"lora_A.reward.weight belongs to an adapter that"),
    "a foreign tensor": (_with_tensor("extra.weight"), r"pretrained_model.extra.weight is no tensor of the adapter"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_cannot_tell_apart_is_refused_by_name(why: str, tiny: Path, tmp_path: Path) -> None:
    change, message = REFUSED[why]
    path = tmp_path / "checkpoint"
    gathered(tiny, path, **OPTIONS["plain"])
    change(path)
    before = state(path)
    with pytest.raises(CheckpointError, match=message):
        fix_valuehead(path)
    assert state(path) == before


def test_a_base_without_its_adapter_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    gathered(tiny, path, **OPTIONS["plain"])
    tensors = {name: t for name, t in load_file(path / "model.safetensors").items() if ".lora_" not in name}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"belongs to the base of an adapter, and no lora_A is here"):
        fix_valuehead(path)
