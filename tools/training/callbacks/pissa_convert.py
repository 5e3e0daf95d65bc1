# ruff: noqa: TID253 - a TrainerCallback; imported only when one is made
"""PissaConvertCallback: a PiSSA run ends with its adapter as plain LoRA beside the one that was trained."""

import shutil
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from tools.checkpoint.errors import CheckpointError
from tools.lora.adapters import INITIAL_ADAPTER
from tools.postprocess.convert_pissa import convert_pissa
from tools.training.callbacks.initial_adapter import InitialAdapterCallback, base_changing, save

BACKUP = "pissa_backup"
CONVERTED = "pissa_converted"


class PissaConvertCallback(InitialAdapterCallback):
    """Leaves three adapters in the output directory, where LLaMA-Factory's callback of this name leaves them:
    `pissa_init` as it was before the first step, `pissa_backup` as it was trained, for the residual base, and
    `pissa_converted`, plain LoRA for the original base.

    The conversion reads the two on disk, so the live model, its configuration and `pissa_init` stay as they are, and a
    conversion that fails can be repeated by `tools convert-pissa`. Does nothing when the init does not change the base.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        adapted = base_changing(model)
        if adapted is not None and _adapts_tied(adapted.get_base_model()):
            problem = "an adapter on lm_head, which is tied to the embedding, can never be converted"
            raise CheckpointError("PissaConvertCallback", problem, "leave lm_head out of target_modules")
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        adapted = base_changing(model)
        if adapted is None or not state.is_world_process_zero:
            return
        output = Path(args.output_dir)
        _replace(adapted, output / BACKUP)
        convert_pissa(output / BACKUP, init=output / INITIAL_ADAPTER, output=output / CONVERTED, overwrite=True)


def _adapts_tied(model: Any) -> bool:
    """Whether the output matrix has an adapter and is the embedding."""
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return isinstance(output, LoraLayer) and output.weight is model.get_input_embeddings().weight


def _replace(model: PeftModel, folder: Path) -> None:
    """Write the adapter to `folder`; what an earlier end of the run left there goes when the new one is whole."""
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)
    save(model, new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
