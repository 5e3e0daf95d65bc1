"""Every command and every line of Python on the pages under docs/, run in the order in which they are read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import BEFORE

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
