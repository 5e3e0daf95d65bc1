"""Every command and every line of Python on the pages under docs/, run in the order in which they are read."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def speaking_model(_: Path, folder: Path) -> None:
    """`model`: a tiny Llama with a tokenizer and a chat template."""
    from conversations import byte_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "model")


def speaking_model_with_rows(tiny: Path, folder: Path) -> None:
    """`model`, a row in `rows.jsonl`, and a run of one step in `sft.yaml`."""
    speaking_model(tiny, folder)
    said = {"user": "What is an adapter?", "assistant": "A small change."}
    messages = [{"role": role, "content": text} for role, text in said.items()]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": messages}))
    groups = {"model": {"model_name_or_path": "model"}, "data": {"train_file": "rows.jsonl"}}
    (folder / "sft.yaml").write_text(json.dumps({**groups, "training": {"output_dir": "run", "max_steps": 1}}))


# What lies in the folder where the blocks of a page run: made from a tiny Llama and that folder.
BEFORE: dict[str, Callable[[Path, Path], None]] = {
    "data": speaking_model,
    "extending": speaking_model_with_rows,
}


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
