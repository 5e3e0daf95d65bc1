"""Value head: split out of large checkpoints, against copying them, loading them, and starting Python."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import llama
from measure import TOOLS, Benchmark, Command

# Layers of a checkpoint of so many GB.
_LAYERS = {1: 9, 4: 38, 16: 154}


def start(folder: Path) -> Benchmark:
    """The command's own start, against a Python that does nothing."""
    nothing = Command([sys.executable, "-c", "pass"], lambda: None)
    return Benchmark("tools --help", "python -c pass", Command([TOOLS, "--help"], lambda: None), nothing, lambda: "")


def in_place(folder: Path) -> Benchmark:
    """The split where the checkpoint lies, against a flushed copy of its weights."""
    checkpoint = large_checkpoint(folder, 1)
    return Benchmark(
        "fix-valuehead in place, 1 GB",
        "cp model.safetensors, flushed",
        Command([TOOLS, "fix-valuehead", checkpoint], lambda: unsplit(checkpoint)),
        _copied(checkpoint),
        lambda: split_in(checkpoint, 1),
    )


def in_place_against_loading(folder: Path) -> Benchmark:
    """The split where the checkpoint lies, against loading it all, removing it, and saving decoder and head."""
    checkpoint = large_checkpoint(folder, 1)
    script = Path(__file__).with_name("value_head_by_loading.py")
    return Benchmark(
        "fix-valuehead in place, 1 GB",
        "load all, remove, save twice",
        Command([TOOLS, "fix-valuehead", checkpoint], lambda: unsplit(checkpoint)),
        Command([sys.executable, script, folder / "whole"], lambda: _fresh_copy(checkpoint, folder / "whole")),
        lambda: split_in(checkpoint, 1) and split_in(folder / "whole", 1),
    )


def in_place_4_gb(folder: Path) -> Benchmark:
    """The split of a file four times as large; sparse, since no data is read or written."""
    return _against_help(folder, 4)


def in_place_16_gb(folder: Path) -> Benchmark:
    """The split of a file sixteen times as large; sparse, since no data is read or written."""
    return _against_help(folder, 16)


def in_place_1_gb(folder: Path) -> Benchmark:
    """The split of 1 GB, against the command's own start."""
    return _against_help(folder, 1)


def _against_help(folder: Path, gigabytes: int) -> Benchmark:
    checkpoint = large_checkpoint(folder, gigabytes)
    return Benchmark(
        f"fix-valuehead in place, {gigabytes} GB",
        "tools --help",
        Command([TOOLS, "fix-valuehead", checkpoint], lambda: unsplit(checkpoint)),
        Command([TOOLS, "--help"], lambda: None),
        lambda: split_in(checkpoint, gigabytes),
    )


def copied(folder: Path) -> Benchmark:
    """The split into a new file, against a flushed copy of the old one."""
    checkpoint = large_checkpoint(folder, 1)
    kept = checkpoint / ".burnish" / "undo" / "1" / "model.safetensors"

    def whole_again() -> None:
        if kept.exists():
            kept.replace(checkpoint / "model.safetensors")
        unsplit(checkpoint)

    return Benchmark(
        "fix-valuehead --copy, 1 GB",
        "cp model.safetensors, flushed",
        Command([TOOLS, "fix-valuehead", checkpoint, "--copy"], whole_again),
        _copied(checkpoint),
        lambda: split_in(checkpoint, 1),
    )


def to_output(folder: Path) -> Benchmark:
    """The split into a new directory, against a flushed copy of the whole checkpoint."""
    checkpoint, output, copy = large_checkpoint(folder, 1), folder / "split", folder / "copy"
    kept = checkpoint / ".burnish" / "undo" / "1" / "model.safetensors"
    if kept.exists():
        kept.replace(checkpoint / "model.safetensors")
    unsplit(checkpoint)
    return Benchmark(
        "fix-valuehead -o, 1 GB",
        "cp -r, flushed",
        Command(
            [TOOLS, "fix-valuehead", checkpoint, "-o", output],
            lambda: shutil.rmtree(output, ignore_errors=True),
        ),
        Command(
            ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', checkpoint, copy],
            lambda: shutil.rmtree(copy, ignore_errors=True),
        ),
        lambda: split_in(output, 1),
    )


def _copied(checkpoint: Path) -> Command:
    copy = checkpoint.with_suffix(".copy")
    command = ["sh", "-c", 'cp "$0" "$1" && sync "$1"', checkpoint / "model.safetensors", copy]
    return Command(command, lambda: copy.unlink(missing_ok=True))


def _fresh_copy(checkpoint: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkpoint, copy)
    shutil.copy(checkpoint.with_suffix(".first_bytes"), copy.with_suffix(".first_bytes"))
    unsplit(copy)


@cache
def large_checkpoint(folder: Path, gigabytes: int) -> Path:
    """A bf16 Llama with TRL's fp32 head, which safetensors puts before the decoder: 1 GB of random bytes, or more GB
    of a file without blocks."""
    checkpoint = folder / f"checkpoint-{gigabytes}"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}\n')
    header, nbytes = llama.header_of(_tensors(gigabytes), {"format": "pt"})
    first = header + os.urandom(4 * (llama.HIDDEN + 1))  # all that a split may change
    checkpoint.with_suffix(".first_bytes").write_bytes(first)
    if gigabytes > 1:
        (checkpoint / "model.safetensors").write_bytes(first)
        os.truncate(checkpoint / "model.safetensors", len(header) + nbytes)
    else:
        llama.fill(checkpoint / "model.safetensors", first, len(header) + nbytes)
    return checkpoint


def _tensors(gigabytes: int) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape in the order of safetensors: wider dtypes first, then by name."""
    yield "v_head.summary.bias", "F32", [1]
    yield "v_head.summary.weight", "F32", [1, llama.HIDDEN]
    for name, shape in llama.decoder(_LAYERS[gigabytes]):
        yield f"model.{name}", "BF16", shape


def unsplit(checkpoint: Path) -> None:
    """Put the first bytes back as they were, header and head, and remove what the split left."""
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.write(checkpoint.with_suffix(".first_bytes").read_bytes())
    (checkpoint / "value_head.safetensors").unlink(missing_ok=True)
    shutil.rmtree(checkpoint / ".burnish", ignore_errors=True)


def split_in(checkpoint: Path, gigabytes: int) -> str:
    """Assert that the head is in its own file and that the model has every other tensor."""
    names = []
    for file_name in ("model.safetensors", "value_head.safetensors"):
        with (checkpoint / file_name).open("rb") as file:
            names.append(json.loads(file.read(int.from_bytes(file.read(8), "little"))).keys() - {"__metadata__"})
    whole = {name for name, _, _ in _tensors(gigabytes)}
    assert names == [{n for n in whole if not n.startswith("v_head")}, {n for n in whole if n.startswith("v_head")}]
    return "head split out"
