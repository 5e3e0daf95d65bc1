"""Value head: split out of the model weights into a file of its own."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tools.checkpoint.change import Change, Content, Source, TensorFile, refuse_ungathered, renamed, stored
from tools.checkpoint.config_files import missing_config
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint, Weights
from tools.checkpoint.report import Report
from tools.checkpoint.rewrite import rewrite
from tools.checkpoint.shards import as_safetensors
from tools.heads.files import refuse_contradictions, refuse_other_values
from tools.heads.finding import Head, architectures_of, choose_head, find_heads, some
from tools.heads.wrappers import bare_names, inner_wrappers, wrapper_of
from tools.lora.gathered_adapter import GatheredAdapter, adapter_files, gathered_adapter
from tools.postprocess.options import CheckpointDir, DryRun, OutputDir, Overwrite


def fix_valuehead(
    checkpoint: CheckpointDir,
    *,
    output: OutputDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    head: Annotated[
        str | None, typer.Option(help="The head to split, where there are several or it is part of the model: `score`.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Write new shards instead of editing headers in place.")] = False,
    safetensors: Annotated[
        bool, typer.Option("--safetensors", help="Write safetensors where the source is .bin.")
    ] = False,
    config_from: Annotated[
        Path | None,
        typer.Option(help="Copy config.json and generation_config.json from this model, where they are missing."),
    ] = None,
) -> Report:
    """Split the value head out of the model weights, so that the model loads as a plain causal LM.

    The head of a PPO or reward model goes to value_head.safetensors (value_head.bin beside a .bin), under its own
    names; the decoder keeps its names, without what DDP, FSDP, torch.compile, ZeRO-3 saves of TRL, trlx and
    DeepSpeed-Chat put into them. A LoRA adapter among the gathered weights becomes adapter_model.safetensors. Tensors
    keep their bytes and dtypes. In place only headers are edited where the head lies at either end of a shard.

    Example: tools fix-valuehead runs/ppo/checkpoint-500
    """
    options = {
        "head": head,
        "safetensors": safetensors,
        "config_from": os.path.relpath(config_from, checkpoint) if config_from else None,
    }
    return rewrite(
        "fix-valuehead",
        checkpoint,
        lambda source: _plan(source, head, safetensors, config_from),
        output=output,
        overwrite=overwrite,
        dry_run=dry_run,
        copy=copy,
        options={name: value for name, value in options.items() if value},
    )


def _plan(source: Checkpoint, wanted: str | None, safetensors: bool, config_from: Path | None) -> Change:
    refuse_ungathered(source)
    refuse_contradictions(source)
    model = source.model
    if model is None:
        if not source.weights:
            remedy = "consolidate it first if it is a sharded training state"
            raise CheckpointError(source.path, "holds no weights", remedy)
        return Change(_why_nothing(source))
    head = _chosen(source, model, wanted)
    own = {**head.names, **head.companions} if head else {}
    wrapper, decoder = _decoder(source, model, own)
    suffix = ".bin" if model.name.endswith(".bin") and not safetensors else ".safetensors"
    adapter = gathered_adapter(source, source.path / model.name, decoder)
    files: dict[str, Content | None] = {}
    if adapter:
        files |= adapter_files(source, adapter, suffix)
    elif head or any(name != inner for name, inner in decoder.items()):
        files |= renamed(model, decoder | dict.fromkeys(own), str if model.name.endswith(suffix) else as_safetensors)
    if head:
        files |= _head_file(source, model, own, suffix)
    config = missing_config(source, config_from) if decoder and not adapter else {}
    if not files and not config:
        return Change(_why_nothing(source))
    gone = {*own, *(adapter.base if adapter else ()), *(adapter.names if adapter and source.adapter else ())}
    summary = _summary(source, head, wrapper, decoder, adapter, config)
    details = {"head": head.described(model.tensors)} if head else {}
    return Change(summary, {**files, **config}, details, frozenset(gone))


def _chosen(source: Checkpoint, model: Weights, wanted: str | None) -> Head | None:
    """The head to split; None as well where the head file holds the wanted one already and the weights do not."""
    if wanted and source.head:
        split, left = (
            {name for head in find_heads(weights.tensors, source.config) for name in (head.label, head.layout.prefix)}
            for weights in (source.head, model)
        )
        if wanted in split - left:
            return None
    return choose_head(source.path, model.tensors, source.config, wanted)


def _decoder(source: Checkpoint, model: Weights, own: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The wrapper before the names of the decoder, and what each of them is without wrappers."""
    bare = {name: inner for name, inner in bare_names(model.tensors).items() if name not in own}
    wrapped = [name for name, inner in bare.items() if name != inner]
    is_wrapped = own or source.head or len(wrapped) == len(bare)
    if not is_wrapped and all(name.startswith("module.") for name in wrapped):  # a part of the model is called so
        return "", {name: name for name in bare}
    return wrapper_of(source.path / model.name, bare, own), bare


