"""A second process that computes a part of what is written: the same file, its errors, its end with its parent's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import merging
import pytest
from safetensors.torch import load_file, save_file
from snapshots import contents

from tools.checkpoint import staging
from tools.checkpoint.apart import apart, can_fork
from tools.checkpoint.errors import CheckpointError
from tools.postprocess.merge_adapter import merge_adapter


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = merging.model(tmp_path / "base")
    merging.adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj", "embed_tokens"])
    merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "alone")
    monkeypatch.setattr(staging, "_LONG_BYTES", 1)
    monkeypatch.setattr(staging, "can_fork", lambda: True)
    return tmp_path / "adapter"


def test_two_processes_write_what_one_does(adapter: Path, tmp_path: Path) -> None:
    merge_adapter(adapter, base=str(tmp_path / "base"), output=tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(tmp_path / "alone")


@pytest.mark.parametrize("module", ["embed_tokens", "layers.1.self_attn.q_proj"])
def test_an_error_of_either_is_the_error(module: str, adapter: Path, tmp_path: Path) -> None:
    held = load_file(adapter / "adapter_model.safetensors")
    held = {name: tensor / 0 if module in name and "lora" in name else tensor for name, tensor in held.items()}
    save_file(held, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="holds NaN or infinity; the training had diverged"):
        merge_adapter(adapter, base=str(tmp_path / "base"), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_result_equal_to_the_base_is_seen_in_both(adapter: Path, tmp_path: Path) -> None:
    held = load_file(adapter / "adapter_model.safetensors")
    held = {name: tensor * 0 if "lora" in name else tensor for name, tensor in held.items()}
    save_file(held, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="changes nothing"):
        merge_adapter(adapter, base=str(tmp_path / "base"), output=tmp_path / "merged")


def test_a_second_process_that_is_killed_is_an_error() -> None:
    with pytest.raises(OSError, match="the second process ended with -9"), apart(lambda: os.kill(os.getpid(), 9)):
        pass


def test_an_error_here_ends_the_second_process() -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="mine"), apart(lambda: time.sleep(60)):
        raise ValueError("mine")
    assert time.monotonic() - started < 30


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux forks")
def test_a_second_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys, time; from tools.checkpoint.apart import apart\n"
        "def work(): pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)\n"
        "with apart(work): time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, tmp_path / "pid"])
    _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    child = int((tmp_path / "pid").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _until(lambda: not _is_running(child))


def _until(is_so: object) -> None:
    for _ in range(1000):
        if is_so():  # type: ignore[operator]
            return
        time.sleep(0.02)
    raise AssertionError("it never was so")


def _is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "zombie" not in status.read_text()


def test_a_process_with_threads_does_not_fork() -> None:
    import threading

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert not can_fork()
    done.set()
    thread.join()
