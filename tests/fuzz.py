"""Mutated files against the readers: `python tests/fuzz.py 40000` feeds each of the three with that many.

Valid seeds are cut, flipped, spliced and rewritten token by token; an input that is accepted, or refused in words not
seen before, becomes a seed itself. A reader may answer with a value or a CheckpointError, within a second and 256 MB;
what it accepts must be what the official reader makes of the same bytes.
"""

import contextlib
import io
import json
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save

from tools.checkpoint import journal
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.header import read_header
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.pickles import read_bin
from tools.checkpoint.receipts import read_receipts

SECONDS, MEMORY_BYTES = 1.0, 256 << 20
NUMBERS = (0, 1, 2, 4, 8, 127, 255, 2**31 - 1, 2**32 - 1, 99_000_000, 100_000_001, 2**53, 2**63, 2**64 - 1)
TOKENS = [
    *map(str, NUMBERS),
    *("-0", "-1", "4.0", "1e1", "0.5", "1e400", "00", "18446744073709551616", "9" * 5000),
    *("NaN", "Infinity", "-Infinity", "true", "false", "null", "[", "]", "{", "}", ",", ":", "[]", "{}", '""'),
    *('"a"', '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"F32"', '"F4"', '"F6_E2M3"', '"F99"'),
    *(r'"\ud800"', r'"\ud83d\ude00"', r'"\u0000"', '"\x1b[31m"', '"\n"', '"\ufeff"', '"é"', '"../x"', '"/etc/passwd"'),
    *("[2,2]", "[0,4]", "[0,9223372036854775808,2]", "[9223372036854775808,2,0]", "[9223372036854775808,2]", "[1.0]"),
    *('{"F32":null}', '["F32",[1],[0,4]]', '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}', "[" * 2000, "[" * 200),
    *(" ", "\t\n\r", "\0", "\ufeff", "\x0b", "//", "'a'"),
]
_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\w+|\S|\s+')
# What changes in an instruction of a pickle: one of another meaning, or a huge argument.
_PICKLED = [bytes([code]) for code in range(256)] + [
    *(b"\x8a\x08" + b"\xff" * 8, b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\x00", b"r\xff\xff\xff\x7f"),
    *(b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 7 + b"\x00", b"\x96" + b"\xff" * 7 + b"\x00", b"\x95" + b"\xff" * 8),
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"c__main__\nx\n", b"h\x00", b"q\x00", b"(t", b"\x86", b"\x85" * 100),
    *(b"2" * 50, b"}b", b"N}\x86b", b"R", b"\x81", b"o", b"i", b"Q", b"P0\n", b"X\x03\x00\x00\x00\xed\xa0\x80"),
]


class Hang(BaseException):
    """A reader took too long; no `except Exception` shall swallow it."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Cap what this process may allocate beyond what it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hang where the process is once the time is up."""

    def ring(*_: object) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Mutations


def mutated_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One change of bytes: a bit, a cut, an insertion, a repeated or borrowed piece, a number."""
    at, upto = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    upto = min(upto, at + 64)
    match rng.randrange(7):
        case 0 if data:
            at = rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[upto:]
        case 3:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 4:
            return data[:upto] + data[at:]
        case 5:
            start = rng.randrange(len(other) + 1)
            return data[:at] + other[start : start + 32] + data[upto:]
        case _:
            number = rng.choice(NUMBERS)
            width = rng.choice([w for w in (1, 2, 4, 8) if number < 1 << 8 * w])
            return data[:at] + number.to_bytes(width, "little") + data[at + width :]


def mutated_json(rng: random.Random, text: str) -> str:
    """Values replaced by values, or one to three tokens replaced, inserted, removed or doubled."""
    tokens = _JSON_TOKEN.findall(text)
    values = [at for at, token in enumerate(tokens) if token[0] not in "[]{},: "]
    if values and rng.random() < 0.5:
        for at in rng.choices(values, k=rng.randint(1, 3)):
            tokens[at] = rng.choice((rng.choice(TOKENS), tokens[rng.choice(values)], str(rng.randrange(30))))
        return "".join(tokens)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(tokens) + 1)
        upto = at + rng.choice((0, 1, 1, 1, 2, 9))
        tokens[at:upto] = rng.choice(([rng.choice(TOKENS)], [], tokens[at:upto] * 2, rng.choices(tokens or [""], k=2)))
    return "".join(tokens)


def safetensors_file(header: bytes, nbytes: int) -> bytes:
    """A file with this header and as many bytes of data."""
    return struct.pack("<Q", len(header)) + header + bytes(nbytes)


def mutated_safetensors(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Mostly a changed header under a right length, with as much data as it speaks of."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.25 or length > len(data):
        return mutated_bytes(rng, data, other)
    text = mutated_json(rng, data[8 : 8 + length].decode(errors="replace"))
    ends = [int(n) for n in re.findall(r",\s*(\d{1,6})\s*\]", text)]
    return safetensors_file(
        text.encode(errors="surrogatepass"), rng.choice((max(ends, default=0), max(len(data) - 8 - length, 0)))
    )


def mutated_pickle(rng: random.Random, program: bytes) -> bytes:
    """One to three instructions put in, taken out or repeated."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(program) + 1)
        piece = rng.choice((rng.choice(_PICKLED), program[at : at + rng.randrange(40)] * 2, b""))
        program = program[:at] + piece + program[at + rng.choice((0, 1, len(piece))) :]
    return program


