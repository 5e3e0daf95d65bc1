"""The decoder under a value head: loaded by transformers and PEFT, whatever its names were wrapped in."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.heads.wrappers import bare_names, inner_wrappers, wrapper_of
from tools.hub import local_copy
from tools.logits import load_model, loading_as, with_adapter
from tools.lora.adapters import changes_base
from tools.training.stored_head import StoredHead, stored_heads

AS_STORED: Mapping[str, Any] = {"dtype": "auto", "local_files_only": True}


def load_decoder(
    checkpoint: Checkpoint, heads: Iterable[StoredHead], base: Path | None, settings: Mapping[str, Any] = AS_STORED
) -> Any:
    """The causal LM without `heads`, or only what is under its lm_head where the checkpoint has no lm_head.

    An adapter is put on `base` or on the base it names; a full model takes the config of `base` where it has none.
    `settings` go to from_pretrained. Raises CheckpointError when a weight would be random, and when a tensor belongs
    neither to the decoder nor to a head.
    """
    names = frozenset(name for head in heads for name in head.names)
    if checkpoint.kind == "adapter":
        return _load_adapter(checkpoint, names, base)
    if checkpoint.model is None or not bare_names(checkpoint.model.tensors).keys() - _on_disk(heads):
        raise CheckpointError(checkpoint.path, "only the value head is here, no decoder", "was it saved elsewhere?")
    _refuse_gathered_adapter(checkpoint)
    model, loading = _from_pretrained(checkpoint, heads, base, settings)
    if odd := sorted(loading["unexpected_keys"] - names):
        problem = f"{odd[0]} is neither of {type(model).__name__} nor of the value head"
        raise CheckpointError(checkpoint.path, problem, "is it the checkpoint of a causal LM?")
    missing = sorted(loading["missing_keys"])
    if not missing:
        return model
    if set(missing) <= _lm_head(model):
        return model.base_model
    raise CheckpointError(
        checkpoint.path,
        f"{len(missing)} weights of {type(model).__name__} are missing and would be random: {', '.join(missing[:3])}",
        "is it the checkpoint of a causal LM?",
    )


def _from_pretrained(
    checkpoint: Checkpoint, heads: Iterable[StoredHead], base: Path | None, settings: Mapping[str, Any]
) -> tuple[Any, Mapping[str, set[str]]]:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    described = checkpoint.path if checkpoint.config else base
    if described is None:
        raise CheckpointError(
            checkpoint.path, "has no config.json", "copy it from the base model, or name that as base"
        )
    code = {name: settings[name] for name in ("trust_remote_code",) if name in settings}
    wrappers = _without_wrappers(checkpoint, heads)
    with loading_as("a causal LM", checkpoint.path):
        config = AutoConfig.from_pretrained(described, **code)
        generation = {} if checkpoint.config else {"generation_config": GenerationConfig.from_model_config(config)}
        model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            key_mapping=wrappers,
            output_loading_info=True,
            **generation,
            **settings,
        )
    _forget(model, wrappers)
    return model, loading


def _without_wrappers(checkpoint: Checkpoint, heads: Iterable[StoredHead]) -> dict[str, str]:
    """Patterns for transformers, to read each name without the wrappers before and inside it."""
    assert checkpoint.model
    own = _on_disk(heads)
    decoder = [name for name in checkpoint.model.tensors if name not in own]
    wrapper = wrapper_of(checkpoint.path / checkpoint.model.name, decoder, own)
    inner = {part for name in decoder for part in inner_wrappers(name.removeprefix(wrapper))}
    before = {f"^{re.escape(wrapper)}": ""} if wrapper else {}
    return before | {rf"(?<![^.]){re.escape(part)}": "" for part in sorted(inner)}


def _forget(model: Any, wrappers: Mapping[str, str]) -> None:
    """Save the model under its own names: transformers would put the wrappers back (5.24, core_model_loading.py)."""
    if wrappers:
        conversions = getattr(model, "_weight_conversions", None) or ()
        model._weight_conversions = [each for each in conversions if not wrappers.keys() & set(each.source_patterns)]


def _on_disk(heads: Iterable[StoredHead]) -> set[str]:
    return {name for head in heads for name in (*head.head.names, *head.head.companions)}


def _lm_head(model: Any) -> set[str]:
    """The names of the output embeddings, where they are not those of the input."""
    tied = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    own = {id(parameter) for parameter in model.get_output_embeddings().parameters()} - tied
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def _refuse_gathered_adapter(checkpoint: Checkpoint) -> None:
    assert checkpoint.model
    inside = next((n for n, bare in bare_names(checkpoint.model.tensors).items() if ".lora_" in bare), None)
    if inside:
        problem = f"{inside} belongs to an adapter among the weights of its model"
        raise CheckpointError(checkpoint.path / checkpoint.model.name, problem, "run tools fix-valuehead first")


def _load_adapter(checkpoint: Checkpoint, heads: frozenset[str], base: Path | None) -> Any:
    """A causal LM with the adapter on it; that of a classifier, which holds the head itself, without that head."""
    adapter = checkpoint.adapter_config or {}
    if changes_base(init := adapter.get("init_lora_weights", True)):
        problem = f"trained on a base that {init} changed"
        raise CheckpointError(checkpoint.path, problem, "run `tools convert-pissa` on it first")
    if checkpoint.adapter is None:
        _refuse_gathered_adapter(checkpoint)
        raise CheckpointError(checkpoint.path, "the tensors of its adapter are not here", "was the save cut short?")
    from peft import PeftConfig

    model = _load_base(checkpoint, base or adapter.get("base_model_name_or_path"))
    config = PeftConfig.from_pretrained(checkpoint.path)
    config.task_type, config.init_lora_weights = "CAUSAL_LM", True
    own = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    config.modules_to_save = [module for module in config.modules_to_save or () if module in own] or None
    return with_adapter(model, checkpoint, config, beside=heads)


def _load_base(checkpoint: Checkpoint, named: Path | str | None) -> Any:
    """The base of an adapter, which may have a value head of its own that the adapter's takes the place of."""
    path = local_copy(named) if named else None
    if path is None:
        raise CheckpointError(checkpoint.path, f"its base, {named}, is not on this machine", "name it as base")
    heads = stored_heads(opened := Checkpoint.open(path))
    if not heads or opened.kind != "model":
        return load_model(path)
    model = load_decoder(opened, heads, None)
    if model.get_output_embeddings() is None:
        problem = f"its base, {path}, has no lm_head"
        raise CheckpointError(checkpoint.path, problem, "name the causal LM that it was made from as base")
    return model
