"""Every command and every line of Python on the pages under docs/, run in the order in which they are read."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import save_llama, write_config

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def a_run_of_characters(tiny: Path, folder: Path) -> None:
    """A model with a tokenizer, and run.yaml for four steps of it."""
    save_llama(folder / "model")
    groups = json.loads(write_config(folder / "model", folder).read_text())
    groups["training"] |= {"output_dir": "run", "max_steps": 4}
    (folder / "run.yaml").write_text(json.dumps(groups))


# What lies in the folder where the blocks of a page run: made from a tiny Llama and that folder.
BEFORE: dict[str, Callable[[Path, Path], None]] = {"callbacks": a_run_of_characters}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_what_a_page_shows_runs(page: Path, tiny: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    if blocks:
        BEFORE[page.stem](tiny, tmp_path)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for language, text in blocks:
        command = ["bash", "-e", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
