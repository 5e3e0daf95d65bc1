"""Value head: split out of the model weights into a file of its own."""

from typing import Annotated

import typer

from tools.checkpoint.change import Change, Content, Stored, TensorFile, refuse_ungathered, renamed, same_bytes, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.heads import Head, architectures_of, choose_head, find_heads
from tools.checkpoint.layout import Checkpoint, Weights
from tools.checkpoint.report import Report
from tools.checkpoint.rewrite import rewrite
from tools.checkpoint.wrappers import strip_wrappers, wrapper_of
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
) -> Report:
    """Split the value head out of the model weights, so that the model loads as a plain causal LM.

    The head of a PPO or reward model goes to value_head.safetensors (value_head.bin beside a .bin), under its own
    names; the decoder keeps its names, without the `pretrained_model.` that a ZeRO-3 save puts before them. Tensors
    keep their bytes and dtypes. In place only headers are edited where the head lies at either end of a shard.

    Example: tools fix-valuehead runs/ppo/checkpoint-500
    """
    return rewrite(
        "fix-valuehead",
        checkpoint,
        lambda source: _plan(source, head, safetensors),
        output=output,
        overwrite=overwrite,
        dry_run=dry_run,
        copy=copy,
        options={**({"head": head} if head else {}), **({"safetensors": True} if safetensors else {})},
    )


def _plan(source: Checkpoint, wanted: str | None, safetensors: bool) -> Change:
    refuse_ungathered(source)
    model = source.model
    if model is None and not source.weights:
        raise CheckpointError(source.path, "holds no weights", "consolidate it first if it is a sharded training state")
    head = choose_head(source.path, model.tensors, source.config, wanted) if model else None
    if model is None:
        return Change(_why_nothing(source))
    head_names = head.names if head else {}
    decoder = [name for name in model.tensors if name not in head_names]
    if head is None and source.head is None and any(strip_wrappers(name) == name for name in decoder):
        return Change(_why_nothing(source))
    wrapper = wrapper_of(source.path / model.name, decoder)
    _refuse_adapter_tensors(source, [name.removeprefix(wrapper) for name in decoder])
    names: dict[str, str | None] = {name: name.removeprefix(wrapper) for name in decoder}
    is_bin = model.name.endswith(".bin")
    files = renamed(
        model, names | dict.fromkeys(head_names), _as_safetensors(model) if is_bin and safetensors else None
    )
    if head:
        files |= _head_file(source, model, head, ".bin" if is_bin and not safetensors else ".safetensors")
    if not files:
        return Change(_why_nothing(source))
    return Change(_summary(source, head, wrapper, decoder), files, _details(model, head), frozenset(head_names))


def _why_nothing(source: Checkpoint) -> str:
    if source.head:
        return f"the value head is in {source.head.name} already; nothing to do"
    own = find_heads(source.model.tensors, source.config) if source.model else ()
    if own:
        names, architecture = ", ".join(own[0].names), ", ".join(architectures_of(source.config))
        return f"{names} belongs to {architecture}; nothing to do (--head {own[0].label} splits it out)"
    return "no value head in the weights; nothing to do"


def _as_safetensors(model: Weights) -> dict[str, str]:
    """The names that transformers gives to the same files in safetensors: `model-00001-of-00002.safetensors`."""
    names = [*(file.name for file in model.files), model.index_name]
    return {n: n.replace("pytorch_model", "model", 1).replace(".bin", ".safetensors", 1) for n in names}


def _head_file(source: Checkpoint, model: Weights, head: Head, suffix: str) -> dict[str, Content | None]:
    """The file of the head; nothing when it is there already, with the same bytes."""
    tensors: dict[str, Stored] = {bare: stored(model)[name] for name, bare in head.names.items()}
    if source.head is None:
        return {f"value_head{suffix}": TensorFile(tensors)}
    present = stored(source.head)
    if present.keys() != tensors.keys() or not all(same_bytes(tensors[name], present[name]) for name in tensors):
        raise CheckpointError(
            source.path,
            f"{', '.join(head.names)} in the weights differ from what {source.head.name} holds",
            "keep one of the two: move the file away if the weights are newer",
        )
    return {}


def _refuse_adapter_tensors(source: Checkpoint, names: list[str]) -> None:
    inside = next((name for name in names if name.startswith("base_model.model.")), None)
    if inside:
        assert source.model is not None
        raise CheckpointError(source.path / source.model.name, f"{inside} belongs to an adapter, not to a causal LM")


def _summary(source: Checkpoint, head: Head | None, wrapper: str, decoder: list[str]) -> str:
    parts = []
    if head:
        parts.append(f"value head split out ({', '.join(head.names.values())})")
    if wrapper:
        parts.append(f"{wrapper} dropped from {len(decoder)} names")
    if not decoder and source.adapter is None:
        parts.append("only the head was saved here, no decoder")
    if head is None and source.head is None:
        parts.append("there is no value head")
    if decoder and source.config is None and source.adapter is None:
        parts.append("config.json is missing here: copy it from the base model")
    return "; ".join(parts)


def _details(model: Weights, head: Head | None) -> dict[str, object]:
    if head is None:
        return {}
    shapes = {bare: f"{model.tensors[n].dtype} {list(model.tensors[n].shape)}" for n, bare in head.names.items()}
    return {"head": {"framework": head.layout.frameworks, **shapes}}
