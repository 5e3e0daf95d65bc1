"""No file makes a reader do anything but return a value or raise CheckpointError, soon and in little memory."""

import io
import json
import pickle
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import read_header
from tools.checkpoint.pickles import read_bin


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_mutated_files_are_read_right_or_refused(target: str) -> None:
    answers = fuzz.fuzz(target, 2000)
    assert answers["accepted"] > 50
    assert len(answers) > 20


numbers = st.sampled_from([*fuzz.NUMBERS, -1, 0.5, 4.0, True, None, 2**64, 2**70])
shapes = st.lists(st.one_of(st.integers(0, 3), numbers), max_size=3)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F4", "F6_E3M2", "U8", "BF16", "F99", "", 3]),
        "shape": st.one_of(shapes, numbers, st.just(""), st.just({})),
        "data_offsets": st.one_of(
            st.lists(st.integers(0, 12), min_size=2, max_size=2).map(sorted),
            st.lists(numbers, max_size=3),
            st.text(max_size=2),
        ),
    },
    optional={"more": numbers},
)
headers = st.dictionaries(
    st.text(max_size=3),
    st.one_of(entries, numbers),
    max_size=3,
).flatmap(
    lambda fields: st.one_of(
        st.just(fields),
        st.one_of(numbers, st.dictionaries(st.text(max_size=2), st.text(max_size=2))).map(
            lambda m: fields | {"__metadata__": m}
        ),
    )
)


@settings(max_examples=400, deadline=None)
@given(headers, st.integers(0, 12))
def test_any_header_is_taken_exactly_where_the_official_parser_takes_it(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], nbytes: int
) -> None:
    data = fuzz.safetensors_file(json.dumps(fields).encode(), nbytes)
    fuzz.answer_to(fuzz.check_safetensors, tmp_path_factory.getbasetemp() / "x.safetensors", data)


TENSOR = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
STRICTER = {
    "a tensor twice": b'{"a":%s,"a":%s}' % (TENSOR, TENSOR),
    "metadata twice in it": b'{"__metadata__":{"a":"1","a":"2"},"a":%s}' % TENSOR,
    "another field": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"order":"C"}}',
    "a tensor as a list": b'{"a":["F32",[1],[0,4]]}',
    "a dtype as a map": b'{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("why", STRICTER)
def test_what_is_refused_although_the_official_parser_takes_it(why: str, tmp_path: Path) -> None:
    data = fuzz.safetensors_file(STRICTER[why], 4)
    assert [name for name, _ in fuzz.deserialize(data)] == ["a"]
    assert fuzz.is_stricter(data)
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"stands twice|no valid dtype|more than dtype"):
        read_header(tmp_path / "x")


HEADERS = {
    "a length of 99 MB in a file of 50 bytes": struct.pack("<Q", 99_000_000) + bytes(42),
    "a shape whose product grows without end": fuzz.safetensors_file(
        b'{"a":{"dtype":"F32","shape":[%s0],"data_offsets":[0,0]}}' % (b"9223372036854775808," * 500_000), 0
    ),
    "a number of a million digits": fuzz.safetensors_file(
        b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % (b"9" * 1_000_000), 0
    ),
    "a hundred thousand brackets": fuzz.safetensors_file(b'{"a":' + b"[" * 100_000, 0),
    "a name of a million bytes": fuzz.safetensors_file(b'{"%s":1}' % (b"\\n" * 500_000), 0),
}


@pytest.mark.parametrize("what", HEADERS)
def test_no_header_costs_more_than_its_length_explains(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HEADERS[what])
    with fuzz.limits(), fuzz.time_limit(5), pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert len(str(caught.value)) < 3000


def archive(path: Path, program: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as out:
        out.writestr("x/data.pkl", program)
        out.writestr("x/data/0", bytes(64))
        out.writestr("x/version", b"3")
    return path


def nested(depth: int) -> bytes:
    """A tuple that holds itself twice, `depth` times over: small to store, endless to hash or to print."""
    return b")" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(depth))


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQ"
BIG = b"\x8a\x08" + b"\x7f" * 8


def tensor(offset: bytes = b"K\x00", shape: bytes = b")", stride: bytes = b")") -> bytes:
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + offset + shape + stride + b"\x89}tR"


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def a_map(value: bytes, name: bytes = text(b"a")) -> bytes:
    return b"}" + name + value + b"s."


