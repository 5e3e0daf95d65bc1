"""The adapter of a run: a fresh one on the decoder, of the kind that `finetuning` describes."""

import logging
import warnings
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.lora.adapters import changes_base
from tools.training.config import FROM_DATA, FinetuningArguments
from tools.training.targets import ALL_LINEAR, check_targets, experts, linear_layers, targets

logger = logging.getLogger(__name__)

# Fields of `finetuning` that are fields of PEFT's LoraConfig, under the same names.
_SETTINGS = (
    *("r", "lora_alpha", "lora_dropout", "exclude_modules", "target_parameters", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "use_dora", "bias", "modules_to_save", "ensure_weight_tying"),
)


def add_adapter(
    decoder: Any,
    finetuning: FinetuningArguments,
    initial_adapter: Path | None = None,
    *,
    calibration: Any = None,
    resume: Path | None = None,
    source: str = "",
) -> Any:
    """The decoder with a new adapter. Raises CheckpointError when the two do not go together.

    `initial_adapter` is where the adapter's first state is kept, or found again, when its init changes the base;
    without it the base is left as it is, as a preview needs it. `calibration` are the rows for inits that look at data,
    `resume` is the checkpoint that will be loaded into the adapter, and `source` the directory of a quantised base.
    """
    from peft import LoraConfig, PeftConfig, get_peft_model

    check_targets(decoder, finetuning)
    if left := [name for name in experts(decoder) if not finetuning.target_parameters]:
        logger.info("experts get no adapter; finetuning.target_parameters could name %s", ", ".join(left))
    init = finetuning.init_lora_weights
    settings = {name: getattr(finetuning, name) for name in _SETTINGS}
    settings |= {"task_type": "CAUSAL_LM", "target_modules": _resolved(decoder, finetuning)}
    try:
        if initial_adapter is None or init == "loftq" or (init == "eva" and resume):
            if init == "eva" and resume:  # the ranks that it found are written there
                found = PeftConfig.from_pretrained(str(resume))
                settings |= {name: getattr(found, name) for name in ("rank_pattern", "alpha_pattern", "target_modules")}
            model = get_peft_model(decoder, LoraConfig(init_lora_weights=True, **settings))
            if init == "loftq" and initial_adapter and not resume:
                _loftq(model, source)
            return model
        return _started(decoder, init, settings, initial_adapter, calibration)
    except ValueError as error:
        raise CheckpointError("finetuning", str(error).strip().partition("\n")[0]) from error


def _started(decoder: Any, init: bool | str, settings: dict[str, Any], folder: Path, calibration: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    from tools.training.callbacks import initial_adapter

    if init in FROM_DATA:
        from tools.training import calibration as data

        config = data.config_of(str(init), **settings)
        if init == "eva":
            return data.eva_adapter(decoder, config, calibration)
        if not folder.exists():
            data.look(decoder, config, calibration)
    else:
        config = LoraConfig(init_lora_weights=init, **settings)
    if changes_base(init):
        return initial_adapter.add_adapter(decoder, config, folder)
    return get_peft_model(decoder, config)


def _resolved(decoder: Any, finetuning: FinetuningArguments) -> Any:
    """`target_modules` for PEFT; of the inits that look at data it wants every layer by its name."""
    named = targets(finetuning)
    by_name = named == ALL_LINEAR and finetuning.init_lora_weights in ("corda", "lora_ga")
    return linear_layers(decoder) if by_name else named


def _loftq(model: Any, source: str) -> None:
    """A and B that make up for what the 4-bit base has lost; the base itself stays as it is."""
    from peft import replace_lora_weights_loftq

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replace_lora_weights_loftq(model, source)
