"""The demo on the real model: what it makes, that what it prints works, and that it speaks to nobody."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

pytestmark = [pytest.mark.real, pytest.mark.server]
ROOT = Path(__file__).parents[1]

# Imported by every Python process below: each name that is looked up and each address that is connected to is noted.
WATCH = """
import os, sys

def note(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    with open(os.environ["BURNISH_WATCH"], "a") as file:
        file.write(f"{host if isinstance(host, str) else (host or b'').decode()}\\n")

sys.addaudithook(note)
"""
LOOPBACK = {"", "localhost", "127.0.0.1", "::1", "0.0.0.0"}


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "model").symlink_to(smollm2.resolve())
    (folder / "watch").mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(WATCH)
    return folder


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    watched = {"PYTHONPATH": str(folder / "watch"), "BURNISH_WATCH": str(folder / "hosts")}
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "HF_", "WANDB_"))}
    environment = ours | watched | {"OMP_NUM_THREADS": "2", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=2400
    )


@pytest.fixture(scope="module")
def demo(folder: Path) -> subprocess.CompletedProcess[str]:
    return run("examples/demo.py", folder, folder=folder)


@pytest.mark.timeout(2500)
def test_the_demo_ends_with_its_table(demo: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert demo.returncode == 0, demo.stderr
    printed = demo.stdout + demo.stderr
    assert "Traceback" not in printed
    assert "ERROR" not in printed
    assert "value head split out" in demo.stdout
    assert "rank 8 -> 16: plain LoRA" in demo.stdout
    assert f"{folder / 'try.py'} runs it" in demo.stdout
    with safe_open(folder / "runs/reward/finished/checkpoint-40/value_head.safetensors", framework="pt") as head:
        assert set(head.keys()) == {"v_head.summary.weight", "v_head.summary.bias"}


@pytest.mark.timeout(2500)
def test_the_printed_script_runs_and_answers(demo: subprocess.CompletedProcess[str], folder: Path) -> None:
    script = (folder / "try.py").read_text()
    assert script.partition('"""\n\n')[2].strip() in demo.stdout
    tried = run(folder / "try.py", folder=folder)
    assert tried.returncode == 0, tried.stderr
    answer, better, worse = tried.stdout.splitlines()
    assert len(answer.removeprefix("answer: ")) > 10
    assert all(math.isfinite(float(line.split()[1].rstrip(":"))) for line in (better, worse))


@pytest.mark.timeout(2500)
def test_a_second_demo_trains_nothing_again(demo: subprocess.CompletedProcess[str], folder: Path) -> None:
    before = (folder / "runs/sft/train_log.jsonl").stat().st_mtime_ns
    again = run("examples/demo.py", folder, folder=folder)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("already trained; nothing to do") >= 2
    assert (folder / "runs/sft/train_log.jsonl").stat().st_mtime_ns == before


def test_nobody_is_spoken_to(demo: subprocess.CompletedProcess[str], folder: Path) -> None:
    hosts = set((folder / "hosts").read_text().split())
    assert "127.0.0.1" in hosts, "the server of the flow itself was not seen, so nothing was watched"
    assert not hosts - LOOPBACK
