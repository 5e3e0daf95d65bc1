"""Actor and critic: one large file split into two models, against copying it."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from measure import TOOLS, Benchmark, Command

_BLOCK_BYTES = 4 << 20
_HIDDEN, _INNER, _VOCABULARY = 2048, 5632, 32000
# Layers of each of the two models for so many GB of both.
_LAYERS = {1: 3, 4: 17}


def split(folder: Path) -> Benchmark:
    """1 GB of random bytes."""
    return _against_copy(folder, 1)


def split_4_gb(folder: Path) -> Benchmark:
    """4 GB of random bytes, for the peak of memory."""
    return _against_copy(folder, 4)


def _against_copy(folder: Path, gigabytes: int) -> Benchmark:
    checkpoint, output = actor_critic(folder, gigabytes), folder / f"split-{gigabytes}"
    copy = checkpoint.with_suffix(".copy")
    return Benchmark(
        f"split-actor-critic, {gigabytes} GB",
        "cp model.safetensors, flushed",
        Command(
            [TOOLS, "split-actor-critic", checkpoint, "-o", output], lambda: shutil.rmtree(output, ignore_errors=True)
        ),
        Command(
            ["sh", "-c", 'cp "$0" "$1" && sync "$1"', checkpoint / "model.safetensors", copy],
            lambda: copy.unlink(missing_ok=True),
        ),
        lambda: _split_in(output, gigabytes),
    )


@cache
def actor_critic(folder: Path, gigabytes: int) -> Path:
    """A bf16 Llama and its critic of the same size as safetensors' save_model leaves them, in random bytes."""
    checkpoint = folder / f"actor-critic-{gigabytes}"
    checkpoint.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "pad_token_id": 0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    backbone = list(_backbone(gigabytes))
    fields: dict[str, object] = {
        "__metadata__": {f"value_model.model.{name}": f"critic_backbone.{name}" for name, _ in backbone}
    }
    end = 0
    for name, shape in (
        *((f"critic_backbone.{name}", shape) for name, shape in backbone),
        ("policy.lm_head.weight", [_VOCABULARY, _HIDDEN]),
        *((f"policy.model.{name}", shape) for name, shape in backbone),
        ("value_model.score.weight", [1, _HIDDEN]),
    ):
        start, end = end, end + 2 * math.prod(shape)
        fields[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        while missing := 8 + len(header) + end - file.tell():
            file.write(os.urandom(min(_BLOCK_BYTES, missing)))
    return checkpoint


def _backbone(gigabytes: int) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of each tensor of the decoder, without the prefix of the model that it is in."""
    yield "embed_tokens.weight", [_VOCABULARY, _HIDDEN]
    for layer in range(_LAYERS[gigabytes]):
        for name, shape in (
            ("input_layernorm", [_HIDDEN]),
            ("mlp.down_proj", [_HIDDEN, _INNER]),
            ("mlp.gate_proj", [_INNER, _HIDDEN]),
            ("mlp.up_proj", [_INNER, _HIDDEN]),
            ("post_attention_layernorm", [_HIDDEN]),
            *((f"self_attn.{each}_proj", [_HIDDEN, _HIDDEN]) for each in "koqv"),
        ):
            yield f"layers.{layer}.{name}.weight", shape
    yield "norm.weight", [_HIDDEN]


def _split_in(output: Path, gigabytes: int) -> str:
    """Assert that each model has its own tensors under its own names."""
    decoder = {f"model.{name}" for name, _ in _backbone(gigabytes)}
    for part, head in (("policy", "lm_head.weight"), ("critic", "score.weight")):
        with (output / part / "model.safetensors").open("rb") as file:
            fields = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert fields.keys() - {"__metadata__"} == decoder | {head}
    return "two models"
