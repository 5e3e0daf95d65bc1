"""Whatever the model, its shards, and where the head lies in them: split and join lose nothing and undo each other."""

import itertools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from snapshots import contents
from test_frameworks import tensors
from test_heads import ROWS

from tools.checkpoint.header import DTYPE_BITS, build_header
from tools.checkpoint.layout import Checkpoint
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.join_valuehead import join_valuehead
from tools.postprocess.undo import undo

DTYPES = st.sampled_from(["F64", "F32", "BF16", "F16", "I64", "U8"])
SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
# What stands before the names of the decoder, and what each framework needs to find its own again.
WRAPPERS = {"trlx": "base_model.", "trlx-value-layers": "base_model.", "trlx-ilql": "base_model."}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A head of the catalogue among other tensors: `tensors` in the order of the data, `cuts` between shards."""
    row = draw(st.sampled_from(sorted(ROWS.keys() - {"peft"})))
    wrapper = draw(st.sampled_from(["", WRAPPERS.get(row, "pretrained_model.")]))
    decoder = draw(st.dictionaries(st.from_regex(r"m[a-z0-9]{0,3}(\.[a-z0-9]{1,3}){1,2}", fullmatch=True), SHAPES))
    head_dtype = draw(DTYPES)
    own = {name: (head_dtype, shape) for name, shape in ROWS[row][3].items()}
    rest = {wrapper + name: (draw(DTYPES), shape) for name, shape in decoder.items()}
    order = draw(st.permutations([*own, *rest]))
    count = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), min_size=count - 1, max_size=count - 1)))
    together = draw(st.booleans())  # as most trainers leave it, the head side by side
    if together:
        order = [*(n for n in order if n in rest), *own] if draw(st.booleans()) else [*own, *rest]
    return {"wrapper": wrapper, "tensors": {n: {**own, **rest}[n] for n in order}, "cuts": cuts, "own": set(own)}


def write(model: dict[str, Any], path: Path) -> None:
    """The files as the format allows them, each tensor filled with bytes of its own."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    names = list(model["tensors"])
    bounds = [0, *model["cuts"], len(names)]
    groups = [g for g in (names[start:end] for start, end in itertools.pairwise(bounds)) if g]
    weight_map, total = {}, 0
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        rows, data = [], b""
        for name in group:
            dtype, shape = model["tensors"][name]
            nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
            rows.append((name, dtype, shape, nbytes))
            data += bytes((sum(name.encode()) + position) % 251 for position in range(nbytes))
        (path / file).write_bytes(build_header(rows, {"format": "pt"}) + data)
        weight_map |= dict.fromkeys(group, file)
        total += len(data)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


def check_files(path: Path) -> None:
    """The official reader opens every file, and the index says what is in which and how much in all."""
    opened = Checkpoint.open(path)
    for weights in opened.weights:
        for file in weights.files:
            with safe_open(file.path, framework="np") as reader:
                assert set(reader.keys()) == file.tensors.keys()
        if weights.index:
            held = {name: file.name for file in weights.files for name in file.tensors}
            assert weights.index["weight_map"] == held
            assert weights.index["metadata"]["total_size"] == sum(t.nbytes for t in weights.tensors.values())


@settings(max_examples=60, deadline=None)
@given(models(), st.booleans())
def test_split_and_join_are_inverse(model: dict[str, Any], copy: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="heads-"))
    try:
        path, wrapper = folder / "checkpoint", model["wrapper"]
        write(model, path)
        old, before = tensors(path), contents(path)
        untouched = {"config.json"} | {
            file.name
            for weights in Checkpoint.open(path).weights
            for file in weights.files
            if not model["own"] & file.tensors.keys() and not wrapper
        }
        kept = {((path / name).stat().st_ino, before[name]) for name in untouched}

        fix_valuehead(path, copy=copy)
        split, files = tensors(path), contents(path)
        assert split == {n if n in model["own"] else n.removeprefix(wrapper): value for n, value in old.items()}
        head = Checkpoint.open(path).head
        assert head
        assert head.tensors.keys() == model["own"]
        assert kept <= {((path / name).stat().st_ino, digest) for name, digest in files.items()}
        check_files(path)
        assert not fix_valuehead(path).changed

        join_valuehead(path, wrapper=wrapper if len(split) > len(head.tensors) else "", copy=copy)
        joined = contents(path)
        assert tensors(path) == old
        check_files(path)
        assert not join_valuehead(path).changed

        fix_valuehead(path)
        assert tensors(path) == split
        for expected in (joined, files, before):
            undo(path)
            assert contents(path) == expected
    finally:
        shutil.rmtree(folder)
