"""What training needs before its first step: arguments, tokenizer, rows and decoder, found to go together."""

import logging
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from tools.training.config import TrainConfig
    from tools.training.precision import Precision
    from tools.training.stages import Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What training needs besides the adapter; `eval_rows` None when no evaluation is asked for."""

    args: Any
    tokenizer: Any
    decoder: Any
    train_rows: Any
    eval_rows: Any


def load(config: "TrainConfig", stage: "Stage", arguments: dict[str, Any], resume: Path | None) -> Loaded:
    """Arguments, rows and decoder of a run, found to go together. Raises CheckpointError when they do not."""
    from tools.lora.adapters import INITIAL_ADAPTER, changes_base
    from tools.training.callbacks.initial_adapter import require
    from tools.training.lengths import require_room
    from tools.training.model import check_quantization, load_tokenizer
    from tools.training.precision import chosen_precision

    if resume and changes_base(config.finetuning.init_lora_weights):
        require(config.run_dir / INITIAL_ADAPTER)
    check_quantization(config.model.quantization)
    precision = chosen_precision(config, arguments)
    logger.info("precision: %s", precision)
    args = trainer_args(config, stage, arguments, precision)
    tokenizer = load_tokenizer(config.model)
    train_rows, eval_rows = load_rows(config, stage, args, tokenizer)
    decoder = stage.load_decoder(config.model, precision.weights)
    if not config.model.quantization:
        decoder = decoder.to(args.device)
    for rows in filter(None, (train_rows, eval_rows)):
        require_room(rows.longest, rows.place, decoder.config.get_text_config())
    args.use_cache = decoder.config.get_text_config().use_cache  # or the Trainer would write its own into config.json
    return Loaded(args, tokenizer, decoder, train_rows.dataset, eval_rows and eval_rows.dataset)


def trainer_args(config: "TrainConfig", stage: "Stage", arguments: dict[str, Any], precision: "Precision") -> Any:
    """The stage's own config object: what the user wrote, over our defaults."""
    import torch

    from tools.training.config_rules import in_step

    defaults = {
        "bf16": precision.bf16,
        "fp16": precision.fp16,
        "use_cpu": not torch.accelerator.is_available(),
        "disable_tqdm": not sys.stderr.isatty(),
        "include_num_input_tokens_seen": "non_padding",
        "logging_nan_inf_filter": False,
        "log_level_replica": "error",
        "ddp_timeout": math.ceil(config.launch.timeout),
        **in_step(arguments, config.data.eval_file is not None),
    }
    fixed = {**stage.DEFAULTS, "report_to": "none", "run_name": run_name(config), "project": config.report.project}
    try:
        return stage.ARGUMENTS(**defaults | arguments | fixed)
    except (ValueError, OverflowError) as error:
        raise CheckpointError("training", " ".join(str(error).split())) from error


def calibration(config: "TrainConfig", rows: Any, tokenizer: Any) -> Any:
    """The rows that the adapter's init looks at, if it looks at any."""
    from tools.training.config import FROM_DATA

    if config.finetuning.method == "full" or config.finetuning.init_lora_weights not in FROM_DATA:
        return None
    from tools.training.calibration import Calibration

    return Calibration(rows, tokenizer.pad_token_id, config.finetuning.calibration_rows)


def load_rows(config: "TrainConfig", stage: "Stage", args: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The rows to train on and to evaluate on, the second None when no evaluation is asked for; reported in the log."""
    is_evaluated = config.data.eval_file is not None or args.eval_strategy != "no"
    loaded = [stage.load_rows(config.data, tokenizer, split) for split in ("train", "eval")[: 1 + is_evaluated]]
    for split, rows in zip(("train", "eval"), loaded, strict=False):
        for line in rows.report:
            logger.info("%s: %s", split, line)
    return loaded[0], loaded[1] if is_evaluated else None


def run_name(config: "TrainConfig") -> str:
    return config.report.run_name or config.run_dir.name
