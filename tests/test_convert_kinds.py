"""Layers other than a plain linear one, other dtypes, and adapters that are not alone in their directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from snapshots import contents
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.convert_pissa import convert_pissa

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def _made(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


def _is_the_trained_model(run: adapters.Trained, model: adapters.Load = adapters.load, atol: float = 1e-5) -> None:
    convert_pissa(run.adapter, init=run.init, output=run.adapter.parent / "lora")
    assert (adapters.logits_on(run.base, run.init, model) - run.logits).abs().max() > 1e-2
    assert (adapters.logits_on(run.base, run.adapter.parent / "lora", model) - run.logits).abs().max() < atol


@pytest.mark.parametrize("use_rslora", [False, True])
def test_experts_are_stacked_one_by_one(use_rslora: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**SMALL, intermediate_size=48, num_hidden_layers=1, num_local_experts=4)
    base = _made(tmp_path / "base", MixtralForCausalLM(config))
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"target_modules": ["q_proj"], "target_parameters": targets, "use_rslora": use_rslora}
    _is_the_trained_model(adapters.train(base, tmp_path, "taken", **options))
    shapes = {n: t.shape for n, t in load_file(tmp_path / "lora" / "adapter_model.safetensors").items()}
    assert shapes["base_model.model.model.layers.0.mlp.experts.lora_A.weight"] == (4 * 8, 48)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "taken"])
def test_a_transposed_layer_needs_nothing_of_its_own(init: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = _made(tmp_path / "base", GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64)))
    options = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    _is_the_trained_model(adapters.train(base, tmp_path, init, **options))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_are_absolute_and_stay(bias: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SMALL, intermediate_size=48, num_hidden_layers=1, attention_bias=True, tie_word_embeddings=False
    )
    base = _made(tmp_path / "base", LlamaForCausalLM(config))
    _is_the_trained_model(adapters.train(base, tmp_path, bias=bias))
    assert sum(name.endswith(".bias") for name in load_file(tmp_path / "lora" / "adapter_model.safetensors")) >= 2


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_the_weights_of_a_grown_vocabulary_are_those_of_the_original_base(
    target: str, tiny: Path, tmp_path: Path
) -> None:
    def grown(base: Path) -> Any:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(70, mean_resizing=False)
        return model

    run = adapters.train(tiny, tmp_path, "taken", model=grown, target_modules=["q_proj", target])
    _is_the_trained_model(run, grown)
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    [restored] = [t for name, t in tensors.items() if name.endswith(f"{target}.base_layer.weight")]
    torch.testing.assert_close(
        restored, grown(tiny).get_submodule(f"model.{target}" if target != "lm_head" else target).weight
    )


def test_the_residual_of_an_adapted_output_matrix_never_travels(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, target_modules=["q_proj", "lm_head"])
    assert any("base_layer" in name for name in load_file(run.adapter / "adapter_model.safetensors"))
    convert_pissa(run.adapter, init=run.init)
    assert not any("base_layer" in name for name in load_file(run.adapter / "adapter_model.safetensors"))


class Convolutions(torch.nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.two = torch.nn.Conv2d(8, 12, 3, groups=groups)
        self.one = torch.nn.Conv1d(8, 12, 2, groups=groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x).sum() * torch.ones(1) + self.one(x[:, :, 0]).flatten()


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_stacked_group_by_group(groups: int, use_rslora: bool, tmp_path: Path) -> None:
    """The layers are linear, so what was taken out is the output of the initial adapter minus that of the base."""
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["one", "two"], init_lora_weights=False, use_rslora=use_rslora
    )
    model = get_peft_model(Convolutions(groups), config)
    x = torch.randn(2, 8, 5, 5)
    model.save_pretrained(tmp_path / "init")
    started = model(x)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "trained")
    convert_pissa(tmp_path / "trained", init=tmp_path / "init", base="conv", output=tmp_path / "lora")
    found = PeftModel.from_pretrained(Convolutions(groups), tmp_path / "lora")(x)
    torch.testing.assert_close(found, model(x) - started + Convolutions(groups)(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_of_less_precision_costs_its_own_rounding_alone(dtype: torch.dtype, tiny: Path, tmp_path: Path) -> None:
    def narrow(base: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=dtype).float()

    run = adapters.train(tiny, tmp_path, model=narrow)
    _is_the_trained_model(run, narrow)


def test_adapters_with_names_are_converted_each_in_its_folder(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path / "one")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run.residual), run.adapter)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "both")
    shutil.copytree(run.init, tmp_path / "both" / "pissa_init")
    second = contents(tmp_path / "both" / "second")
    adapters.set_config(tmp_path / "both", init_lora_weights="pissa", base_model_name_or_path=str(tiny))
    convert_pissa(tmp_path / "both")
    assert (adapters.logits_on(tiny, tmp_path / "both") - run.logits).abs().max() < 1e-5
    assert contents(tmp_path / "both" / "second") == second
    shutil.copytree(run.adapter, tmp_path / "run" / "named")
    shutil.copytree(run.init, tmp_path / "run" / "pissa_init" / "named")
    convert_pissa(tmp_path / "run" / "named")
    assert (adapters.logits_on(tiny, tmp_path / "run" / "named") - run.logits).abs().max() < 1e-5


def test_an_adapter_saved_as_a_pickle_becomes_safetensors(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    for folder in (run.init, run.adapter):
        torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
        (folder / "adapter_model.safetensors").unlink()
    convert_pissa(run.adapter, init=run.init)
    assert not (run.adapter / "adapter_model.bin").exists()
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-5
    assert not convert_pissa(run.adapter, init=run.init).changed


@pytest.mark.parametrize("field", ["layer_replication", "alora_invocation_tokens", "kasa_config", "a_later_field"])
def test_settings_that_change_what_is_computed_are_refused(field: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    config = json.loads((run.adapter / "adapter_config.json").read_text()) | {field: [[0, 1]]}
    (run.adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{field} is set; what adapters with it compute is not known here"):
        convert_pissa(run.adapter, init=run.init)
