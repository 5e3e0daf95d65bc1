"""Tiny PiSSA-like adapters made by PEFT: the initial one, the trained one, and the logits of the trained model."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from transformers import AutoModelForCausalLM

IDS = torch.arange(10)[None]

# A base model, read from a directory.
Load = Callable[[Path], torch.nn.Module]


@dataclass(frozen=True)
class Trained:
    """Directories of one PiSSA run, and what the live model said at its end. `by_peft` is PEFT's own conversion."""

    base: Path
    init: Path
    adapter: Path
    residual: Path
    logits: torch.Tensor
    by_peft: Path


def load(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


def train(
    base: Path, folder: Path, init: str = "pissa", *, model: Load = load, peft: bool = False, **options: Any
) -> Trained:
    """Wrap the base with PEFT, save the adapter, take a few steps, save again.

    The init `taken` is one that PEFT has not: random factors in every kind of layer, taken out of the base.
    """
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | options
    wrapped = _wrapped(model(base), init, options)
    wrapped.peft_config["default"].init_lora_weights = True
    wrapped.save_pretrained(folder / "pissa_init")
    wrapped.peft_config["default"].init_lora_weights = "lora_ga" if init == "taken" else init
    _steps(wrapped)
    wrapped.save_pretrained(folder / "trained")
    if peft:
        shutil.copytree(folder / "pissa_init", folder / "init_for_peft")
        initial = str(folder / "init_for_peft")
        wrapped.save_pretrained(folder / "by_peft", path_initial_model_for_weight_conversion=initial)
    logits = _logits(wrapped)
    wrapped.unload().save_pretrained(folder / "residual")
    return Trained(base, folder / "pissa_init", folder / "trained", folder / "residual", logits, folder / "by_peft")


def logits_on(base: Path, adapter: Path, model: Load = load) -> torch.Tensor:
    """What the adapter says on a fresh base."""
    return _logits(PeftModel.from_pretrained(model(base), adapter))


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "adapter_config.json").read_text())


def set_config(path: Path, **values: Any) -> None:
    (path / "adapter_config.json").write_text(json.dumps(config_of(path) | values))


def _wrapped(model: Any, init: str, options: dict[str, Any]) -> PeftModel:
    more: dict[str, Any] = {"init_lora_weights": False if init == "taken" else init, "task_type": "CAUSAL_LM"}
    if init == "corda":
        more["corda_config"] = CordaConfig(corda_method="kpm")
    if init == "lora_ga":
        more["lora_ga_config"] = LoraGAConfig()
    config = LoraConfig(**more, **options)
    if init == "corda":
        preprocess_corda(model, config, run_model=lambda: _forward(model))
    if init == "lora_ga":
        preprocess_loraga(model, config, lambda: _loss(model).backward())
    wrapped = get_peft_model(model, config)
    if init == "taken":
        with torch.no_grad():
            for layer in (module for module in wrapped.modules() if isinstance(module, LoraLayer)):
                weight = layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight
                weight -= layer.get_delta_weight("default").reshape(weight.shape)
    return wrapped


def _forward(model: Any) -> None:
    with torch.no_grad():
        for row in (row for ids in _rows() for row in ids):
            model(row[None])


def _rows() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        yield torch.randint(64, (4, 16), generator=generator)


def _loss(model: Any) -> torch.Tensor:
    ids = next(_rows())
    return model(ids, labels=ids).loss


def _steps(model: PeftModel) -> None:
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.03)
    for ids in _rows():
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(IDS).logits
