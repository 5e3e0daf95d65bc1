"""Adapters: which initialisations train on a base that they have changed."""

import re
from typing import Any

# They subtract the initial adapter from the base (PEFT 0.21, tuners/lora/layer.py).
_CHANGES_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga")
# Where a trainer keeps the initial adapter, in the run or beside the trained one.
INITIAL_ADAPTER = "pissa_init"


def changes_base(init_lora_weights: Any) -> bool:
    """Whether an adapter with this `init_lora_weights` belongs to a base that its initialisation changed."""
    return isinstance(init_lora_weights, str) and bool(_CHANGES_BASE.fullmatch(init_lora_weights))