def mutated_bin(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Mostly a zip file in order with another data.pkl in it, else changed bytes, most of them in its tables."""
    if not data.startswith(b"PK"):
        return mutated_pickle(rng, data) if rng.random() < 0.5 else mutated_bytes(rng, data, other)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        name = next(name for name in entries if name.endswith("data.pkl"))
    except (zipfile.BadZipFile, StopIteration, NotImplementedError, RuntimeError, OSError, ValueError, EOFError):
        return mutated_bytes(rng, data, other)
    if rng.random() < 0.3:
        tables = data.find(b"PK\x01\x02") if rng.random() < 0.7 else 0
        return data[:tables] + mutated_bytes(rng, data[tables:], other)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))) as archive:
        for entry, content in (entries | {name: mutated_pickle(rng, entries[name])}).items():
            archive.writestr(entry, content)
    return out.getvalue()


# Seeds


def safetensors_seeds() -> list[bytes]:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4).bfloat16(), "none": torch.zeros(0, 3)}
    small = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[],"data_offsets":[1,2]}}'
    return [save(tensors, {"format": "pt"}), save({}), safetensors_file(small, 2), safetensors_file(b"{}   ", 0)]


def bin_seeds() -> list[bytes]:
    shared = torch.arange(12.0)
    states: list[Any] = [
        {"a": shared[:6].reshape(2, 3), "b": shared[6:], "c": torch.nn.Parameter(torch.ones(3).half())},
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).state_dict(),
        {"ints": torch.arange(3), "bool": torch.tensor([True]), "none": torch.zeros(3, 0), "scalar": torch.tensor(1.5)},
    ]
    seeds = []
    for state in states:
        for protocol, is_zip in ((2, True), (4, True), (2, False)):
            out = io.BytesIO()
            torch.save(state, out, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
            seeds.append(out.getvalue())
    return seeds


def directory_seeds() -> list[dict[str, bytes]]:
    """Checkpoints as maps of file names: one file, shards with their index, an adapter, a step that awaits its end."""
    head = {"v_head.weight": torch.ones(1, 4)}
    one, two = save({"a.weight": torch.ones(2, 4)}, {"format": "pt"}), save(head)
    config = json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 4}).encode()
    index = {
        "metadata": {"total_size": 48},
        "weight_map": {"a.weight": "1.safetensors", "v_head.weight": "2.safetensors"},
    }
    receipt = {"step": "fix-valuehead", "id": 2, "time": "", "files": ["config.json", "new.safetensors"], "options": {}}
    operations = [
        {"op": "place", "file": "new.safetensors"},
        journal.edit_operation("model.safetensors", one[:16], len(one)),
        {"op": "remove", "file": "gone.json"},
    ]
    record = {"receipt": receipt, "gate": "config.json", "gate_returns": True, "operations": operations, "forget": [1]}
    journalled = {
        ".burnish/commit.json": json.dumps(record).encode(),
        ".burnish/receipts.jsonl": b'{"step": "fix-valuehead", "id": 1, "time": "", "files": {}}\n',
        ".burnish/stage/undo/x": b"",
        ".burnish/stage/new.safetensors": two,
    }
    return [
        {"config.json": config, "model.safetensors": one, "value_head.safetensors": two},
        {
            "config.json": config,
            "1.safetensors": one,
            "2.safetensors": two,
            "model.safetensors.index.json": json.dumps(index).encode(),
        },
        {"adapter_config.json": b'{"peft_type": "LORA", "r": 2}', "adapter_model.safetensors": one},
        {"config.json": config, "pytorch_model.bin": bin_seeds()[0]},
        {"config.json": config, "model.safetensors": one, "gone.json": b"{}", **journalled},
    ]


def mutated_directory(rng: random.Random, files: dict[str, bytes], _: object) -> dict[str, bytes]:
    name = rng.choice(list(files))
    content = files[name]
    if name.endswith(".safetensors"):
        content = mutated_safetensors(rng, content, content)
    elif name.endswith(".bin"):
        content = mutated_bin(rng, content, content)
    elif ".json" in name and rng.random() < 0.8:
        content = mutated_json(rng, content.decode(errors="replace")).encode(errors="surrogatepass")
    else:
        content = mutated_bytes(rng, content, content)
    return files | {name: content}


# Readers, each with the law that what it accepts must obey


def is_stricter(data: bytes) -> bool:
    """Whether this header is one that is refused although the official parser takes it, as header.py documents."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise KeyError("twice")
        return dict(pairs)

    try:
        fields = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=unique)
    except KeyError:
        return True
    entries = [entry for name, entry in fields.items() if name != "__metadata__"]
    return not all(
        isinstance(entry, dict)
        and entry.keys() == {"dtype", "shape", "data_offsets"}
        and isinstance(entry["dtype"], str)
        for entry in entries
    )


