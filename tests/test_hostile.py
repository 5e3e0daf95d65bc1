"""A directory made to do harm is refused by name: nothing outside it is touched, nothing hangs, nothing is executed."""

import base64
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz
import heads
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from snapshots import state
from typer.testing import CliRunner

from tools.checkpoint.errors import CheckpointError, printable
from tools.checkpoint.header import read_header
from tools.checkpoint.layout import Checkpoint, Weights, read_weight_file
from tools.cli import app
from tools.lora.adapters import lora_modules

STEPS = ("inspect", "verify", "history", "fix-valuehead", "undo")


def said(*arguments: str | Path) -> str:
    """What a command prints, soon, and with an exit code of its own; fails on a traceback or a control character."""
    with fuzz.time_limit(20):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 3)
    assert result.stderr.replace("\n", "").isprintable()
    return result.stderr


@pytest.fixture
def checkpoint(tiny: Path, tmp_path: Path) -> Path:
    return heads.flat(tiny, tmp_path / "checkpoint")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory beside the checkpoint that nothing may change."""
    path = tmp_path / "victim"
    for name in ("stage/precious", "undo/precious", "1/precious", "precious"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("do not touch\n")
    return path


# Names and kinds of files


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "..", ".", "", "a/b", "a/", "x\0y", "folder", "\x1b[2J", "no"]
)
def test_an_index_reaches_nothing_but_files_beside_it(name: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    (path / "folder").mkdir()
    shutil.copy(path / "model-00001-of-00003.safetensors", tmp_path / "outside")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is not a plain file name|which is not there|a directory, not a file"):
        Checkpoint.open(path)
    assert all(name == "" or printable(name) in said(step, path) for step in STEPS)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    path.parent.joinpath("s").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def an_endless_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


KINDS = [a_pipe, a_socket, a_folder, a_link_to_a_device, a_link_to_itself, a_link_to_nothing, an_endless_file]
PLACES = {
    "flat": ["config.json", "model.safetensors", "adapter_config.json", "value_head.safetensors", "adapter_model.bin"],
    "sharded": ["model.safetensors.index.json", "model-00002-of-00003.safetensors"],
    "pickled": ["pytorch_model.bin"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout, names in PLACES.items() for name in names])
def test_what_is_no_file_is_named_and_not_waited_for(
    kind: Callable[[Path], None], layout: str, name: str, tiny: Path, tmp_path: Path
) -> None:
    path = heads.LAYOUTS[layout](tiny, tmp_path / "c")
    (path / name).unlink(missing_ok=True)
    kind(path / name)
    with fuzz.limits(), fuzz.time_limit(5), pytest.raises(CheckpointError, match=name):
        Checkpoint.open(path)
    assert name in said("fix-valuehead", path, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_copy_with_what_is_no_file_in_it_ends(kind: Callable[[Path], None], checkpoint: Path, tmp_path: Path) -> None:
    kind(checkpoint / "more")
    said("fix-valuehead", checkpoint, "--output", tmp_path / "out")
    assert not [entry for entry in tmp_path.iterdir() if entry.name not in {"checkpoint", "out"}]


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_step_reads_through_a_link_and_never_writes_through_one(
    link: Callable[[Path, Path], None], name: str, tiny: Path, tmp_path: Path
) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    (tmp_path / "elsewhere").mkdir()
    (path / name).rename(tmp_path / "elsewhere" / name)
    link(tmp_path / "elsewhere" / name, path / name)
    before = state(tmp_path / "elsewhere")
    assert said("fix-valuehead", path) == ""
    assert "v_head.summary.weight" not in Checkpoint.open(path).model.tensors
    assert state(tmp_path / "elsewhere") == before


def test_the_longest_header_is_read_and_a_longer_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(fuzz.safetensors_file(b"{}" + b" " * 99_999_998, 0))
    assert read_header(path).length == 100_000_000
    with safe_open(path, "pt") as official:
        assert not official.keys()
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(8 + 100_000_001)
    with pytest.raises(CheckpointError, match="its header would be 100000001 bytes long"):
        read_header(path)
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")


# Text


@pytest.mark.parametrize(
    "name", ["a\nerror: all is lost", "\x1b]0;title\x07", "\x9b2J", "\u202egnol", "\r", "\u2028", "a\ttab"]
)
def test_names_in_files_do_not_control_the_terminal(name: str, checkpoint: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
    (checkpoint / "model.safetensors").write_bytes(fuzz.safetensors_file(json.dumps({name: entry}).encode(), 8))
    printed = said("inspect", checkpoint)
    assert len(printed.splitlines()) == 1
    assert printable(name) in printed


def test_an_error_survives_with_its_names_as_they_are() -> None:
    error = CheckpointError("a\nb", "é 日本", "\x1b")
    assert (error.path, error.problem, error.remedy) == ("a\nb", "é 日本", "\x1b")
    assert str(error) == r"a\nb: é 日本; \x1b"
    assert len(str(CheckpointError("x", "\n" * 1_000_000))) < 2100


@pytest.mark.parametrize(
    "text", [r'{"a": "\ud800"}', '{"a": 1' + "0" * 5000 + "}", "\ufeff{}", "[" * 100_000, '{"\x00": 1}']
)
def test_json_that_could_not_be_written_again_is_refused(text: str, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config.json: not valid JSON"):
        Checkpoint.open(checkpoint)


@pytest.mark.parametrize(
    "config",
    [
        {"rank_pattern": {"(": 2}},
        {"rank_pattern": {"q_proj": "2"}},
        {"rank_pattern": {"q_proj": -2}},
        {"rank_pattern": [1]},
        {"alpha_pattern": {"q_proj": None}},
        {"r": "x"},
        {"r": None},
        {"r": [], "rank_pattern": None},
        {"r": 0},
        {"lora_alpha": True},
        {"target_parameters": [1]},
        {"modules_to_save": "lm_head"},
    ],
)
def test_settings_of_an_adapter_that_cannot_be_read_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    names = {f"base_model.model.layers.0.q_proj.lora_{factor}.weight": torch.ones(1, 1) for factor in "AB"}
    save_file(names, tmp_path / "adapter_model.safetensors")
    weights = Weights("adapter_model.safetensors", (read_weight_file(tmp_path / "adapter_model.safetensors"),))
    with pytest.raises(CheckpointError, match=next(iter(config))):
        lora_modules({"peft_type": "LORA", "r": 1, "lora_alpha": 1, **config}, weights)


# Code


class Runs:
    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("name", ["pytorch_model.bin", "value_head.bin", "adapter_model.bin"])
@pytest.mark.parametrize("function", [os.system, eval, exec, getattr, torch.load, print], ids=lambda f: f.__name__)
def test_a_pickle_runs_nothing(
    function: Callable[..., Any], name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    torch.save({"a": torch.ones(1), "b": Runs(function, "touch executed; print('executed')")}, path / name)
    assert "only plain tensors are read" in said("inspect", path)
    assert "only plain tensors are read" in said("fix-valuehead", path)
    assert not Path("executed").exists()
    assert capfd.readouterr().out == ""


# Burnish's own folder

RECEIPT = {"id": 1, "step": "fix-valuehead", "time": "2026-01-01T00:00:00+00:00", "options": {}, "files": ["new"]}
RECORD = {"receipt": RECEIPT, "gate": None, "gate_returns": False, "operations": [], "forget": []}
EDIT = {"op": "edit", "file": "config.json", "head": "e30=", "size": 2}
OUTSIDE = (
    "half \ud800",
    "../victim/precious",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b",
    ".burnish",
    "x\0",
    1,
    None,
    ["x"],
    {},
)


def interrupted(checkpoint: Path, record: str) -> None:
    """What a crash leaves: a stage with a file in it, and a commit record."""
    (checkpoint / ".burnish" / "stage" / "undo").mkdir(parents=True)
    (checkpoint / ".burnish" / "stage" / "new").write_text("new")
    (checkpoint / ".burnish" / "commit.json").write_text(record)


def test_the_record_of_these_tests_is_otherwise_carried_out(checkpoint: Path) -> None:
    record = RECORD | {"operations": [{"op": "place", "file": "new"}, EDIT, {"op": "remove", "file": "tokenizer.json"}]}
    interrupted(checkpoint, json.dumps(record))
    assert Checkpoint.open(checkpoint).recovered == "an interrupted fix-valuehead was completed"
    assert (checkpoint / "new").read_text() == "new"
    assert (checkpoint / "config.json").read_text() == "{}"
    assert said("verify", checkpoint) == ""


RECORDS: dict[str, Any] = {
    "nothing": "",
    "no JSON": "{",
    "half a character": '{"receipt": "\\ud800"',
    "endless brackets": "[" * 100_000,
    "a list": [],
    "no fields": {},
    "an id that is no number": RECORD | {"receipt": RECEIPT | {"id": "../../victim"}},
    "an id below one": RECORD | {"receipt": RECEIPT | {"id": 0}},
    "an id that is a truth": RECORD | {"receipt": RECEIPT | {"id": True}},
    "no time": RECORD | {"receipt": {k: v for k, v in RECEIPT.items() if k != "time"}},
    "a step that is no text": RECORD | {"receipt": RECEIPT | {"step": {}}},
    "files that are no list": RECORD | {"receipt": RECEIPT | {"files": "config.json"}},
    "operations that are no list": RECORD | {"operations": "place"},
    "a return that is no truth": RECORD | {"gate_returns": "yes"},
    "steps to forget that are no numbers": RECORD | {"forget": ["../../victim"]},
    **{f"a gate {name!r}": RECORD | {"gate": name} for name in OUTSIDE if name is not None},
    **{f"a receipt of {name!r}": RECORD | {"receipt": RECEIPT | {"files": [name]}} for name in OUTSIDE},
    **{
        f"{op} {name!r}": RECORD | {"operations": [EDIT | {"op": op, "file": name}]}
        for op in ("place", "edit", "remove")
        for name in OUTSIDE
    },
    "an unknown operation": RECORD | {"operations": [{"op": "run", "file": "config.json"}]},
    "an operation that is a text": RECORD | {"operations": ["place"]},
    "an operation without a file": RECORD | {"operations": [{"op": "place"}]},
    "an edit without bytes": RECORD | {"operations": [{"op": "edit", "file": "config.json"}]},
    "an edit with other bytes": RECORD | {"operations": [EDIT | {"head": "!!!!"}]},
    "an edit with half a byte": RECORD | {"operations": [EDIT | {"head": "e30"}]},
    "an edit to a negative size": RECORD | {"operations": [EDIT | {"size": -1}]},
    "an edit to an endless size": RECORD | {"operations": [EDIT | {"size": 2**63}]},
    "an edit to a broken size": RECORD | {"operations": [EDIT | {"size": 1.5}]},
    "an edit of what is not there": RECORD | {"operations": [EDIT | {"file": "nowhere"}]},
    "an edit of a link": RECORD | {"operations": [EDIT | {"file": "link"}]},
    "an edit of a hard link": RECORD | {"operations": [EDIT | {"file": "hard"}]},
    "an edit of a folder": RECORD | {"operations": [EDIT | {"file": "folder"}]},
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_that_no_step_wrote_is_refused(what: str, checkpoint: Path, victim: Path) -> None:
    record = RECORDS[what]
    (checkpoint / "link").symlink_to(victim / "precious")
    (checkpoint / "hard").hardlink_to(victim / "precious")
    (checkpoint / "folder").mkdir()
    interrupted(checkpoint, record if isinstance(record, str) else json.dumps(record))
    before = state(checkpoint.parent)
    with pytest.raises(CheckpointError, match=r"\.burnish/commit\.json: "):
        Checkpoint.open(checkpoint)
    assert all("commit.json: " in said(step, checkpoint) for step in STEPS)
    assert state(checkpoint.parent) == before


RECEIPTS = {
    "no JSON": "{",
    "endless brackets": "[" * 100_000,
    "a number": "1",
    "no fields": "{}",
    "an id that is a text": json.dumps(RECEIPT | {"files": {}, "id": "1"}),
    "files that are a list": json.dumps(RECEIPT),
    "a file elsewhere": json.dumps(RECEIPT | {"files": {"../victim/precious": None}}),
    "a file that is a text": json.dumps(RECEIPT | {"files": {"config.json": "x"}}),
    "an empty line": "",
    "no text": "\0\0\0\0",
}


@pytest.mark.parametrize("what", RECEIPTS)
def test_a_line_that_is_no_receipt_is_named(what: str, checkpoint: Path, victim: Path) -> None:
    (checkpoint / ".burnish").mkdir()
    good = json.dumps(RECEIPT | {"files": {}})
    (checkpoint / ".burnish" / "receipts.jsonl").write_text(f"{good}\n{RECEIPTS[what]}\n")
    before = state(checkpoint.parent)
    for step in ("verify", "history", "fix-valuehead", "undo"):
        assert "receipts.jsonl: line 2 is not a receipt; remove the line" in said(step, checkpoint)
    assert state(checkpoint.parent) == before


LINKED = {
    "the folder": (".", ""),
    "the stage": ("stage", "stage"),
    "undo": ("undo", "undo"),
    "undo of the next step": ("undo/1", "1"),
    "the lock": ("lock", "precious"),
    "the receipts": ("receipts.jsonl", "precious"),
    "the record": ("commit.json", "precious"),
    "the record to be": ("commit.json.new", "precious"),
}


@pytest.mark.parametrize("what", LINKED)
def test_what_burnish_writes_to_is_no_link(what: str, checkpoint: Path, victim: Path) -> None:
    name, target = LINKED[what]
    link = checkpoint / ".burnish" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim / target)
    before = state(victim)
    for step in ("fix-valuehead", "undo", "inspect", "verify"):
        said(step, checkpoint)
    assert "a symbolic link, which Burnish never makes there; remove it" in said("fix-valuehead", checkpoint)
    assert state(victim) == before


@pytest.mark.parametrize("name", ["lock", "stage", "commit.json", "receipts.jsonl", "undo"])
@pytest.mark.parametrize("kind", [a_pipe, a_folder, a_socket])
def test_other_things_under_our_names_end_in_an_error(
    name: str, kind: Callable[[Path], None], checkpoint: Path
) -> None:
    (checkpoint / ".burnish").mkdir()
    kind(checkpoint / ".burnish" / name)
    with fuzz.time_limit(5):
        for step in STEPS:
            said(step, checkpoint)


def test_a_record_does_not_copy_what_its_stage_links_to(checkpoint: Path, victim: Path) -> None:
    head = base64.b64encode(b"{}").decode()
    interrupted(checkpoint, json.dumps(RECORD | {"operations": [EDIT | {"head": head, "size": 15}]}))
    (checkpoint / ".burnish" / "stage" / "config.json.tail").symlink_to(victim / "precious")
    assert "config.json.tail: a symbolic link" in said("inspect", checkpoint)
    assert "do not touch" not in (checkpoint / "config.json").read_text()
