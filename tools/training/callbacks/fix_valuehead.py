# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""The value head split out of each checkpoint while training goes on, for those who have a Trainer of their own."""

import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint, Weights
from tools.checkpoint.report import Report
from tools.heads.wrappers import strip_wrappers
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.training.split_checkpoint import restore_valuehead_checkpoint

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class FixValueHeadModelCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Splits the value head out of each checkpoint after it is saved, on the main process: `checkpoint-N` then loads as
    a plain causal LM, or adapter, with the head in `value_head.safetensors`.

    The Trainer itself does not read that file. So when it resumes from a checkpoint, and after it has loaded the best
    one, this callback puts decoder and head back into the model; DeepSpeed and FSDP load from files of their own.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not hasattr(model, "_keys_to_ignore_on_save"):  # asked for where keys are missing (transformers 5.24)
            model._keys_to_ignore_on_save = None

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            fix_valuehead_checkpoint(model, Path(args.output_dir) / f"checkpoint-{state.global_step}", True)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step > 0:
            self._restore(args, model, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._restore(args, model, Path(state.best_model_checkpoint))

    def _restore(self, args: Any, model: nn.Module, folder: Path) -> None:
        if args.deepspeed or args.fsdp:
            return
        if not folder.is_dir():
            logger.warning("%s is not there; the value head of the checkpoint that was loaded may not be", folder)
            return
        restore_valuehead_checkpoint(model, folder)


def fix_valuehead_checkpoint(model: nn.Module | None, output_dir: Path | str, safe_serialization: bool) -> Report:
    """Make what a Trainer saved of a model with value head a plain model, or adapter, and a file with the head.

    `model` gives what no file holds: the adapter, where only the head of an adapted model was saved, and config.json,
    where only a state dict was; it may be None where nothing is missing. `safe_serialization` makes safetensors of a
    `.bin`; what is safetensors stays so. A second call is nothing to do. Raises CheckpointError; then nothing is lost.
    """
    folder = Path(output_dir)
    saved = Checkpoint.open(folder)
    _refuse_unknown_wrapper(saved, model)
    if (adapted := _first(model, PeftModel)[1]) is not None:
        _add_adapter(saved, adapted)
    elif (decoder := _first(model, PreTrainedModel)[1]) is not None:
        _add_config(saved, decoder)
    return fix_valuehead(folder, safetensors=safe_serialization)


def _first(model: nn.Module | None, kind: type | tuple[type, ...]) -> tuple[str, Any]:
    """The outermost module of this kind and its name in the model, which is empty for the model itself."""
    modules = model.named_modules() if model is not None else iter(())
    return next(((name, module) for name, module in modules if isinstance(module, kind)), ("", None))


def _refuse_unknown_wrapper(saved: Checkpoint, model: nn.Module | None) -> None:
    """The decoder must be called `pretrained_model`, or the class must leave its own name for it out of state_dict."""
    attribute, inner = _first(model, (PeftModel, PreTrainedModel))
    own = {name for name, _ in inner.named_parameters(remove_duplicate=False)} if attribute else set()
    names = saved.model.tensors if saved.model else ()
    bare = {name: stripped for name in names if (stripped := strip_wrappers(name)) not in own}
    odd = next((name for name, inside in bare.items() if inside.removeprefix(f"{attribute}.") in own), None)
    if odd:
        problem = f"{odd}: nobody looks for a decoder under {attribute}."
        raise CheckpointError(saved.path, problem, "call it pretrained_model, or leave that out in state_dict()")


def _add_adapter(saved: Checkpoint, model: PeftModel) -> None:
    """The adapter of the live model where no file holds it; its config alone where it lies among gathered weights."""
    if saved.adapter_config is not None:
        return
    with _draft(saved.path, last="adapter_config.json") as draft:
        if saved.model and any(".lora_" in name for name in saved.model.tensors):
            config = copy(model.active_peft_config)
            config.inference_mode = True
            config.save_pretrained(str(draft))
        else:
            model.save_pretrained(str(draft), selected_adapters=[model.active_adapters[0]])


def _add_config(saved: Checkpoint, decoder: PreTrainedModel) -> None:
    """config.json and generation_config.json where the Trainer wrote none, with the dtype of the tensors on disk."""
    if saved.config is not None or saved.model is None:
        return
    config = copy(decoder.config)
    config.architectures = [type(decoder).__name__]
    config.dtype = _dtype(saved.model)
    with _draft(saved.path, last="config.json") as draft:
        config.save_pretrained(draft)
        if decoder.can_generate() and decoder.generation_config is not None:
            decoder.generation_config.save_pretrained(draft)


def _dtype(weights: Weights) -> str:
    """What most bytes are, by its name in torch: the decoder may have been saved in another dtype than it trains in."""
    sizes: Counter[str] = Counter()
    for tensor in weights.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    return TORCH_DTYPES[sizes.most_common(1)[0][0]]


@contextlib.contextmanager
def _draft(folder: Path, last: str) -> Iterator[Path]:
    """An empty folder whose files move into `folder` when all are written, `last` being what loaders ask for first."""
    draft = folder / ".draft"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        yield draft
        for file in sorted(draft.iterdir(), key=lambda file: file.name == last):
            file.replace(folder / file.name)
    except (OSError, SafetensorError) as error:
        problem = f"{last} and what belongs to it could not be written ({error})"
        raise CheckpointError(folder, problem, "nothing is lost; free some space, and call it again") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