def check_safetensors(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        official: Any = {name: (t["dtype"], tuple(t["shape"])) for name, t in deserialize(data)}
    except SafetensorError:
        official = None
    try:
        header = read_header(path)
    except CheckpointError:
        assert official is None or is_stricter(data), "refused, although the official parser takes it"
        raise
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == official
    with safe_open(path, "pt") as opened:
        assert (opened.metadata() or {}) == header.metadata
    json.dumps([*header.tensors, header.metadata], ensure_ascii=False).encode()


def check_bin(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    tensors = read_bin(path)
    for name, tensor in tensors.items():
        name.encode()
        assert 0 <= tensor.start <= tensor.end <= len(data)
    if data.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(entry.external_attr & 0x10 for entry in entries):
            return  # marked as a folder: torch 2.13 then returns memory that nobody has written
    try:
        official = torch.load(path, weights_only=True)
    except Exception:  # torch has no error of its own for a broken file
        return
    assert official.keys() == tensors.keys()
    for name, tensor in tensors.items():
        theirs = official[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert tuple(official[name].shape) == tensor.shape
        assert theirs == data[tensor.start : tensor.end]


def check_directory(path: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    try:
        opened = Checkpoint.open(path, accept_run=True)
        read_receipts(path)
        json.dumps([opened.config, [list(weights.tensors) for weights in opened.weights]], ensure_ascii=False).encode()
    finally:
        assert [entry.name for entry in path.parent.iterdir()] == [path.name], "something outside was written"


TARGETS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Any], Callable[[Path, Any], None]]] = {
    "model.safetensors": (safetensors_seeds, mutated_safetensors, check_safetensors),
    "pytorch_model.bin": (bin_seeds, mutated_bin, check_bin),
    "checkpoint": (directory_seeds, mutated_directory, check_directory),
}


def answer_to(check: Callable[[Path, Any], None], path: Path, case: Any) -> str:
    """What the reader says of an input, without its numbers and names; raises what no reader may let out."""
    try:
        with time_limit(SECONDS):
            check(path, case)
        return "accepted"
    except CheckpointError as error:
        first = str(error)
        if not first.replace("\n", "").isprintable():
            raise AssertionError("an error that is not printable") from error
        line = first.splitlines()[0].removeprefix(str(error.path))
        return re.sub(r"[^a-z_ ]+", "*", re.sub(r"'.*'", "*", line))[:60]


def fuzz(target: str, inputs: int, seed: int = 0) -> Counter[str]:
    """Feed a reader with mutations; returns how often it gave each answer. What fails is noted in its exception."""
    seeds, mutate, check = TARGETS[target]
    rng = random.Random(seed)
    corpus = seeds()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder:
        path = Path(folder) / target
        answers: Counter[str] = Counter(answer_to(check, path, case) for case in corpus)
        assert set(answers) == {"accepted"}, f"a seed is refused: {answers}"
        with limits():
            for number in range(inputs):
                case = mutate(rng, rng.choice(corpus), rng.choice(corpus))
                try:
                    answer = answer_to(check, path, case)
                except BaseException as error:
                    error.add_note(f"{target}, seed {seed}, input {number}: {repr(case)[:20_000]}")
                    raise
                if not answers[answer] or (answer == "accepted" and len(corpus) < 200):
                    corpus.append(case)
                answers[answer] += 1
    return answers


def main(inputs: int, seed: int) -> None:
    warnings.simplefilter("ignore")  # of torch, for pickles of another protocol
    for target in TARGETS:
        started = time.perf_counter()
        answers = fuzz(target, inputs, seed)
        seconds = time.perf_counter() - started
        print(f"{target}: {inputs} inputs in {seconds:.0f} s, {answers['accepted']} accepted, {len(answers)} answers")
        for answer, count in answers.most_common(8):
            print(f"  {count:7} {answer}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
