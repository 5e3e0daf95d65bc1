"""Callbacks for any transformers Trainer; each is imported only when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.training.callbacks.gradient_norms import GradientNormsCallback
    from tools.training.callbacks.initial_adapter import InitialAdapterCallback
    from tools.training.callbacks.log import LogCallback
    from tools.training.callbacks.memory import MemoryCallback
    from tools.training.callbacks.model_hook import ModelHookCallback
    from tools.training.callbacks.non_finite import NonFiniteCallback
    from tools.training.callbacks.reporter import ReporterCallback
    from tools.training.callbacks.samples import SamplesCallback
    from tools.training.callbacks.stop import StopCallback
    from tools.training.callbacks.trained_logits import TrainedLogitsCallback

__all__ = [
    "GradientNormsCallback",
    "InitialAdapterCallback",
    "LogCallback",
    "MemoryCallback",
    "ModelHookCallback",
    "NonFiniteCallback",
    "ReporterCallback",
    "SamplesCallback",
    "StopCallback",
    "TrainedLogitsCallback",
]

_MODULES = {
    "GradientNormsCallback": "gradient_norms",
    "InitialAdapterCallback": "initial_adapter",
    "LogCallback": "log",
    "MemoryCallback": "memory",
    "ModelHookCallback": "model_hook",
    "NonFiniteCallback": "non_finite",
    "ReporterCallback": "reporter",
    "SamplesCallback": "samples",
    "StopCallback": "stop",
    "TrainedLogitsCallback": "trained_logits",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
