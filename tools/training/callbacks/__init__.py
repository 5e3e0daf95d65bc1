"""Callbacks for any transformers Trainer; each is imported only when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.training.callbacks.barrier import BarrierCallback
    from tools.training.callbacks.fix_valuehead import FixValueHeadModelCallback, fix_valuehead_checkpoint
    from tools.training.callbacks.gradient_norms import GradientNormsCallback
    from tools.training.callbacks.initial_adapter import InitialAdapterCallback
    from tools.training.callbacks.log import LogCallback
    from tools.training.callbacks.memory import MemoryCallback
    from tools.training.callbacks.model_hook import ModelHookCallback
    from tools.training.callbacks.non_finite import NonFiniteCallback
    from tools.training.callbacks.pissa_convert import PissaConvertCallback
    from tools.training.callbacks.reporter import ReporterCallback
    from tools.training.callbacks.samples import SamplesCallback
    from tools.training.callbacks.save_processor import SaveProcessorCallback
    from tools.training.callbacks.stop import StopCallback
    from tools.training.callbacks.trained_logits import TrainedLogitsCallback
    from tools.training.split_checkpoint import restore_valuehead_checkpoint

__all__ = [
    "BarrierCallback",
    "FixValueHeadModelCallback",
    "GradientNormsCallback",
    "InitialAdapterCallback",
    "LogCallback",
    "MemoryCallback",
    "ModelHookCallback",
    "NonFiniteCallback",
    "PissaConvertCallback",
    "ReporterCallback",
    "SamplesCallback",
    "SaveProcessorCallback",
    "StopCallback",
    "TrainedLogitsCallback",
    "fix_valuehead_checkpoint",
    "restore_valuehead_checkpoint",
]

_MODULES = {
    "BarrierCallback": "barrier",
    "FixValueHeadModelCallback": "fix_valuehead",
    "GradientNormsCallback": "gradient_norms",
    "InitialAdapterCallback": "initial_adapter",
    "LogCallback": "log",
    "MemoryCallback": "memory",
    "ModelHookCallback": "model_hook",
    "NonFiniteCallback": "non_finite",
    "PissaConvertCallback": "pissa_convert",
    "ReporterCallback": "reporter",
    "SamplesCallback": "samples",
    "SaveProcessorCallback": "save_processor",
    "StopCallback": "stop",
    "TrainedLogitsCallback": "trained_logits",
    "fix_valuehead_checkpoint": "fix_valuehead",
    "restore_valuehead_checkpoint": "fix_valuehead",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
