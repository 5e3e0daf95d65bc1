"""What each framework of the catalogue leaves on disk: over the tiny Llama, by the real classes where they install."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

H, V = 32, 64


@dataclass(frozen=True)
class Framework:
    """How to build its checkpoint; what inspect calls it; how the model is loaded once the head is out.

    `head` is given to --head, for a head that the architecture declares; `wrapper` to join-valuehead.
    """

    build: Callable[[Path, Path], Any]
    named: str
    loader: str = "AutoModelForCausalLM"
    head: str | None = None
    wrapper: str = ""


def _mlp(inner: int, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(H, inner), nn.ReLU(), nn.Linear(inner, outputs))


def _write(tiny: Path, path: Path, state: dict[str, torch.Tensor], **config: Any) -> None:
    """A state dict as safetensors, beside the config of the tiny model with some fields changed."""
    path.mkdir()
    save_file({name: t.contiguous() for name, t in state.items()}, path / "model.safetensors", {"format": "pt"})
    _write_config(tiny, path, **config)


def _write_bin(tiny: Path, path: Path, state: dict[str, torch.Tensor]) -> None:
    path.mkdir()
    torch.save(state, path / "pytorch_model.bin")
    _write_config(tiny, path)


def _write_config(tiny: Path, path: Path, **config: Any) -> None:
    written = json.loads((tiny / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | config))


def _state(prefix: str, module: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}


def _flat(name: str, module: nn.Module) -> Callable[[Path, Path], None]:
    """The causal LM with a head among its tensors."""

    def build(tiny: Path, path: Path) -> None:
        _write(tiny, path, load_file(tiny / "model.safetensors") | _state(f"{name}.", module))

    return build


def _headless(name: str, module: nn.Module, architecture: str) -> Callable[[Path, Path], None]:
    """The model without lm_head, with a head that its architecture declares."""

    def build(tiny: Path, path: Path) -> None:
        decoder = load_file(tiny / "model.safetensors")
        del decoder["lm_head.weight"]
        _write(tiny, path, decoder | _state(f"{name}.", module), architectures=[architecture])

    return build


def deepspeed_chat(tiny: Path, path: Path) -> None:
    """torch.save of its reward model: an AutoModel called `rwtransformer`, and the head."""
    from transformers import AutoModel

    model = nn.Module()
    model.v_head = nn.Linear(H, 1, bias=False)
    model.rwtransformer = AutoModel.from_pretrained(tiny)
    _write_bin(tiny, path, dict(model.state_dict()))


def openrlhf(prefix: str) -> Callable[[Path, Path], None]:
    """save_pretrained of its `RewardModel`: a class made of the family's own, the head under a name of choice."""

    def build(tiny: Path, path: Path) -> None:
        from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel

        class RewardModel(LlamaPreTrainedModel):
            def __init__(self, config: Any):
                super().__init__(config)
                setattr(self, self.base_model_prefix, LlamaModel(config))
                setattr(self, prefix, nn.Linear(config.hidden_size, 1, bias=False))
                self.post_init()

        config = LlamaConfig.from_pretrained(tiny)
        config.value_head_prefix, config.normalize_reward, config.mean, config.std = prefix, True, 0.5, 2.0
        RewardModel.from_pretrained(tiny, config=config).save_pretrained(path)

    return build


def trlx(*, hydra: bool = False, value_layers: bool = False) -> Callable[[Path, Path], None]:
    """torch.save of its wrapper: `base_model.`, an MLP as head, for hydra models the frozen top of the reference."""

    def build(tiny: Path, path: Path) -> None:
        decoder = load_file(tiny / "model.safetensors")
        top = {name.removeprefix("model.layers.1."): t for name, t in decoder.items() if "layers.1." in name}
        branch = {f"decoder_blocks.0.{name}": t.clone() for name, t in top.items()}
        branch["final_norm.weight"] = decoder["model.norm.weight"].clone()
        state = {f"base_model.{name}": t for name, t in decoder.items()}
        if hydra:
            state |= {f"frozen_head.{name}": t for name, t in branch.items()}
            state["frozen_head.lm_head.weight"] = decoder["lm_head.weight"].clone()
        if value_layers:
            state |= {f"v_head.{name}": t + 1 for name, t in branch.items()}
        state |= _state("v_head.lm_head." if value_layers else "v_head.", _mlp(2 * H))
        _write_bin(tiny, path, state)

    return build


