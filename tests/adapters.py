"""Tiny PiSSA-like adapters made by PEFT: the initial one, the trained one, and the logits of the trained model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

IDS = torch.arange(10)[None]


@dataclass(frozen=True)
class Trained:
    """Directories of one PiSSA run, and what the live model said at its end."""

    base: Path
    init: Path
    adapter: Path
    residual: Path
    logits: torch.Tensor


def train(base: Path, folder: Path, init: str = "pissa", **options: Any) -> Trained:
    """Wrap the base with PEFT, save the adapter, move every trainable tensor, save again."""
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | options
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=init, **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "pissa_init")
    model.peft_config["default"].init_lora_weights = init
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "trained")
    model.eval()
    with torch.no_grad():
        logits = model(IDS).logits
    residual = folder / "residual"
    base_model = model.unload()
    base_model.save_pretrained(residual)
    return Trained(base, folder / "pissa_init", folder / "trained", residual, logits)


def logits_on(base: Path, adapter: Path) -> torch.Tensor:
    """What the adapter says on a fresh base."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        return model(IDS).logits
