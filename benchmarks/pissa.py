"""PiSSA adapter: converted by `tools convert-pissa`, against PEFT's own conversion."""

import json
import shutil
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

from measure import TOOLS, Benchmark, Command

_SCRIPTS = Path(__file__).parent


def convert(folder: Path) -> Benchmark:
    """Adapter and initial adapter to plain LoRA; PEFT loads the base model for it, and writes to the initial one."""
    base, init, adapter = (folder / name for name in ("base", "pissa_init", "adapter"))
    subprocess.run([sys.executable, _SCRIPTS / "pissa_inputs.py", base, init, adapter], check=True)
    ours, theirs, init_for_peft = folder / "lora", folder / "lora_by_peft", folder / "init_for_peft"

    def prepare_theirs() -> None:
        shutil.rmtree(theirs, ignore_errors=True)
        shutil.copytree(init, init_for_peft, dirs_exist_ok=True)

    return Benchmark(
        "convert-pissa -o, model of 1.1 B",
        "PEFT: load base and adapter, save_pretrained",
        Command(
            [TOOLS, "convert-pissa", adapter, "--init", init, "-o", ours],
            lambda: shutil.rmtree(ours, ignore_errors=True),
        ),
        Command([sys.executable, _SCRIPTS / "pissa_by_peft.py", base, adapter, init_for_peft, theirs], prepare_theirs),
        lambda: agreement(ours / "adapter_model.safetensors", theirs / "adapter_model.safetensors"),
    )


def agreement(one: Path, other: Path) -> str:
    """How far two files of fp32 tensors lie apart; asserts that names, dtypes and shapes are the same."""
    differences = []
    for (*ours, data), (*theirs, other_data) in zip(_tensors(one), _tensors(other), strict=True):
        assert ours == theirs
        pairs = zip(array("f", data), array("f", other_data), strict=True) if data != other_data else ()
        differences.append(max((abs(a - b) for a, b in pairs), default=0.0))
    assert differences
    return f"{len(differences)} tensors, greatest difference {max(differences):g}"


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], bytes]]:
    """Name, dtype, shape and bytes by name, one tensor in memory at a time."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data_start = file.tell()
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items()):
            start, end = entry["data_offsets"]
            file.seek(data_start + start)
            yield name, entry["dtype"], entry["shape"], file.read(end - start)