PROGRAMS = {
    "bytes of 2 GB announced": b"\x80\x04B\xff\xff\xff\x7f.",
    "a text of 2**60 bytes announced": b"\x80\x04\x8d" + b"\0" * 7 + b"\x10.",
    "an integer of 2 GB announced": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a key that takes for ever to hash": b"}" + nested(90) + b"Ns.",
    "a storage that takes for ever to print": nested(90) + b"Q.",
    "a function that takes for ever to compare": nested(90) + b")R.",
    "a shape that takes for ever to multiply": a_map(tensor(shape=b"(" + BIG * 100_000 + b"t", stride=b"(t")),
    "a map copied a thousand times": b"}("
    + b"".join(text(b"%04d" % number) + b"N" for number in range(5000))
    + b"uq\x00ccollections\nOrderedDict\nq\x01"
    + b"h\x01h\x00\x85R" * 1000
    + b".",
    "attributes of a function": b"ctorch._utils\n_rebuild_parameter\n" + a_map(b"N", text(b"__code__"))[:-1] + b"b.",
    "attributes of a tensor": a_map(tensor() + a_map(b"K\x01", text(b"start"))[:-1] + b"b"),
    "a class": b"cos\nsystem\n" + text(b"id") + b"\x85R.",
    "an instance": b"(ios\nsystem\n.",
    "an object made": b"cbuiltins\nobject\n)\x81.",
    "an extension": b"\x82\x01.",
    "a name that is no unicode": a_map(tensor(), text(b"\xed\xa0\x80")),
    "a number for a name": a_map(tensor(), b"K\x01"),
    "a negative offset": a_map(tensor(offset=b"J\xff\xff\xff\xff")),
    "an offset beyond the storage": a_map(tensor(offset=b"K\x10")),
    "nothing": b"",
    "no end": b"}",
    "an empty stack": b".",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_no_pickle_costs_more_than_its_length_explains(what: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", PROGRAMS[what])
    with fuzz.limits(), fuzz.time_limit(5), pytest.raises(CheckpointError) as caught:
        read_bin(path)
    assert len(str(caught.value)) < 3000


OLD = {
    "a line without end": b"c" + b"x" * 30_000_000,
    "a text of 2**60 bytes announced": b"\x8d" + b"\0" * 7 + b"\x10.",
    "bytes of 2 GB announced": b"B\xff\xff\xff\x7f.",
    "keys that take for ever to sort": b"}.](" + nested(90) + nested(90) + b"e.",
}


@pytest.mark.parametrize("what", OLD)
def test_no_file_of_before_torch_1_6_costs_more_than_its_length_explains(what: str, tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save({}, out, _use_new_zipfile_serialization=False)
    pickles = io.BytesIO(out.getvalue())
    for _ in range(3):
        pickle.load(pickles)
    (tmp_path / "x.bin").write_bytes(out.getvalue()[: pickles.tell()] + OLD[what])
    with fuzz.limits(), fuzz.time_limit(5), pytest.raises(CheckpointError) as caught:
        read_bin(tmp_path / "x.bin")
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    "program", [b"\x80\x04\x95" + b"\xff" * 8 + b"}.", b"}r\xff\xff\xff\x7f."], ids=["frame", "memo"]
)
def test_a_lie_about_a_size_that_is_not_needed_costs_nothing(program: bytes, tmp_path: Path) -> None:
    with fuzz.limits(), fuzz.time_limit(5):
        assert read_bin(archive(tmp_path / "x.bin", program)) == {}


def test_the_pickle_of_these_tests_is_otherwise_in_order(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", a_map(tensor(offset=b"K\x0f")))
    [(name, found)] = read_bin(path).items()
    assert (name, found.dtype, found.shape, found.nbytes) == ("a", "F32", (), 4)
    assert torch.load(path, weights_only=True).keys() == {"a"}


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", b"}" + b"N0" * 20_000_000 + b".", zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 200_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"a compressed data\.pkl"):
        read_bin(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


def test_a_description_too_long_to_be_one_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.bin", b"}" + b"N0" * 15_000_000 + b".")
    with fuzz.time_limit(5), pytest.raises(CheckpointError, match="it is 30000002 bytes long"):
        read_bin(path)


def patched(data: bytes, at: int, number: int) -> bytes:
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


@pytest.mark.parametrize("number", [1, 0x7FFFFFFF, 0xFFFFFFF0])
@pytest.mark.parametrize("field", [20, 24, 42], ids=["compressed size", "size", "offset"])
@pytest.mark.parametrize("entry", [0, 1])
def test_a_zip_entry_that_points_elsewhere_is_never_read_beyond_the_file(
    entry: int, field: int, number: int, tmp_path: Path
) -> None:
    out = io.BytesIO()
    torch.save({"a": torch.ones(4)}, out)
    data = out.getvalue()
    at = data.find(b"PK\x01\x02")
    at = data.find(b"PK\x01\x02", at + 1) if entry else at
    (tmp_path / "x.bin").write_bytes(patched(data, at + field, number))
    with fuzz.limits(), fuzz.time_limit(5):
        try:
            tensors = read_bin(tmp_path / "x.bin")
        except CheckpointError:
            return
    assert all(0 <= t.start <= t.end <= len(data) for t in tensors.values())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_without_end_or_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.bin", "w") as out:
        for number in range(20_000):
            out.writestr(f"x/{number}", b"")
    with fuzz.time_limit(5), pytest.raises(CheckpointError, match=r"without the data.pkl"):
        read_bin(tmp_path / "many.bin")
    with zipfile.ZipFile(archive(tmp_path / "twice.bin", b"}."), "a") as out:
        out.writestr("x/data/0", bytes(64))
    with pytest.raises(CheckpointError, match=r"not a file as torch\.save writes it"):
        read_bin(tmp_path / "twice.bin")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_that_torch_can_write_is_read(protocol: int, tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    torch.save(state | {"none": torch.zeros(3, 0)}, tmp_path / "x.bin", pickle_protocol=protocol)
    assert {n: t.shape for n, t in read_bin(tmp_path / "x.bin").items()} == {
        **{name: tuple(tensor.shape) for name, tensor in state.items()},
        "none": (3, 0),
    }
