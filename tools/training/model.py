"""The model and the tokenizer of a run: loaded, checked, and given an adapter."""

import logging
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.training.config import FinetuningArguments, ModelArguments
from tools.training.ranks import local_rank

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


def load_tokenizer(model: ModelArguments) -> Any:
    """The tokenizer of the model; one without padding token pads with its end-of-sequence token."""
    from transformers import AutoTokenizer

    source = source_of(model.model_name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        require_model(source)
        remedy = "copy one there: tools bundle-processor" if Path(source).is_dir() else "check the name"
        raise CheckpointError(source, f"its tokenizer does not load ({_first_line(error)})", remedy) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise CheckpointError(source, "its tokenizer has neither padding nor end token", "set one of them in it")
    return tokenizer


def require_model(source: str) -> None:
    """Raise CheckpointError for what is no model at all: a directory of something else, or a name of nothing."""
    if not Path(source).is_dir():
        if "/" not in source:
            raise CheckpointError(source, "is no directory here", "check model.model_name_or_path")
        return
    found = Checkpoint.open(source)  # names the checkpoints of a run, and says what an empty directory lacks
    if found.kind == "adapter":
        raise CheckpointError(source, "is an adapter, not a model", "merge it first: tools merge-adapter")


def load_decoder(model: ModelArguments, dtype: str) -> Any:
    """The causal LM, every weight of it found in the checkpoint. Raises CheckpointError when some would be random."""
    source = source_of(model.model_name_or_path)
    quantized = (
        {"quantization_config": _quantization(model, dtype), "device_map": {"": local_rank()}}
        if model.quantization
        else {}
    )
    try:
        decoder, found = _auto_class(source, model.trust_remote_code).from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
            **quantized,
        )
    except (OSError, ValueError, ImportError) as error:
        require_model(source)
        raise CheckpointError(source, f"does not load as a causal LM ({_first_line(error)})") from error
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(source, f"has no {missing[0]}, which would start random", "is it a whole causal LM?")
    logger.info("%s: %s in %s", source, type(decoder).__name__, model.quantization or dtype)
    return decoder


def _auto_class(source: str, trust_remote_code: bool) -> Any:
    """AutoModelForCausalLM, or for a model of images and text that has no class of that kind the one for those."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    kind = type(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))
    reads_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def outline(model: ModelArguments, dtype: str) -> Any:
    """The causal LM without its weights: every name, shape and dtype, and no memory taken (torch's meta device)."""
    import torch
    from transformers import AutoConfig

    source = source_of(model.model_name_or_path)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            return _auto_class(source, model.trust_remote_code).from_config(
                config,
                dtype=getattr(torch, dtype),
                attn_implementation=model.attn_implementation,
                trust_remote_code=model.trust_remote_code,
            )
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(source, f"does not load as a causal LM ({_first_line(error)})") from error


def check_quantization(asked: str | None) -> None:
    """Raise CheckpointError where 4-bit and 8-bit weights cannot be had."""
    from importlib.util import find_spec

    import torch

    if asked is None:
        return
    if not torch.cuda.is_available():
        raise CheckpointError("model.quantization", f"{asked} needs a CUDA GPU, and there is none", "leave it out here")
    if find_spec("bitsandbytes") is None:
        raise CheckpointError("model.quantization", f"{asked} needs bitsandbytes", "pip install bitsandbytes")


def _quantization(model: ModelArguments, dtype: str) -> Any:
    """NF4 with its scales quantised again, as of QLoRA (arXiv 2305.14314), or LLM.int8."""
    import torch
    from transformers import BitsAndBytesConfig

    if model.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


def prepare(
    decoder: Any,
    finetuning: FinetuningArguments,
    initial_adapter: Path,
    *,
    calibration: Any = None,
    resume: Path | None = None,
) -> Any:
    """The decoder as `finetuning` trains it: all of it, or an adapter on it.

    `initial_adapter` is where the adapter's first state is kept, or found again, when its init changes the base;
    `calibration` and `resume` are those of `add_adapter`.
    """
    if finetuning.method == "full":
        return decoder
    if decoder.get_output_embeddings() is None:
        remedy = "use finetuning.method=full, or give it one: tools export-reward-model --to value-head"
        raise CheckpointError(decoder.name_or_path, "has no lm_head, which a LoRA adapter needs", remedy)
    from tools.training.adapter import add_adapter

    if getattr(decoder, "is_quantized", False):
        from peft import prepare_model_for_kbit_training

        decoder = prepare_model_for_kbit_training(decoder, use_gradient_checkpointing=False)
    source = decoder.name_or_path
    return add_adapter(decoder, finetuning, initial_adapter, calibration=calibration, resume=resume, source=source)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
