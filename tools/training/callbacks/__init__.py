"""Callbacks for any transformers Trainer; each is imported only when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.training.callbacks.initial_adapter import InitialAdapterCallback
    from tools.training.callbacks.log import LogCallback
    from tools.training.callbacks.pissa_convert import PissaConvertCallback
    from tools.training.callbacks.reporter import ReporterCallback
    from tools.training.callbacks.stop import StopCallback
    from tools.training.callbacks.trained_logits import TrainedLogitsCallback

__all__ = [
    "InitialAdapterCallback",
    "LogCallback",
    "PissaConvertCallback",
    "ReporterCallback",
    "StopCallback",
    "TrainedLogitsCallback",
]

_MODULES = {
    "InitialAdapterCallback": "initial_adapter",
    "LogCallback": "log",
    "PissaConvertCallback": "pissa_convert",
    "ReporterCallback": "reporter",
    "StopCallback": "stop",
    "TrainedLogitsCallback": "trained_logits",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
