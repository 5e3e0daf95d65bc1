# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""GradientNormsCallback: how large the gradient of each part of the model is."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

PREFIX = "grad_norm/"
# The part of the model that a parameter is of: the name up to the number of its layer, without what wraps the model.
_WRAPPERS = re.compile(r"^((base_model|module|decoder|_orig_mod|model|transformer)\.)+")
_PART = re.compile(r"^(.*?\.\d+|[^.]+)(\.|$)")


class GradientNormsCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Adds `grad_norm/PART` to each logged step, the norm of its gradients: `layers.0`, `embed_tokens`, `lm_head`, ...

    They are measured before the optimizer's step, when gradients still exist, and given as they were before clipping.
    They get into the Trainer's own history too, and so into trainer_state.json. Callbacks that are to see them must
    come later in the list. Gradients that another library holds in shards (DeepSpeed) are not seen.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[torch.nn.Parameter]] = {}
        self._norms: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        parts = defaultdict(list)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parts[part_of(name)].append(parameter)
        self._parts = dict(parts)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._norms = _norms(self._parts) if _is_logged(state.global_step + 1, args, state) else {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not self._norms or "loss" not in logs:
            return
        norms = dict(zip(self._norms, torch.stack(list(self._norms.values())).tolist(), strict=True))
        self._norms = {}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        scale = logs["grad_norm"] / total if total and logs.get("grad_norm") else 1.0  # clipping scaled all alike
        found = {f"{PREFIX}{part}": norm * scale for part, norm in norms.items()}
        logs.update(found)
        state.log_history[-1].update(found)


def _norms(parts: Mapping[str, Sequence[torch.nn.Parameter]]) -> dict[str, torch.Tensor]:
    """The norm of each part, as a tensor on the device of the model, so that nothing waits for it."""
    found = {}
    for part, parameters in parts.items():
        if gradients := [parameter.grad.float() for parameter in parameters if parameter.grad is not None]:
            found[part] = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return found


def part_of(parameter: str) -> str:
    """`base_model.model.model.layers.3.mlp.up_proj.lora_A.default.weight` is of `layers.3`."""
    name = _WRAPPERS.sub("", parameter)
    found = _PART.match(name)
    return found.group(1) if found else name


def _is_logged(step: int, args: Any, state: Any) -> bool:
    """Whether the Trainer's own schedule logs this step; where it goes by epochs, any step may be the one."""
    if args.logging_strategy == IntervalStrategy.STEPS:
        return step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)
    return bool(args.logging_strategy != IntervalStrategy.NO)
