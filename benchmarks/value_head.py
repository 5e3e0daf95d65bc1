"""Value head: split out of a 1 GB checkpoint, against copying it and against starting Python."""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from measure import TOOLS, Benchmark, Command

_BLOCK_BYTES = 4 << 20
_HIDDEN, _INNER, _VOCABULARY, _LAYERS = 2048, 5632, 32000, 9


def in_place(folder: Path) -> Benchmark:
    """The split where the checkpoint lies, against a flushed copy of its weights."""
    checkpoint, copy = large_checkpoint(folder), folder / "copy.safetensors"
    return Benchmark(
        "fix-valuehead in place",
        "cp model.safetensors, flushed",
        Command([TOOLS, "fix-valuehead", checkpoint], lambda: unsplit(checkpoint)),
        Command(
            ["sh", "-c", 'cp "$0" "$1" && sync "$1"', checkpoint / "model.safetensors", copy],
            lambda: copy.unlink(missing_ok=True),
        ),
        lambda: split_in(checkpoint),
    )


def in_place_against_start(folder: Path) -> Benchmark:
    """The split where the checkpoint lies, against a Python that does nothing."""
    checkpoint = large_checkpoint(folder)
    return Benchmark(
        "fix-valuehead in place",
        "python -c pass",
        Command([TOOLS, "fix-valuehead", checkpoint], lambda: unsplit(checkpoint)),
        Command([sys.executable, "-c", "pass"], lambda: None),
        lambda: split_in(checkpoint),
    )


def to_output(folder: Path) -> Benchmark:
    """The split into a new directory, against a flushed copy of the whole checkpoint."""
    checkpoint, output, copy = large_checkpoint(folder), folder / "split", folder / "copy"
    unsplit(checkpoint)
    return Benchmark(
        "fix-valuehead -o",
        "cp -r, flushed",
        Command(
            [TOOLS, "fix-valuehead", checkpoint, "-o", output],
            lambda: shutil.rmtree(output, ignore_errors=True),
        ),
        Command(
            ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', checkpoint, copy],
            lambda: shutil.rmtree(copy, ignore_errors=True),
        ),
        lambda: split_in(output),
    )


@cache
def large_checkpoint(folder: Path) -> Path:
    """A bf16 Llama of random bytes with TRL's fp32 head, which safetensors puts before the decoder."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}\n')
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in _tensors():
        start, end = end, end + math.prod(shape) * (4 if dtype == "F32" else 2)
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    first = len(header).to_bytes(8, "little") + header + os.urandom(4 * (_HIDDEN + 1))  # all that a split may change
    (folder / "first_bytes").write_bytes(first)
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.write(first)
        while missing := 8 + len(header) + end - file.tell():
            file.write(os.urandom(min(_BLOCK_BYTES, missing)))
    return checkpoint


def _tensors() -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape in the order of safetensors: wider dtypes first, then by name."""
    yield "v_head.summary.bias", "F32", [1]
    yield "v_head.summary.weight", "F32", [1, _HIDDEN]
    yield "model.embed_tokens.weight", "BF16", [_VOCABULARY, _HIDDEN]
    for layer in range(_LAYERS):
        for name, shape in (
            ("input_layernorm", [_HIDDEN]),
            ("mlp.down_proj", [_HIDDEN, _INNER]),
            ("mlp.gate_proj", [_INNER, _HIDDEN]),
            ("mlp.up_proj", [_INNER, _HIDDEN]),
            ("post_attention_layernorm", [_HIDDEN]),
            *((f"self_attn.{each}_proj", [_HIDDEN, _HIDDEN]) for each in "koqv"),
        ):
            yield f"model.layers.{layer}.{name}.weight", "BF16", shape
    yield "model.norm.weight", "BF16", [_HIDDEN]


def unsplit(checkpoint: Path) -> None:
    """Put the first bytes back as they were, header and head, and remove what the split left."""
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.write((checkpoint.parent / "first_bytes").read_bytes())
    (checkpoint / "value_head.safetensors").unlink(missing_ok=True)
    shutil.rmtree(checkpoint / ".burnish", ignore_errors=True)


def split_in(checkpoint: Path) -> str:
    """Assert that the head is in its own file and that the model has every other tensor."""
    names = []
    for file_name in ("model.safetensors", "value_head.safetensors"):
        with (checkpoint / file_name).open("rb") as file:
            names.append(json.loads(file.read(int.from_bytes(file.read(8), "little"))).keys() - {"__metadata__"})
    whole = {name for name, _, _ in _tensors()}
    assert names == [{n for n in whole if not n.startswith("v_head")}, {n for n in whole if n.startswith("v_head")}]
    return "head split out"
