"""The Llama of the large checkpoints: names and shapes of its tensors, and a file of them in random bytes."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

HIDDEN, INNER, VOCABULARY = 2048, 5632, 32000
_BLOCK_BYTES = 4 << 20
_ITEM_BYTES = {"F32": 4, "BF16": 2}


def decoder(layers: int) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of each tensor, without the prefix of the model that it is in, in the order of safetensors."""
    yield "embed_tokens.weight", [VOCABULARY, HIDDEN]
    for layer in range(layers):
        for name, shape in (
            ("input_layernorm", [HIDDEN]),
            ("mlp.down_proj", [HIDDEN, INNER]),
            ("mlp.gate_proj", [INNER, HIDDEN]),
            ("mlp.up_proj", [INNER, HIDDEN]),
            ("post_attention_layernorm", [HIDDEN]),
            *((f"self_attn.{each}_proj", [HIDDEN, HIDDEN]) for each in "koqv"),
        ):
            yield f"layers.{layer}.{name}.weight", shape
    yield "norm.weight", [HIDDEN]


def header_of(tensors: Iterable[tuple[str, str, list[int]]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """The first bytes of a safetensors file of these (name, dtype, shape), and how many bytes of data follow."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    return len(header).to_bytes(8, "little") + header, end


def fill(path: Path, first: bytes, size: int) -> None:
    """Write a file of `size` bytes that begins with these and goes on at random."""
    with path.open("wb") as file:
        file.write(first)
        while missing := size - file.tell():
            file.write(os.urandom(min(_BLOCK_BYTES, missing)))
