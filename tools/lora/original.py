"""The original base of an adapter: its name, its configuration, and why an adapter cannot be moved to it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.opening import open_file
from tools.hub import lasting_name, local_copy
from tools.lora.adapters import OUTPUT_MATRICES, LoraModule
from tools.lora.base_config import is_tied


def original_base(trained: Checkpoint, initial: Path | None, named: str | None) -> str:
    """The base the result belongs on: never the residual one, which a script that prepares PiSSA leaves around init.

    Raises CheckpointError when nothing names it.
    """
    if named:
        return lasting_name(named)
    config = trained.adapter_config or {}
    then_config = (Checkpoint.open(initial).adapter_config or {}) if initial else {}
    found = config.get("base_model_name_or_path") or then_config.get("base_model_name_or_path")
    if not found:
        raise CheckpointError(trained.path, "does not name its base model", "name the original one with --base")
    if initial and Path(found).is_dir() and Path(found).resolve() == initial.resolve().parent:
        problem = f"names {found} as its base, which holds the initial adapter and so is the residual base"
        raise CheckpointError(trained.path, problem, "name the original base with --base")
    return str(found)


def base_config(named: str) -> Mapping[str, Any]:
    """The config.json of the base, and nothing else of it; empty when it does not lie on this machine."""
    folder = local_copy(named)
    if folder is None or not (folder / "config.json").exists():
        return {}
    with open_file(folder / "config.json") as (file, _):
        raw = file.read()
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            folder / "config.json", f"not valid JSON ({error})", "name the base with --base"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(folder / "config.json", "not a JSON object", "name the base with --base")
    return config


def open_base(named: str) -> Checkpoint | None:
    """The base, when its weights lie on this machine."""
    folder = local_copy(named)
    base = Checkpoint.open(folder) if folder is not None else None
    return base if base is not None and base.model is not None else None


def require_base(named: str) -> Checkpoint:
    """Raise CheckpointError when the weights of the base do not lie on this machine."""
    if (base := open_base(named)) is None:
        raise CheckpointError(named, "its weights are not on this machine", "name a local copy with --base")
    return base


def refuse_base(trained: Checkpoint, modules: Iterable[LoraModule], name: str, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a base on which no adapter equals the trained model: quantised, or tied to a target."""
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "some method") if isinstance(quantised, Mapping) else "some method"
        problem = f"is quantised ({method}): its weights are Q(W), and Q(W_res) + B A is not Q(W) + (B A - B0 A0)"
        raise CheckpointError(name, problem, "name the model it was made from with --base, or stay on W_res")
    if is_tied(config) and any(m.name.endswith(OUTPUT_MATRICES) for m in modules if m.kind == "linear"):
        problem = "targets lm_head, which is tied to the embedding: the initial adapter was subtracted from both"
        remedy = "no adapter on the original base equals it; merge on the residual base"
        raise CheckpointError(trained.path / "adapter_config.json", problem, remedy)


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """The number of rows of the token embedding by a config.json; None when it does not say."""
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, Mapping) else None)
    return size if isinstance(size, int) else None
