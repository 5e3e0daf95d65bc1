"""What a loader that knows nothing of Burnish makes of a checkpoint that lies there half changed."""

import json
from hashlib import sha256

from torture.image import Blob, Image

_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL = ("model.safetensors", "pytorch_model.bin")
Loaded = dict[str, str]


def loaded(checkpoint: Image) -> Loaded | None:
    """The digest of each tensor that transformers or PEFT would load, with that of the configuration; None: it fails.

    A loader reads the configuration, finds one file of weights, or an index and every shard that it names, and takes
    all tensors that are in them.
    """
    config_name, candidates = ("adapter_config.json", _ADAPTER) if _is_adapter(checkpoint) else ("config.json", _MODEL)
    try:
        config = json.loads(_file(checkpoint, config_name))
        tensors: Loaded = {"": json.dumps(config, sort_keys=True)}
        for shard in _shards(checkpoint, candidates):
            tensors |= _tensors(shard, _file(checkpoint, shard))
    except (KeyError, ValueError):
        return None
    return tensors


def _is_adapter(checkpoint: Image) -> bool:
    return any(name in checkpoint for name in ("adapter_config.json", *_ADAPTER))


def _file(checkpoint: Image, name: str) -> bytes:
    node = checkpoint[name]
    if isinstance(node, str):  # the blob that a link names lies beside the checkpoint and never changes
        return b""
    assert isinstance(node, Blob)
    return node.data


def _shards(checkpoint: Image, candidates: tuple[str, ...]) -> list[str]:
    for name in candidates:
        if name in checkpoint:
            return [name]
        if f"{name}.index.json" in checkpoint:
            return sorted(set(json.loads(_file(checkpoint, f"{name}.index.json"))["weight_map"].values()))
    raise KeyError("no weights")


def _tensors(name: str, data: bytes) -> Loaded:
    if not name.endswith(".safetensors") or not data:
        return {name: sha256(data).hexdigest()}
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    if max(entry["data_offsets"][1] for entry in header.values()) != len(data) - start:
        raise ValueError("safetensors refuses what does not end with its last tensor")
    found = {}
    for tensor, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        found[tensor] = f"{entry['dtype']} {entry['shape']} {sha256(data[begin:end]).hexdigest()}"
    return found
