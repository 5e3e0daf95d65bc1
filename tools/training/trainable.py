# ruff: noqa: TID253 - imported only where a model is loaded
"""What of a model is trained: its parameters by name, the numbers of layers taken together."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Same:
    """Parameters that differ only in the number of their layer: `model.layers.*.q_proj.lora_A.weight`."""

    name: str
    tensors: int
    shape: tuple[int, ...]
    dtype: str
    parameters: int
    requires_grad: bool


def grouped(model: nn.Module) -> list[Same]:
    """All parameters of the model, tied ones once, in their order; those of the same name and shape as one line."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for name, parameter in model.named_parameters():
        short = re.sub(r"\.\d+\.", ".*.", re.sub(r"^base_model\.model\.|\.default\b|\.base_layer\b", "", name))
        dtype = str(parameter.dtype).removeprefix("torch.")
        found.setdefault((short, tuple(parameter.shape), dtype, parameter.requires_grad), []).append(parameter.numel())
    return [
        Same(name, len(sizes), shape, dtype, sum(sizes), requires_grad)
        for (name, shape, dtype, requires_grad), sizes in found.items()
    ]


def summary(model: nn.Module) -> str:
    """One line: how many of how many parameters, in which dtype, and which they are."""
    groups = grouped(model)
    trained = [same for same in groups if same.requires_grad]
    count, total = (sum(same.parameters for same in which) for which in (trained, groups))
    dtypes = ", ".join(sorted({same.dtype for same in trained}))
    share = f"{count:,} of {total:,} parameters ({count / total:.2%}) in {dtypes}"
    names = list(dict.fromkeys(_layer(same.name) for same in trained if "lora_" in same.name))
    return f"{share}: adapters on {', '.join(names)}" if names else share


def _layer(name: str) -> str:
    return name.partition(".lora_")[0].rpartition(".")[2]
