"""Adapter and base merged by `tools merge-adapter`, against a flushed copy of the base, and against PEFT."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from measure import TOOLS, Benchmark, Command

_SCRIPTS = Path(__file__).parent
GIGABYTES = 4


def against_copy(folder: Path) -> Benchmark:
    """A whole model as output, against the same bytes copied."""
    base, _ = inputs(folder)
    copy = folder / "copy"
    return Benchmark(
        f"merge-adapter, {GIGABYTES} GB",
        "cp -r of the base, flushed",
        _ours(folder),
        Command(
            ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/* "$1"', base, copy],
            lambda: shutil.rmtree(copy, ignore_errors=True),
        ),
        lambda: f"{sum(1 for _ in _differing(base, folder / 'merged'))} tensors changed",
    )


def against_peft(folder: Path) -> Benchmark:
    """The same model by loading base and adapter, merge_and_unload and save_pretrained."""
    base, adapter = inputs(folder)
    theirs = folder / "merged_by_peft"
    return Benchmark(
        f"merge-adapter, {GIGABYTES} GB",
        "PEFT: load, merge_and_unload, save_pretrained",
        _ours(folder),
        Command(
            [sys.executable, _SCRIPTS / "merge_by_peft.py", base, adapter, theirs],
            lambda: shutil.rmtree(theirs, ignore_errors=True),
        ),
        lambda: agreement(folder / "merged", theirs),
    )


@cache
def inputs(folder: Path) -> tuple[Path, Path]:
    """The base and the adapter, made once."""
    base, adapter = folder / "merge-base", folder / "merge-adapter"
    subprocess.run([sys.executable, _SCRIPTS / "merge_inputs.py", str(GIGABYTES), base, adapter], check=True)
    return base, adapter


def _ours(folder: Path) -> Command:
    base, adapter = inputs(folder)
    output = folder / "merged"
    arguments = [TOOLS, "merge-adapter", adapter, "--base", base, "-o", output]
    return Command(arguments, lambda: shutil.rmtree(output, ignore_errors=True))


def agreement(one: Path, other: Path) -> str:
    """In how many tensors two models differ."""
    return f"{sum(1 for _ in _differing(one, other))} tensors differ from PEFT's"


def _differing(one: Path, other: Path) -> Iterator[str]:
    """The tensors with other bytes; asserts that names and sizes are the same."""
    ours, theirs = _tensors(one), _tensors(other)
    assert ours.keys() == theirs.keys()
    for name, (file, start, end) in ours.items():
        other_file, other_start, other_end = theirs[name]
        assert end - start == other_end - other_start
        with file.open("rb") as opened, other_file.open("rb") as other_opened:
            opened.seek(start)
            other_opened.seek(other_start)
            if opened.read(end - start) != other_opened.read(end - start):
                yield name


def _tensors(model: Path) -> dict[str, tuple[Path, int, int]]:
    found = {}
    for file in model.glob("model*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            start = opened.tell()
        header.pop("__metadata__", None)
        found |= {n: (file, start + t["data_offsets"][0], start + t["data_offsets"][1]) for n, t in header.items()}
    return found
