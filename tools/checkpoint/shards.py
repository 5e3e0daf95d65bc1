"""Weights of a new checkpoint: one file, or shards and their index under the names that transformers gives them."""

from collections.abc import Mapping

from tools.checkpoint.change import Content, Source, Stored, TensorFile, index_file
from tools.checkpoint.layout import Weights

_STEM = "model"


def rewritten(weights: Weights, tensors: Mapping[str, Source]) -> dict[str, Content | None]:
    """The files that hold `tensors` in place of those of `weights`, always as safetensors.

    A shard becomes a shard with those of its tensors that are left, in their order; what comes from elsewhere goes to
    the end of the last. One shard alone is model.safetensors. Names that safetensors noted as dropped are forgotten.
    """
    groups = _groups(weights, tensors)
    gone: dict[str, Content | None] = {file.name: None for file in weights.files}
    if weights.index is not None:
        gone[weights.index_name] = None
    metadata = {key: text for file in weights.files for key, text in file.metadata.items() if text not in file.tensors}
    names = [f"{_STEM}-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    if len(groups) == 1:
        return gone | {f"{_STEM}.safetensors": TensorFile(groups[0], metadata)}
    shards = dict(zip(names, groups, strict=True))
    files = {file: TensorFile(group, metadata) for file, group in shards.items()}
    return gone | files | {f"{_STEM}.safetensors.index.json": index_file(shards)}


def as_safetensors(name: str) -> str:
    """The name that transformers gives to the same file in safetensors: `model-00001-of-00002.safetensors`."""
    return name.replace("pytorch_model", "model", 1).replace(".bin", ".safetensors", 1)


def _groups(weights: Weights, tensors: Mapping[str, Source]) -> list[dict[str, Source]]:
    """The tensors of each file that is left, in the order of its data, and those from elsewhere with the last."""
    paths = [file.path for file in weights.files]
    own = {name: s for name, s in tensors.items() if isinstance(s, Stored) and s.file.path in paths}
    ordered = sorted(own, key=lambda name: (paths.index(own[name].file.path), own[name].tensor.start))
    groups: dict[object, dict[str, Source]] = {}
    for name in ordered:
        groups.setdefault(own[name].file.path, {})[name] = own[name]
    *_, last = groups.values()
    last |= {name: source for name, source in tensors.items() if name not in own}
    return list(groups.values())
