"""Adapters: every initialisation, the layers that get one, and what would tear a model apart."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from characters import SIZES, save_llama, save_tokenizer, write_run
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from tools import logits
from tools.checkpoint.errors import CheckpointError
from tools.postprocess.convert_pissa import convert_pissa
from tools.training.config import FinetuningArguments, ModelArguments, load_config
from tools.training.model import check_quantization, outline
from tools.training.precision import chosen_precision
from tools.training.targets import check_targets
from tools.training.train import train
from tools.training.trainable import grouped

INITS = ["true", "false", "gaussian", "orthogonal", "mica", "pissa", "olora", "eva", "corda", "lora_ga"]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixture"
    size = save_tokenizer(folder)
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=size, num_key_value_heads=1, num_local_experts=2, **SIZES)
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def forget_after(run: Path, step: int) -> None:
    """The run as a kill after `step` leaves it; what came later is kept as `gone-...`."""
    for checkpoint in run.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > step:
            checkpoint.rename(run / f"gone-{checkpoint.name}")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file = run / ".burnish" / "train.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "state": "running", "pid": ended.pid}))


@pytest.mark.parametrize("init", INITS)
def test_c5_every_initialisation_trains_and_resumes_to_the_same_adapter(
    untied: Path, tmp_path: Path, init: str
) -> None:
    config = write_run(tmp_path, untied)
    overrides = [f"init_lora_weights={init}", "calibration_rows=16"]
    assert train(config, overrides).changed
    run = tmp_path / "run"
    forget_after(run, 2)
    assert train(config, overrides).changed
    once, resumed = (
        load_file(run / name / "adapter_model.safetensors") for name in ("gone-checkpoint-4", "checkpoint-4")
    )
    assert once.keys() == resumed.keys()
    for name in once:
        assert torch.equal(once[name], resumed[name]), name


@pytest.mark.parametrize("init", ["corda", "lora_ga"])
def test_c5_what_looks_at_data_and_changes_the_base_converts_to_plain_lora(
    untied: Path, tmp_path: Path, init: str
) -> None:
    train(write_run(tmp_path, untied), [f"init_lora_weights={init}", "calibration_rows=16"])
    run, plain = tmp_path / "run", tmp_path / "plain"
    convert_pissa(run / "checkpoint-4", init=run / "pissa_init", output=plain)
    expected, rows = logits.load(run / "checkpoint-4" / ".burnish" / "trained_logits.safetensors")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(untied), plain)
    last = torch.stack([row[-1] for row in logits.logits(adapted, rows)])
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-4)
    with adapted.disable_adapter():
        untrained = torch.stack([row[-1] for row in logits.logits(adapted, rows)])
    assert (untrained - expected).abs().max() > 0.01


def refusal(model: Path, **finetuning) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_targets(
            outline(ModelArguments(model_name_or_path=str(model)), "float32"), FinetuningArguments(**finetuning)
        )
    return str(caught.value)


THERE = (
    "there are q_proj (2), k_proj (2), v_proj (2), o_proj (2), gate_proj (2), up_proj (2), down_proj (2), lm_head (1)"
)


def test_c5_a_layer_that_is_not_there_is_refused_with_those_that_are(untied: Path) -> None:
    said = "finetuning.target_modules: the model has no layer c_attn; " + THERE + ", or all-linear"
    assert refusal(untied, target_modules=["q_proj", "c_attn"]) == said  # PEFT would train q_proj alone
    assert refusal(untied, target_modules="q_proj, c_attn") == said
    assert refusal(untied, target_modules=".*attn.c.*") == (
        "finetuning.target_modules: no layer matches .*attn.c.*; " + THERE
    )
    assert "self_attn is LlamaAttention and no linear layer" in refusal(untied, target_modules=["self_attn"])
    assert "is no regex" in refusal(untied, target_modules="(q")
    assert "the model has no module score" in refusal(untied, modules_to_save=["score"])


ADAPTED = "there are q_proj (2), k_proj (2), v_proj (2), o_proj (2), gate_proj (2), up_proj (2), down_proj (2)"


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_c5_a_pattern_that_no_layer_has_is_refused_with_those_there_are(untied: Path, pattern: str) -> None:
    said = f"finetuning.{pattern}: nope matches no layer that gets an adapter; {ADAPTED}"
    assert refusal(untied, **{pattern: {"q_proj": 4, "nope": 2}}) == said
    assert "q_proj matches no layer" in refusal(untied, target_modules=["v_proj"], **{pattern: {"q_proj": 2}})
    assert refusal(untied, **{pattern: {"(q": 2}}).startswith(f"finetuning.{pattern}: (q is no regex: ")


def test_c5_layers_to_leave_out_that_are_not_there_are_refused(untied: Path) -> None:
    said = f"finetuning.exclude_modules: nope is none of the layers that get an adapter; {ADAPTED}"
    assert refusal(untied, exclude_modules=["q_proj", "nope"]) == said
    assert refusal(untied, exclude_modules="nope") == said
    assert "self_attn is none of the layers" in refusal(untied, exclude_modules=["self_attn"])  # PEFT takes no part
    assert "finetuning.exclude_modules: (q is no regex" in refusal(untied, exclude_modules="(q")


@pytest.mark.parametrize(("init", "most"), [("pissa", 8), ("pissa_niter_4", 8), ("olora", 8), ("lora_ga", 4)])
def test_c5_a_rank_that_a_layer_has_not_is_refused_before_training(untied: Path, init: str, most: int) -> None:
    """PEFT makes tensors of a smaller rank than the config says, which nothing loads again."""
    layer = "model.layers.0.self_attn.k_proj of 8 x 16"
    said = f"finetuning.r: {most + 1} is more than {init} finds in {layer}; write {most} at most, or exclude the layer"
    assert refusal(untied, init_lora_weights=init, r=most + 1) == said
    by_pattern = refusal(untied, init_lora_weights=init, r=2, rank_pattern={"k_proj": most + 1})
    assert by_pattern == said.replace("finetuning.r", "finetuning.rank_pattern")
    model = outline(ModelArguments(model_name_or_path=str(untied)), "float32")
    check_targets(model, FinetuningArguments(init_lora_weights=init, r=most))
    check_targets(model, FinetuningArguments(init_lora_weights=True, r=100))


def test_c5_names_may_be_written_as_one_text(untied: Path, tmp_path: Path) -> None:
    train(write_run(tmp_path, untied), ["finetuning.target_modules=q_proj, v_proj", "max_steps=1"])
    names = load_file(tmp_path / "run" / "checkpoint-1" / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"q_proj", "v_proj"}


def test_c5_experts_get_an_adapter_through_target_parameters(mixture: Path, tmp_path: Path, caplog) -> None:
    config = write_run(tmp_path, mixture)
    with caplog.at_level("INFO", logger="tools"):
        train(config, ["max_steps=1", f"training.output_dir={tmp_path / 'plain'}"])
    assert "experts get no adapter; finetuning.target_parameters could name mlp.experts.down_proj" in caplog.text
    train(config, ["finetuning.target_parameters=[mlp.experts.down_proj]", "max_steps=2"])
    adapter = tmp_path / "run" / "checkpoint-2"
    assert any("experts" in name for name in load_file(adapter / "adapter_model.safetensors"))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(mixture), adapter)
    assert any("experts" in name and "lora_" in name for name, _ in loaded.named_parameters())


def test_c5_a_parameter_of_experts_is_refused_where_layers_are_named(mixture: Path) -> None:
    assert "is a parameter and no layer; name it in finetuning.target_parameters" in refusal(
        mixture, target_modules=["mlp.experts.down_proj"]
    )
    assert "the model has no parameter mlp.w1; there are mlp.experts.down_proj, mlp.experts.gate_up_proj" in refusal(
        mixture, target_parameters=["mlp.w1"]
    )


def test_c5_what_would_tear_tied_embeddings_apart_is_refused(tied: Path, untied: Path) -> None:
    remedy = "add finetuning.ensure_weight_tying: true to train them as one, or leave it out"
    torn = f"lm_head is tied to model.embed_tokens, and would be torn from it; {remedy}"
    assert refusal(tied, target_modules=["q_proj", "lm_head"]) == f"finetuning.target_modules: {torn}"
    assert refusal(tied, target_modules=r".*(q_proj|lm_head)").startswith("finetuning.target_modules: lm_head is tied")
    assert refusal(tied, modules_to_save=["lm_head"]) == f"finetuning.modules_to_save: {torn}"
    assert "embed_tokens is tied to lm_head" in refusal(tied, modules_to_save=["embed_tokens"])
    assert "cannot start the one adapter of tied" in refusal(
        tied, stage="reward", target_modules=["embed_tokens"], ensure_weight_tying=True, init_lora_weights="pissa"
    )
    assert "are not tied; leave it out" in refusal(untied, ensure_weight_tying=True)
    assert "nothing that is tied is trained" in refusal(tied, ensure_weight_tying=True)


def test_c5_tied_embeddings_are_trained_as_one_on_request(tied: Path, tmp_path: Path) -> None:
    choice = ["finetuning.modules_to_save=[embed_tokens]", "ensure_weight_tying=true"]
    train(write_run(tmp_path, tied), [*choice, "max_steps=2"])
    original = AutoModelForCausalLM.from_pretrained(tied)
    before = original.get_input_embeddings().weight.clone()
    merged = PeftModel.from_pretrained(original, tmp_path / "run" / "checkpoint-2").merge_and_unload()
    assert torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)
    assert not torch.equal(merged.get_input_embeddings().weight, before)


def test_c5_an_adapter_that_sft_would_never_train_is_refused(tied: Path, untied: Path) -> None:
    never = "the loss of sft reads its weight directly, so an adapter on it would never be trained"
    assert f"lm_head: {never}; name it in finetuning.modules_to_save instead" in refusal(
        untied, target_modules=["lm_head"]
    )
    assert never in refusal(tied, target_modules=["embed_tokens"], ensure_weight_tying=True)


def test_c5_ranks_differ_by_pattern(untied: Path, tmp_path: Path) -> None:
    train(write_run(tmp_path, untied), ["finetuning.rank_pattern={q_proj: 4}", "max_steps=1"])
    tensors = load_file(tmp_path / "run" / "checkpoint-1" / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in tensors.items() if "q_proj.lora_A" in name} == {4}
    assert {tensor.shape[0] for name, tensor in tensors.items() if "v_proj.lora_A" in name} == {2}


def test_c5_what_is_trained_is_listed(untied: Path, tmp_path: Path, caplog) -> None:
    with caplog.at_level("INFO", logger="tools"):
        train(write_run(tmp_path, untied), ["target_modules=[q_proj]", "max_steps=1"])
    assert "trained: 128 of 7,152 parameters (1.79%) in float32: adapters on q_proj" in caplog.text
    groups = grouped(AutoModelForCausalLM.from_pretrained(untied))
    layer = next(same for same in groups if same.name == "model.layers.*.self_attn.q_proj.weight")
    assert (layer.tensors, layer.shape, layer.dtype, layer.parameters) == (2, (16, 16), "float32", 512)


def test_c6_bits_are_refused_where_there_is_no_cuda_gpu(untied: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CheckpointError, match="4bit needs a CUDA GPU, and there is none; leave it out here"):
        train(write_run(tmp_path, untied), ["quantization=4bit"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(CheckpointError, match="8bit needs bitsandbytes; pip install bitsandbytes"):
        check_quantization("8bit")


@pytest.mark.parametrize(
    ("gpu", "training", "said"),
    [
        ((None, False), {}, "float32 weights, computed in float32: there is no GPU"),
        ((None, False), {"bf16": True}, "float32 weights, computed in bfloat16: there is no GPU"),
        (
            ("H200", True),
            {"fp16": True},
            "float16 weights, computed in float16: H200 computes in bfloat16; but training",
        ),
        (("H200", True), {"bf16": False}, "bfloat16 weights, computed in bfloat16: H200"),
    ],
)
def test_c9_what_training_says_of_the_precision_counts(untied, tmp_path, monkeypatch, gpu, training, said) -> None:
    monkeypatch.setattr("tools.training.precision._device", lambda: gpu)
    config = load_config(write_run(tmp_path, untied)).config
    chosen = chosen_precision(config, training)
    assert str(chosen).startswith(said)
    assert {"bf16": chosen.bf16, "fp16": chosen.fp16}.items() >= training.items()
    assert not (chosen.bf16 and chosen.fp16)


CHOICES = [
    (None, [], "float32 weights, computed in float32: there is no GPU"),
    ("NVIDIA H200", [], "bfloat16 weights, computed in bfloat16: NVIDIA H200 computes in bfloat16"),
    ("NVIDIA H200", ["method=full"], "float32 weights, computed in bfloat16: NVIDIA H200 computes in bfloat16, and"),
    ("NVIDIA H200", ["init_lora_weights=pissa"], "float32 weights, computed in bfloat16"),
    (
        None,
        ["init_lora_weights=olora", "dtype=bfloat16"],
        "bfloat16 weights, computed in bfloat16: model.dtype says so; olora r",
    ),
    ("Tesla T4", [], "float16 weights, computed in float16: Tesla T4 computes in float16, and not in bfloat16"),
    ("Tesla T4", ["method=full"], "float32 weights, computed in float16"),
    ("Tesla T4", ["dtype=float32"], "float32 weights, computed in float32: model.dtype says so"),
]


@pytest.mark.parametrize(("gpu", "overrides", "said"), CHOICES)
def test_c9_the_precision_is_chosen_and_explained(untied, tmp_path, monkeypatch, gpu, overrides, said) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu == "NVIDIA H200")
    config = load_config(write_run(tmp_path, untied), overrides).config
    assert str(chosen_precision(config, {})).startswith(said)


def test_c9_the_choice_is_printed(untied: Path, tmp_path: Path, caplog) -> None:
    with caplog.at_level("INFO", logger="tools"):
        train(write_run(tmp_path, untied), ["max_steps=1", "dtype=bfloat16"])
    assert "precision: bfloat16 weights, computed in bfloat16: model.dtype says so" in caplog.text
    shutil.rmtree(tmp_path / "run")