def trlx_ilql(tiny: Path, path: Path) -> None:
    """torch.save of its ILQL wrapper: a value head, two Q heads and their slow copies."""
    heads = nn.Module()
    heads.v_head = _mlp(2 * H)
    heads.q_heads = nn.ModuleList(_mlp(2 * H, V) for _ in range(2))
    heads.target_q_heads = nn.ModuleList(_mlp(2 * H, V) for _ in range(2))
    decoder = {f"base_model.{name}": t for name, t in load_file(tiny / "model.safetensors").items()}
    _write_bin(tiny, path, decoder | _state("ilql_heads.", heads))


def classifier(name: str) -> Callable[[Path, Path], None]:
    """A classifier with one label, saved by transformers."""

    def build(tiny: Path, path: Path) -> None:
        import transformers

        torch.manual_seed(1)
        sizes = {"hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        model_class = getattr(transformers, name)
        if name.startswith("Llama"):
            model = model_class.from_pretrained(tiny, num_labels=1)
        elif name.startswith("T5"):
            config = {"d_model": H, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
            model = model_class(transformers.T5Config(vocab_size=V, num_labels=1, **config))
        else:
            model = model_class(model_class.config_class(vocab_size=V, num_labels=1, **sizes))
        model.save_pretrained(path)

    return build


def peft_classifier(tiny: Path, path: Path) -> None:
    """A LoRA adapter of a classifier, saved by PEFT, which saves the head with it."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(tiny, num_labels=1)
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")).save_pretrained(path)


def recorded(name: str) -> Callable[[Path, Path], None]:
    """A checkpoint under tests/fixtures."""
    return lambda _, path: shutil.copytree(Path(__file__).parent / "fixtures" / name, path)


_ONE = nn.Linear(H, 1)
_UNBIASED = nn.Linear(H, 1, bias=False)
FRAMEWORKS = {
    "trl": Framework(recorded("trl-valuehead-single"), "TRL, LLaMA-Factory"),
    "trl-sharded": Framework(recorded("trl-valuehead-sharded"), "TRL, LLaMA-Factory"),
    "trl-bf16": Framework(recorded("trl-valuehead-bf16"), "TRL, LLaMA-Factory"),
    "trl-t5": Framework(recorded("trl-valuehead-t5"), "TRL, LLaMA-Factory", "AutoModelForSeq2SeqLM"),
    "deepspeed-chat": Framework(deepspeed_chat, "DeepSpeed-Chat", "AutoModel", wrapper="rwtransformer."),
    "internlm2": Framework(
        _headless("v_head", _UNBIASED, "InternLM2ForRewardModel"), "InternLM2", "AutoModel", "v_head"
    ),
    "openrlhf-score": Framework(openrlhf("score"), "OpenRLHF", "AutoModel", "score"),
    "openrlhf-value-head": Framework(openrlhf("value_head"), "OpenRLHF", "AutoModel", "value_head"),
    "openrlhf-other-name": Framework(openrlhf("critic_value"), "OpenRLHF", "AutoModel", "critic_value"),
    "reward-head": Framework(_flat("reward_head", _UNBIASED), "reward models"),
    "nemo-aligner": Framework(_flat("rm_head", _ONE), "NeMo-Aligner"),
    "megatron": Framework(_flat("output_layer", _UNBIASED), "verl and NeMo-RL on Megatron"),
    "trlx": Framework(trlx(), "trlx PPO", wrapper="base_model."),
    "trlx-hydra": Framework(trlx(hydra=True), "trlx PPO", wrapper="base_model."),
    "trlx-value-layers": Framework(trlx(value_layers=True), "trlx PPO with value layers", wrapper="base_model."),
    "trlx-ilql": Framework(trlx_ilql, "trlx ILQL", wrapper="base_model."),
    "qwen": Framework(_headless("score", _mlp(H), "LlamaForRewardModel"), "Qwen", "AutoModel", "score"),
    "qwen-prm": Framework(_headless("score", _mlp(H, 2), "LlamaForProcessRewardModel"), "Qwen", "AutoModel", "score"),
    "classifier": Framework(classifier("LlamaForSequenceClassification"), "sequence and token", "AutoModel", "score"),
    "token-classifier": Framework(classifier("LlamaForTokenClassification"), "sequence", "AutoModel", "score"),
    "bert": Framework(classifier("BertForSequenceClassification"), "token classifiers", "AutoModel", "classifier"),
    "roberta": Framework(classifier("RobertaForSequenceClassification"), "RoBERTa", "", "classifier"),
    "t5": Framework(classifier("T5ForSequenceClassification"), "T5", "AutoModel", "classification_head"),
}
