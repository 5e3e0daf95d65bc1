"""Which callbacks a run gets: what belongs to every run, and what its configuration asks for."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from tools.training.callbacks import StopCallback
    from tools.training.config import TrainConfig


@dataclass(frozen=True)
class Chosen:
    """The callbacks in the order in which they are told, and the one among them that knows of a stop from outside."""

    callbacks: list[Any]
    stop: "StopCallback"


@contextlib.contextmanager
def chosen(config: "TrainConfig", run_name: str, *, resumed: bool = False) -> Iterator[Chosen]:
    """The callbacks of a run, ready; files, hooks and signal handlers are put in order when it ends, however it ends.

    A `resumed` run goes on where it was reported. Those that add to the metrics come before those that tell them. None
    of ours repairs a checkpoint: they keep what nobody could compute later.
    """
    from tools.training.callbacks import (
        BarrierCallback,
        LogCallback,
        ModelHookCallback,
        NonFiniteCallback,
        ReporterCallback,
        StopCallback,
    )
    from tools.training.callbacks.trackers import continued, tracker_callbacks

    with contextlib.ExitStack() as stack:
        if resumed:
            stack.enter_context(continued(config.run_dir))
        trackers = tracker_callbacks(config.report.report_to, config.report.project, run_name)
        reporter = ReporterCallback(config.model_dump(), report_to=[tracker.name for tracker in trackers])
        wait_s = config.launch.timeout
        log, stop, finite = LogCallback(), StopCallback(wait_s), NonFiniteCallback(wait_s)
        watching = _watching(config, stop)
        for each in (log, stop, finite, *watching):
            stack.callback(each.close)
        theirs = [own(each.path, each.args) for each in config.report.callbacks]
        measuring, telling = [finite, *_measuring(config)], [*trackers, log, reporter, *watching, ModelHookCallback()]
        last = [*_stopping(config), *theirs, BarrierCallback(wait_s), stop]  # all others are waited for
        yield Chosen([*measuring, *telling, *_keeping(config), *last], stop)


def own(path: str, args: dict[str, Any]) -> Any:
    """A user's callback: the object at the dotted path, or of the class there with these arguments.

    Raises CheckpointError when it is no TrainerCallback, and when the class does not make one of these arguments.
    """
    from transformers import TrainerCallback

    from tools.training.dotted import load_dotted

    key = "report.callbacks"
    found = load_dotted(path, key)
    if isinstance(found, TrainerCallback) and not args:
        return found
    if not (isinstance(found, type) and issubclass(found, TrainerCallback)):
        problem = "is an object and takes no args" if isinstance(found, TrainerCallback) else "is no TrainerCallback"
        raise CheckpointError(key, f"{path} {problem}", "name a class that subclasses transformers.TrainerCallback")
    try:
        return found(**args)
    except TypeError as error:
        raise CheckpointError(key, f"{path} does not take args {args!r} ({error})") from error
    except Exception as error:  # whatever the user's own code raises
        raise CheckpointError(key, f"{path} is not made with args {args!r}: {type(error).__name__}: {error}") from error


def _measuring(config: "TrainConfig") -> list[Any]:
    from tools.training.callbacks import GradientNormsCallback

    return [GradientNormsCallback()] if config.report.gradient_norms else []


def _watching(config: "TrainConfig", stop: "StopCallback") -> list[Any]:
    from tools.training.callbacks import MemoryCallback, SamplesCallback

    report = config.report
    samples = SamplesCallback(report.samples, config.generating.settings(), report.samples_every, stop)
    return [*([samples] if report.samples else []), *([MemoryCallback()] if report.memory else [])]


def _keeping(config: "TrainConfig") -> list[Any]:
    from tools.lora.adapters import changes_base
    from tools.training.callbacks import InitialAdapterCallback, TrainedLogitsCallback

    is_changed = config.finetuning.method == "lora" and changes_base(config.finetuning.init_lora_weights)
    return [*([InitialAdapterCallback()] if is_changed else []), TrainedLogitsCallback()]


def _stopping(config: "TrainConfig") -> list[Any]:
    from transformers import EarlyStoppingCallback

    patience = config.finetuning.early_stopping_patience
    return [] if patience is None else [EarlyStoppingCallback(patience, config.finetuning.early_stopping_threshold)]
