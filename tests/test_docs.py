"""Every command and every line of Python on the pages under docs/, run in the order in which they are read."""

import json
import os
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def a_run_to_train(tiny: Path, folder: Path) -> None:
    """`base`, a Llama that knows single characters, and `sft.yaml`, a run of four steps on it in `runs/sft`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(tiny, folder / "base")
    tokens = ["<pad>", "<eos>", " ", *string.ascii_lowercase, *string.digits]
    characters = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "base")
    rows = [{"prompt": f"what is {n}", "completion": f" it is {n + 1}"} for n in range(24)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.yaml").write_text(
        "model: {model_name_or_path: base}\n"
        "data: {train_file: sft.jsonl}\n"
        "training: {output_dir: runs/sft, max_steps: 4, save_steps: 4, learning_rate: 0.01}\n"
    )


# What lies in the folder where the blocks of a page run: made from a tiny Llama and that folder.
BEFORE: dict[str, Callable[[Path, Path], None]] = {"adapters": a_run_to_train}


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
