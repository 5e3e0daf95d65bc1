"""What is in a checkpoint directory: read from names, JSON and headers alone."""

from collections import Counter
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import HEAD_FILES, Checkpoint, Weights, checkpoints_in
from tools.checkpoint.report import Report, size_text
from tools.heads.finding import Head, architectures_of, find_heads
from tools.heads.wrappers import ACTOR_CRITIC, strip_wrappers
from tools.postprocess.options import CheckpointDir


def inspect(checkpoint: CheckpointDir) -> Report:
    """Show what a checkpoint or run directory holds: weights, adapter, value head, tokenizer, training state.

    Nothing is loaded: names, JSON files and tensor headers are read, so it takes the same time whatever the size.

    Example: tools inspect runs/sft/checkpoint-500
    """
    opened = Checkpoint.open(checkpoint, accept_run=True)
    details: dict[str, Any] = {"kind": opened.kind}
    if opened.recovered:
        details["recovered"] = opened.recovered
    for name, weights in (("model", opened.model), ("adapter", opened.adapter), ("value head", opened.head)):
        if weights:
            details[f"{name} weights"] = _weights(weights)
    if opened.adapter_config is not None:
        details["adapter_config.json"] = _adapter(opened.adapter_config)
        from tools.lora.adapters import refuse_odd_values
        from tools.lora.serving import serving_limits

        if opened.adapter_config.get("peft_type") == "LORA":
            refuse_odd_values(opened.path / "adapter_config.json", opened.adapter_config)
        details["serving"] = serving_limits(opened.adapter_config) or "as an adapter, nothing in the way"
    elif opened.config is not None:
        details["config.json"] = _config(opened.config)
    for where, weights in (("weights", opened.model), ("adapter", opened.adapter), ("head file", opened.head)):
        if weights and (heads := _heads(weights, opened.config)):
            details[f"value head in the {where}"] = heads
    if opened.model and any(strip_wrappers(name).startswith(ACTOR_CRITIC) for name in opened.model.tensors):
        details["policy and value model"] = "in one file; `tools split-actor-critic` separates them"
    details["tokenizer and processor"] = list(opened.processor_files) or "none"
    details["training state"] = list(opened.training_state) or "none"
    if run := checkpoints_in(opened.path):
        details["checkpoints"] = {path.name: _kind(path.name, path) for path in run}
    return Report("inspect", str(checkpoint), changed=False, summary=_summary(opened, run), details=details)


def _summary(opened: Checkpoint, run: tuple[Any, ...]) -> str:
    if opened.kind == "run":
        return f"run directory with {len(run)} checkpoints"
    tensors = [tensor for weights in opened.weights for tensor in weights.tensors.values()]
    size = size_text(sum(tensor.nbytes for tensor in tensors))
    named = ", ".join(architectures_of(opened.config))
    what = f"{opened.kind} ({named})" if opened.kind == "model" and named else opened.kind
    return f"{what}, {sum(t.elements for t in tensors):,} parameters in {len(tensors)} tensors, {size}"


def _kind(name: str, path: Any) -> str:
    try:
        opened = Checkpoint.open(path)
    except CheckpointError as error:
        return f"damaged: {error.problem}"
    return opened.kind + (" with training state" if opened.training_state else "")


def _weights(weights: Weights) -> dict[str, Any]:
    shown: dict[str, Any] = {file.name: size_text(file.path.stat().st_size) for file in weights.files[:20]}
    if len(weights.files) > 20:
        shown["..."] = f"{len(weights.files)} shards in all"
    counts = Counter(tensor.dtype for tensor in weights.tensors.values())
    shown["tensors"] = ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common()) or "none"
    if empty := [name for name, tensor in weights.tensors.items() if tensor.elements == 0]:
        shown["un-gathered"] = f"{len(empty)} tensors with 0 elements: {', '.join(empty[:3])}"
    return shown


def _heads(weights: Weights, config: Any) -> dict[str, Any]:
    """Each tensor of each head with its dtype, shape and framework, and what can be done with it."""
    shown: dict[str, Any] = {}
    for head in find_heads(weights.tensors, config):
        for name in head.names:
            tensor = weights.tensors[name]
            shown[name] = f"{tensor.dtype} {list(tensor.shape)} ({head.layout.frameworks}; {_remedy(head, weights)})"
    return shown


def _remedy(head: Head, weights: Weights) -> str:
    if head.layout.in_adapter:
        return "part of the adapter"
    if weights.name in HEAD_FILES:
        return "`tools join-valuehead` puts it back into the weights"
    if head.declared:
        return "part of the model"
    return "`tools fix-valuehead` splits it out" if head.outputs == 1 else f"{head.outputs} outputs"


def _config(config: Any) -> dict[str, Any]:
    fields = ("model_type", "architectures", "dtype", "torch_dtype", "vocab_size", "tie_word_embeddings")
    return {field: config[field] for field in fields if config.get(field) is not None}


def _adapter(config: Any) -> dict[str, Any]:
    fields = ("peft_type", "base_model_name_or_path", "init_lora_weights", "r", "lora_alpha", "use_rslora", "use_dora")
    more = ("rank_pattern", "alpha_pattern", "modules_to_save", "target_modules", "bias", "target_parameters")
    shown = {
        field: config[field] for field in (*fields, *more) if config.get(field) not in (None, {}, [], "none", False)
    }
    return shown
