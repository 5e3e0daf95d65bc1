"""What servers of adapters take, and what makes an adapter fit: vLLM's limits, which others share."""

from collections.abc import Mapping
from typing import Any

from tools.lora.adapters import changes_base, unknown_fields
from tools.lora.recovering import why_not_recomputed
from tools.lora.settings import highest_rank, is_folded

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 16
# Settings that add something vLLM has no place for, so that it refuses the adapter or leaves the part out.
_MERGED_ONLY = ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias", "target_parameters")


def rank_option(rank: int) -> str | None:
    """What vLLM must be started with for an adapter of this rank; None when its default is enough."""
    if rank <= DEFAULT_RANK:
        return None
    room = next((each for each in RANKS if each >= rank), None)
    return f"--max-lora-rank {room}" if room else f"none: it serves up to {RANKS[-1]}"


def serving_limits(config: Mapping[str, Any]) -> dict[str, str]:
    """By what of the configuration stands in the way: why, and the option or command that resolves it."""
    if (method := config.get("peft_type")) != "LORA":
        return {f"peft_type {method}": "not LoRA, which is what servers take and what is known here"}
    limits: dict[str, str] = dict.fromkeys(unknown_fields(config), "changes what LoRA computes; not known here")
    kind = config.get("init_lora_weights")
    if changes_base(kind):
        again = "at random" if why_not_recomputed(str(kind)) else "again"
        limits[f"init_lora_weights {kind}"] = (
            f"rewrites the base on load, decomposing it {again}; convert first: tools convert-pissa"
        )
    if isinstance(config.get("r"), int) and (option := rank_option(rank := highest_rank(config))):
        needed = f"start vLLM with {option}" if option.startswith("--") else f"vLLM serves up to {RANKS[-1]}"
        limits[f"rank {rank}"] = f"{needed}, or tools convert-pissa --max-rank {min(DEFAULT_RANK, rank)}"
    patterns = [field for field in ("use_rslora", "rank_pattern", "alpha_pattern") if config.get(field)]
    if patterns and not is_folded(config):
        limits[", ".join(patterns)] = "readers that know alpha / r alone take another scale; --fold-scaling"
    for field in (name for name in _MERGED_ONLY if config.get(name)):
        limits[field] = "not served as an adapter; merge it into the base: tools merge-adapter"
    if config.get("bias", "none") != "none":
        limits[f"bias {config['bias']}"] = "not served as an adapter; merge it into the base: tools merge-adapter"
    return limits
