"""A LoRA adapter among the weights of its whole model, as ZeRO-3 gathers it: its tensors under the names PEFT reads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.checkpoint.change import Content, Source, TensorFile, same_bytes, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint

_INSIDE = "base_model.model."
# PEFT gives the name of the adapter to its live tensors, and leaves it out of the file.
_TRAINED = re.compile(r"(?P<module>.+)\.(?P<kind>lora_[A-Za-z_]+)(\.default)?(?P<rest>\.(weight|bias))?")
_SAVED_MODULE = re.compile(r"(?P<module>.+)\.modules_to_save\.default\.(?P<rest>.+)")
# PEFT saves an embedding with the adapter that targets it: its vocabulary may have been resized.
_EMBEDDING = re.compile(r"(.+\.)?(embed_tokens|lm_head)\.base_layer\.weight")
_MAGNITUDE = "lora_magnitude_vector"
# Fields of adapter_config.json by which tensors of the base itself are trained, or others than LoRA's.
_UNREADABLE = ("trainable_token_indices", "target_parameters")


@dataclass(frozen=True)
class GatheredAdapter:
    """`names` maps names on disk to those in adapter_model.safetensors, `base` holds those of the frozen base."""

    names: Mapping[str, str]
    base: tuple[str, ...]


def gathered_adapter(source: Checkpoint, file: Path, bare: Mapping[str, str]) -> GatheredAdapter | None:
    """The adapter among tensors with these names (on disk -> without wrappers); None when there is none.

    Raises CheckpointError without adapter_config.json, and for tensors of which it is not known whether the adapter
    trained them.
    """
    inside = [name for name, inner in bare.items() if inner.startswith(_INSIDE)]
    if not inside:
        return None
    config = source.adapter_config
    if config is None:
        problem = f"{inside[0]} belongs to an adapter, and adapter_config.json is not here"
        raise CheckpointError(file, problem, "copy it from another checkpoint of the run")
    odd = [field for field in _UNREADABLE if config.get(field)]
    if config.get("peft_type", "LORA") != "LORA" or config.get("bias", "none") != "none" or odd:
        what = odd[0] if odd else f"{config.get('peft_type')} with bias={config.get('bias')}"
        raise CheckpointError(file, f"an adapter with {what} among the weights of its model", "save it with PEFT")
    if outside := [name for name in bare if name not in inside]:
        raise CheckpointError(file, f"{outside[0]} is no tensor of the adapter that {inside[0]} belongs to")
    names: dict[str, str] = {}
    for name in inside:
        if saved := _saved_name(file, bare[name]):
            names[name] = saved
    if not any(".lora_" in saved for saved in names.values()):
        raise CheckpointError(file, f"{inside[0]} belongs to the base of an adapter, and no lora_A is here")
    return GatheredAdapter(names, tuple(name for name in inside if name not in names))


def adapter_files(source: Checkpoint, adapter: GatheredAdapter, suffix: str) -> dict[str, Content | None]:
    """adapter_model in place of the model's files; nothing new when PEFT wrote the same tensors itself."""
    model = source.model
    assert model
    files: dict[str, Content | None] = {file.name: None for file in model.files}
    if model.index is not None:
        files[model.index_name] = None
    tensors: dict[str, Source] = {saved: stored(model)[name] for name, saved in sorted(adapter.names.items())}
    if source.adapter is None:
        return {**files, f"adapter_model{suffix}": TensorFile(tensors)}
    present = stored(source.adapter)
    if differing := [n for n, t in tensors.items() if n not in present or not same_bytes(t, present[n])]:
        problem = f"{differing[0]} in {model.name} differs from that in {source.adapter.name}"
        raise CheckpointError(source.path, problem, "keep one of the two: move the other file away")
    return files


def _saved_name(file: Path, name: str) -> str | None:
    """What PEFT calls it in its file; None for a tensor of the base that it leaves out."""
    if _EMBEDDING.fullmatch(name):
        return name
    if found := _SAVED_MODULE.fullmatch(name):
        return f"{found['module']}.{found['rest']}"
    if found := _TRAINED.fullmatch(name):
        rest = "" if found["kind"] == _MAGNITUDE else found["rest"] or ""
        return f"{found['module']}.{found['kind']}{rest}"
    if ".lora_" in name or ".modules_to_save." in name:
        problem = f"{name} belongs to an adapter that is not called default"
        raise CheckpointError(file, problem, "save that adapter alone with PEFT")
    return None
