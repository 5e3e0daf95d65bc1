"""Tensors as the safetensors files of a model: in the layout of the base, or in shards of a greatest size."""

import re
from collections.abc import Mapping

from tools.checkpoint.change import Content, Source, TensorFile, index_file
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Weights
from tools.checkpoint.shards import as_safetensors

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_INDEX = "model.safetensors.index.json"


def size_in_bytes(text: str) -> int:
    """`5GB`, `300 MB` or a number of bytes.

    Raises CheckpointError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B?)", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size <= 0:
        raise CheckpointError("--max-shard-size", f"{text} is not a size", "write it as 5GB or 300MB")
    return size


def like_base(base: Weights, tensors: Mapping[str, Source]) -> dict[str, Content]:
    """Each tensor in the file that held it in the base, new ones in the last, `.bin` files as safetensors."""
    files = {as_safetensors(file.name): (list(file.tensors), file.metadata) for file in base.files}
    known = {name for names, _ in files.values() for name in names}
    last = next(reversed(files))
    files[last][0].extend(name for name in tensors if name not in known)
    laid_out = {
        file: TensorFile({name: tensors[name] for name in names if name in tensors}, metadata)
        for file, (names, metadata) in files.items()
    }
    return _with_index({file: content for file, content in laid_out.items() if content.tensors}, base)


def in_shards(tensors: Mapping[str, Source], largest: int, metadata: Mapping[str, str]) -> dict[str, Content]:
    """The tensors in their order, a new file whenever the next one would make it larger than `largest` bytes."""
    groups: list[dict[str, Source]] = []
    size = 0
    for name, source in tensors.items():
        if not groups or size + source.nbytes > largest:
            groups.append({})
            size = 0
        groups[-1][name] = source
        size += source.nbytes
    count = len(groups)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    return _with_index({n: TensorFile(group, metadata) for n, group in zip(names, groups, strict=True)}, None)


def _with_index(files: Mapping[str, TensorFile], base: Weights | None) -> dict[str, Content]:
    if list(files) == ["model.safetensors"]:
        return dict(files)
    return {**files, _INDEX: index_file({name: content.tensors for name, content in files.items()}, base)}