def _head_file(source: Checkpoint, model: Weights, own: Mapping[str, str], suffix: str) -> dict[str, Content | None]:
    """The file of the head; nothing when it is there already, with the same bytes."""
    tensors: dict[str, Source] = {bare: stored(model)[name] for name, bare in own.items()}
    if source.head is None:
        return {f"value_head{suffix}": TensorFile(tensors)}
    refuse_other_values(source, tensors, stored(source.head))
    return {}


def _why_nothing(source: Checkpoint) -> str:
    if source.head:
        return f"the value head is in {source.head.name} already; nothing to do"
    for weights in (w for w in (source.model, source.adapter) if w):
        for head in find_heads(weights.tensors, source.config):
            names, architecture = ", ".join(head.names), ", ".join(architectures_of(source.config))
            if head.layout.in_adapter:
                return f"{names} belongs to the adapter; nothing to do"
            how = f"(--head {head.label} splits it out)"
            if head.outputs > 1:
                return f"{names}: {head.outputs} outputs, so no value head; nothing to do {how}"
            return f"{names} belongs to {architecture}; nothing to do {how}"
    return "no value head in the weights; nothing to do"


def _summary(
    source: Checkpoint,
    head: Head | None,
    wrapper: str,
    decoder: Mapping[str, str],
    adapter: GatheredAdapter | None,
    config: Mapping[str, object],
) -> str:
    parts = []
    if head:
        parts.append(f"value head split out ({some(head.names.values())})")
        if head.companions:
            parts.append(f"{len(head.companions)} tensors of the reference model (frozen_head.) kept beside it")
    for dropped, count in _dropped(wrapper, decoder).items():
        parts.append(f"{dropped} dropped from {count} names")
    if adapter:
        base = f"; {len(adapter.base)} tensors of its base left out" if adapter.base else ""
        parts.append(f"{len(adapter.names)} tensors of the LoRA adapter under the names of PEFT{base}")
    if config:
        parts.append(f"{' and '.join(config)} copied from the base")
    if not decoder and source.adapter is None:
        parts.append("only the head was saved here, no decoder")
    if head is None and source.head is None:
        parts.append("there is no value head")
    is_headless = head and (head.declared or "rwtransformer." in wrapper) and "lm_head.weight" not in decoder.values()
    if decoder and is_headless:
        parts.append(_headless(source))
    if decoder and not (source.config or source.adapter_config or config):
        parts.append("config.json is missing here: copy it with --config-from the base model")
    return "; ".join(parts)


def _dropped(wrapper: str, decoder: Mapping[str, str]) -> dict[str, int]:
    """What was taken out of how many names: the wrapper before all of them, and those inside some."""
    inner = Counter(part for name in decoder for part in set(inner_wrappers(name.removeprefix(wrapper))))
    return ({wrapper: len(decoder)} if wrapper else {}) | dict(sorted(inner.items()))


def _headless(source: Checkpoint) -> str:
    names = ", ".join(architectures_of(source.config))
    still = f", and config.json still names {names}" if names else ""
    return f"what remains has no lm_head of its own: AutoModel loads it{still}"
