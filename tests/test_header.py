"""safetensors headers: what is valid for the official parser is valid here, and damage is named."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import build_header, parse_header, read_header


def packed(fields: Any, data: bytes = b"") -> bytes:
    raw = json.dumps(fields).encode()
    return struct.pack("<Q", len(raw)) + raw + data


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, path, metadata={"format": "pt"})
    return path


def test_names_dtypes_shapes_and_offsets(good: Path) -> None:
    header = read_header(good)
    assert header.metadata == {"format": "pt"}
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in header.tensors.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("F32", (4,), 16),
    }
    assert header.data_start + header.data_bytes == good.stat().st_size


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LFS, r"a Git LFS pointer; the real file is 4976698672 bytes; run `git lfs pull`"),
        (b"<!doctype html><html>" + b" " * 100, r"an HTML or XML page, not safetensors"),
        (b"PK\x03\x04" + b"\0" * 100, r"a pickle written by torch.save"),
        (b"\x80\x02}q\x00." + b"\0" * 100, r"a pickle written by torch.save"),
    ],
    ids=["git lfs pointer", "web page", "torch zip", "old torch pickle"],
)
def test_fi_01_what_lies_under_the_name_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (-10, r"cut short: \d+ of \d+ bytes; the first tensor affected is b"),
        (-30, r"cut short: \d+ of \d+ bytes; the first tensor affected is a"),
        (40, r"cut inside its header: 40 bytes, the header alone is \d+"),
        (5, r"5 bytes; a safetensors file has at least 8"),
        (0, r"0 bytes; a safetensors file has at least 8"),
    ],
)
def test_fi_02_how_far_a_file_is_cut(keep: int, message: str, good: Path) -> None:
    good.write_bytes(good.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=message):
        read_header(good)


def test_fi_02_a_header_that_is_not_json(good: Path) -> None:
    content = bytearray(good.read_bytes())
    content[8] = ord("!")
    good.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="its header is not JSON"):
        read_header(good)


BAD = {
    "gap": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    "overlap": {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    },
    "shape": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    "dtype": {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
    "negative": {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
    "null metadata value": {"__metadata__": {"format": None}},
    "fields": {"a": {"dtype": "F32"}},
    "list": [],
}


@pytest.mark.parametrize("why", BAD)
def test_what_the_official_parser_refuses_is_refused(why: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(BAD[why], b"\0" * 8))
    with pytest.raises(SafetensorError):
        load(path.read_bytes())
    with pytest.raises(CheckpointError):
        read_header(path)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__")
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
shapes = st.lists(st.integers(0, 4), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, st.tuples(dtypes, shapes), max_size=6))
def test_a_header_built_here_holds_what_the_library_wrote(kinds: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    content = save({name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()})
    length = struct.unpack("<Q", content[:8])[0]
    header = parse_header(Path("x"), content[8 : 8 + length])
    rows = [(name, t.dtype, t.shape, t.nbytes) for name, t in header.tensors.items()]
    rebuilt = build_header(rows, {}) + content[8 + length :]
    found = load(rebuilt)
    assert {name: (t.dtype, list(t.shape)) for name, t in found.items()} == {n: (d, s) for n, (d, s) in kinds.items()}


def test_a_header_too_long_for_its_place_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit in 16"):
        build_header([("a", "F32", (1,), 4)], {}, length=16)


def test_fi_05_empty_and_null_metadata_are_none(tmp_path: Path) -> None:
    for metadata in ({}, None):
        path = tmp_path / "model.safetensors"
        path.write_bytes(
            packed({"__metadata__": metadata, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4)
        )
        assert load(path.read_bytes()).keys() == {"a"}
        header = read_header(path)
        assert (dict(header.metadata), list(header.tensors)) == ({}, ["a"])
