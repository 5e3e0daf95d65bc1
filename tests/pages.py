"""What lies in the folder where the blocks of a page run: made from a tiny Llama and that folder."""

import json
import shutil
import string
from collections.abc import Callable, Iterable
from pathlib import Path

import actor_critic
import heads


def add_tokenizer(folder: Path, tokens: Iterable[str]) -> None:
    """One token for each character; all others are a space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: n for n, token in enumerate(tokens)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(folder)


def a_run_to_train(tiny: Path, folder: Path) -> None:
    """`base`, a Llama that knows single characters, and `sft.yaml`, a run of four steps on it in `runs/sft`."""
    shutil.copytree(tiny, folder / "base")
    add_tokenizer(folder / "base", ["<pad>", "<eos>", " ", *string.ascii_lowercase, *string.digits])
    rows = [{"prompt": f"what is {n}", "completion": f" it is {n + 1}"} for n in range(24)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.yaml").write_text(
        "model: {model_name_or_path: base}\n"
        "data: {train_file: sft.jsonl}\n"
        "training: {output_dir: runs/sft, max_steps: 4, save_steps: 4, learning_rate: 0.01}\n"
    )


def models_with_heads(tiny: Path, folder: Path) -> None:
    """A reward model in the layout of TRL, and a PPO checkpoint that holds policy and value model."""
    reward = folder / "runs" / "rm" / "checkpoint-500"
    reward.parent.mkdir(parents=True)
    heads.flat(tiny, reward)
    add_tokenizer(reward, ["<pad>", "<bos>", "<eos>", " ", *string.ascii_letters])
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    actor_critic.aliased(actor_critic.build(), folder / "runs" / "ppo" / "checkpoint-500")


BEFORE: dict[str, Callable[[Path, Path], None]] = {"adapters": a_run_to_train, "value-heads": models_with_heads}
