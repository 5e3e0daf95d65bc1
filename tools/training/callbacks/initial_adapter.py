# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""The initial adapter of PiSSA and its kin: kept at the start, because only with it the trained one can be converted.

These inits move a part of the base weights into the adapter: W_res = W - s * B0 @ A0. What is trained on W_res is of no
use on W without A0 and B0, and PiSSA's fast SVD is random, so they cannot be computed again.
"""

import shutil
from copy import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from transformers import TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.lora.adapters import INITIAL_ADAPTER, changes_base

ADAPTER = "default"


class InitialAdapterCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Keeps the adapter as it was before the first step in `pissa_init` of the output directory, never overwritten.

    Does nothing when the init does not change the base. Raises CheckpointError when a resumed run has no initial
    adapter, and when a fresh start finds that of another one.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        adapted = base_changing(model)
        if adapted is None:
            return
        folder = Path(args.output_dir) / INITIAL_ADAPTER
        if state.global_step > 0:
            require(folder)
        elif folder.exists():
            _check_same(adapted, folder)
        elif state.is_world_process_zero:
            save(adapted, folder)


def base_changing(model: Any) -> PeftModel | None:
    """The PEFT model in a model, wrapped or not, when the init of its active adapter has changed the base."""
    adapted = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    init = getattr(adapted.active_peft_config, "init_lora_weights", True) if adapted is not None else True
    return adapted if changes_base(init) else None


def add_adapter(base: Any, config: LoraConfig, folder: Path) -> PeftModel:
    """The base with a new adapter whose init changes it; the initial adapter is in `folder` afterwards.

    When it is there already, adapter and residual base are made from it instead of a second decomposition: the model is
    the same, bit for bit, as at the first start. The config names the init that was asked for, as PEFT's own does.
    CorDA and LoRA-GA find at the layers what PEFT's preprocessing has left there.
    """
    init = str(config.init_lora_weights)
    ordinary = copy(config)
    ordinary.init_lora_weights = True
    model = get_peft_model(base, ordinary, adapter_name=ADAPTER)
    if folder.exists():
        require(folder)
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"), adapter_name=ADAPTER)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, LoraLayer) and ADAPTER in layer.lora_A:
                _subtract(layer) if folder.exists() else _decompose(layer, init, config)
    model.peft_config[ADAPTER].init_lora_weights = init
    if not folder.exists():
        save(model, folder)
    return model


def save(model: PeftModel, folder: Path) -> None:
    """Write the active adapter as it is to `folder`, by rename, as one whose init is over (init true)."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    name = model.active_adapter
    config = model.peft_config[name]
    init, config.init_lora_weights = config.init_lora_weights, True
    try:
        model.save_pretrained(str(draft), selected_adapters=[name])
    finally:
        config.init_lora_weights = init
    (draft if name == ADAPTER else draft / name).rename(folder)
    shutil.rmtree(draft, ignore_errors=True)


def require(folder: Path) -> None:
    """Raise CheckpointError unless the initial adapter is there and whole."""
    if not folder.exists():
        raise CheckpointError(
            folder,
            "the initial adapter of this run is gone; its adapters could never be converted",
            "put it back, or start again in another output_dir",
        )
    if Checkpoint.open(folder).adapter is None:
        problem = "holds no adapter, but is the initial one of this run"
        raise CheckpointError(folder, problem, "put it back, or start again in another output_dir")


def _decompose(layer: LoraLayer, init: str, config: LoraConfig) -> None:
    if init.startswith("pissa"):
        layer.pissa_init(ADAPTER, init)
    elif init == "olora":
        layer.olora_init(ADAPTER)
    else:
        _decompose_from_data(layer, init, config)


def _decompose_from_data(layer: LoraLayer, init: str, config: LoraConfig) -> None:
    """A0 and B0 by PEFT, in float32; the residual as a later start computes it, to the last bit."""
    weight = layer.get_base_layer().weight.data.clone()
    if init == "corda":
        layer.corda_init(ADAPTER, init)
    else:
        layer.lora_ga_init(ADAPTER, config.lora_ga_config)
    for factors in (layer.lora_A, layer.lora_B):
        factors[ADAPTER].weight.data = factors[ADAPTER].weight.data.float()
    layer.get_base_layer().weight.data = weight
    _subtract(layer)


def _subtract(layer: LoraLayer) -> None:
    """W - s * B0 @ A0 in float32, as PEFT computes it: A0 [r, in], B0 [out, r], W [out, in] or, in a Conv1D, [in, out].

    (peft 0.21, LoraLayer.pissa_init and olora_init)
    """
    weight = layer.get_base_layer().weight
    a, b = (factors[ADAPTER].weight.to(weight.device, torch.float32) for factors in (layer.lora_A, layer.lora_B))
    part = layer.scaling[ADAPTER] * b @ a
    weight.data = (weight.data.float() - (part.T if layer.fan_in_fan_out else part)).to(weight.dtype)


def _check_same(model: PeftModel, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    kept = load_peft_weights(str(folder), device="cpu")
    now = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    if kept.keys() != now.keys() or not all(torch.equal(kept[name], now[name].cpu()) for name in kept):
        raise CheckpointError(
            folder, "the initial adapter of another start", "move it away, or choose another output_dir"
        )
