"""The LoraConfig that goes with changed factors: every module keeps its scale, and older versions of PEFT read it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]

# Fields that every PEFT since 0.12 knows; it raises TypeError for others, so they are written only when they are set.
_OLD_FIELDS = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_dropout", "bias"),
        *("target_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "layer_replication"),
        *("fan_in_fan_out", "init_lora_weights", "loftq_config", "megatron_config", "megatron_core"),
    )
)
# They describe who saved an adapter, or a setting that is off.
_IDLE_FIELDS = frozenset(("peft_version", "qalora_group_size"))
# They describe how it was begun, and have no meaning once that is over.
_INIT_FIELDS = frozenset(("corda_config", "eva_config", "lora_ga_config"))


def doubled(config: Settings) -> dict[str, Any]:
    """For [A; A0] and [B, -B0]: ranks doubled, alphas such that every module keeps its scale.

    The scale is alpha / r, with rslora alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732), so alpha grows by 2 or
    by sqrt(2).
    """
    factor = math.sqrt(2) if config.get("use_rslora") else 2
    alphas = {key: factor * alpha for key, alpha in (config.get("alpha_pattern") or {}).items()}
    ranked = _ranked(config, lambda rank: 2 * rank)
    return {**ranked, "lora_alpha": factor * config["lora_alpha"], "alpha_pattern": alphas, "init_lora_weights": True}


def limited(config: Settings, max_rank: int) -> dict[str, Any]:
    """Ranks of at most `max_rank`; the scale is in the factors."""
    return folded(_ranked(config, lambda rank: min(rank, max_rank)))


def folded(config: Settings) -> dict[str, Any]:
    """A scale of 1 in every module, for readers with rslora and patterns and for those that only know alpha / r."""
    patterns = dict(config.get("rank_pattern") or {})
    return {**config, "lora_alpha": config["r"], "alpha_pattern": patterns, "use_rslora": False}


def is_folded(config: Settings) -> bool:
    """Whether the scale is 1 in every module, told by the configuration alone."""
    same = (config.get("rank_pattern") or {}) == (config.get("alpha_pattern") or {})
    return same and config.get("lora_alpha") == config.get("r") and not config.get("use_rslora")


def highest_rank(config: Settings) -> int:
    """The rank that a server must make room for."""
    return int(max(config["r"], *(config.get("rank_pattern") or {}).values(), 0))


def portable(config: Settings) -> dict[str, Any]:
    """Without fields that say nothing here and that an older PEFT does not know; what is set is never dropped."""
    idle = _IDLE_FIELDS if isinstance(config.get("init_lora_weights"), str) else _IDLE_FIELDS | _INIT_FIELDS
    return {
        field: value
        for field, value in config.items()
        if field in _OLD_FIELDS or (value not in (None, False, {}, []) and field not in idle)
    }


def _ranked(config: Settings, rank_of: Callable[[int], int]) -> dict[str, Any]:
    ranks = {key: rank_of(rank) for key, rank in (config.get("rank_pattern") or {}).items()}
    r = rank_of(config["r"])
    return {**config, "r": r, "rank_pattern": {} if set(ranks.values()) == {r} else ranks}
