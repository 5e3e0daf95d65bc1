"""Every command and every line of Python on the pages under docs/, run in the order in which they are read."""

import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import heads
import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def reward_model(tiny: Path, folder: Path) -> None:
    """A reward model in the layout of TRL, with a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    checkpoint = folder / "runs" / "rm" / "checkpoint-500"
    checkpoint.parent.mkdir(parents=True)
    heads.flat(tiny, checkpoint)
    vocabulary = {token: n for n, token in enumerate(["<pad>", "<bos>", "<eos>", " ", *string.ascii_letters])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>").save_pretrained(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))


# What lies in the folder where the blocks of a page run: made from a tiny Llama and that folder.
BEFORE: dict[str, Callable[[Path, Path], None]] = {"value-heads": reward_model}


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
