"""The model and the tokenizer of a run: loaded, checked, and given an adapter."""

import logging
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.training.config import FinetuningArguments, ModelArguments

logger = logging.getLogger(__name__)


def source_of(name_or_path: str) -> str:
    """The name for transformers to load from; a path must exist, and is never looked up on the hub.

    A path is what starts with `.`, `~` or `/`, has more than one `/`, or lies in a directory that exists here.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return str(path)
    in_a_folder = path.parent.name and path.parent.is_dir()
    if name_or_path.startswith((".", "~", "/")) or len(path.parts) > 2 or in_a_folder:
        raise CheckpointError(name_or_path, "not found", "check model.model_name_or_path")
    return name_or_path


def chosen_dtype(asked: str) -> str:
    """`auto` is bfloat16 where the GPU computes in it, else float32."""
    import torch

    if asked != "auto":
        return asked
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"


def load_tokenizer(model: ModelArguments) -> Any:
    """The tokenizer of the model; one without padding token pads with its end-of-sequence token."""
    from transformers import AutoTokenizer

    source = source_of(model.model_name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(source, f"its tokenizer does not load ({_first_line(error)})") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise CheckpointError(source, "its tokenizer has neither padding nor end token", "set one of them in it")
    return tokenizer


def load_decoder(model: ModelArguments, dtype: str) -> Any:
    """The causal LM, every weight of it found in the checkpoint. Raises CheckpointError when some would be random."""
    from transformers import AutoModelForCausalLM

    source = source_of(model.model_name_or_path)
    try:
        decoder, found = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(source, f"does not load as a causal LM ({_first_line(error)})") from error
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(source, f"has no {missing[0]}, which would start random", "is it a whole causal LM?")
    logger.info("%s: %s in %s", source, type(decoder).__name__, dtype)
    return decoder


def prepare(decoder: Any, finetuning: FinetuningArguments, initial_adapter: Path) -> Any:
    """The decoder as `finetuning` trains it: all of it, or an adapter on it.

    `initial_adapter` is where the adapter's first state is kept, or found again, when its init changes the base.
    """
    if finetuning.method == "full":
        return decoder
    if decoder.get_output_embeddings() is None:
        remedy = "use finetuning.method=full, or give it one: tools export-reward-model --to value-head"
        raise CheckpointError(decoder.name_or_path, "has no lm_head, which a LoRA adapter needs", remedy)
    from peft import LoraConfig, get_peft_model

    from tools.checkpoint.adapters import changes_base
    from tools.training.callbacks.initial_adapter import add_adapter

    settings = finetuning.model_dump(exclude={"stage", "method"})
    try:
        config = LoraConfig(task_type="CAUSAL_LM", **settings)
        if changes_base(finetuning.init_lora_weights):
            return add_adapter(decoder, config, initial_adapter)
        return get_peft_model(decoder, config)
    except ValueError as error:
        raise CheckpointError("finetuning", _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
