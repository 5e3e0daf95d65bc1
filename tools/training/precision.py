"""In which numbers a model is held and computed, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.lora.adapters import changes_base

if TYPE_CHECKING:
    from tools.training.config import TrainConfig


@dataclass(frozen=True)
class Precision:
    """The dtype of the loaded weights, the autocast that goes with it, and the reason in words."""

    weights: str
    bf16: bool
    fp16: bool
    why: str

    def __str__(self) -> str:
        computed = "bfloat16" if self.bf16 else "float16" if self.fp16 else self.weights
        return f"{self.weights} weights, computed in {computed}: {self.why}"


def chosen_precision(config: "TrainConfig", training: Mapping[str, Any]) -> Precision:
    """How a run computes: as its model and device have it, unless `bf16` or `fp16` in `training` says otherwise."""
    chosen = _of_the_model(config)
    given = {key: value for key in ("bf16", "fp16") if (value := training.get(key)) is not None}
    bf16 = given.get("bf16", chosen.bf16 and not given.get("fp16"))
    fp16 = given.get("fp16", chosen.fp16 and not given.get("bf16"))
    if (bf16, fp16) == (chosen.bf16, chosen.fp16):
        return chosen
    said = ", ".join(f"training.{key} is {str(value).lower()}" for key, value in given.items())
    weights = chosen.weights if chosen.weights == "float32" or not (bf16 or fp16) else "bfloat16" if bf16 else "float16"
    return Precision(weights, bf16, fp16, f"{chosen.why}; but {said}")


def _of_the_model(config: "TrainConfig") -> Precision:
    """What `model.dtype` says; `auto` is what the device computes in, and float32 where rounding would be trained on.

    bfloat16 is preferred, float16 taken where the GPU has only that. Weights that are trained themselves stay in
    float32: at a usual learning rate a step is smaller than what a 16-bit weight can hold.
    """
    asked, init = config.model.dtype, config.finetuning.init_lora_weights
    takes_a_part = config.finetuning.method == "lora" and changes_base(init)
    if asked != "auto":
        rounds = takes_a_part and asked != "float32"
        why = "model.dtype says so" + (
            f"; {init} rounds what it leaves of the base, float32 would not" if rounds else ""
        )
        return Precision(asked, asked == "bfloat16", asked == "float16", why)
    device, bf16 = _device()
    if device is None:
        return Precision("float32", False, False, "there is no GPU, and CPUs are no faster in 16 bits")
    half = "bfloat16" if bf16 else "float16"
    computes = f"{device} computes in {'bfloat16' if bf16 else 'float16, and not in bfloat16'}"
    if config.finetuning.method == "full":
        return Precision("float32", bf16, not bf16, f"{computes}, and trained weights need the digits of float32")
    if takes_a_part:
        return Precision("float32", bf16, not bf16, f"{computes}, and {init} would round what it leaves of the base")
    return Precision(half, bf16, not bf16, computes)


def _device() -> tuple[str | None, bool]:
    """The name of the GPU, and whether it has bfloat16 of its own rather than emulated."""
    import torch

    if not torch.cuda.is_available():
        return None, False
    return torch.cuda.get_device_name(), torch.cuda.is_bf16_supported(including_emulation=False)
