"""The padding token is told by whichever file of a checkpoint knows it."""

import json
from pathlib import Path

import pytest

from tools.checkpoint.layout import Checkpoint
from tools.heads.padding import pad_token_id

TOKENIZERS = {
    "config.json": {"config.json": {"pad_token_id": 7}, "generation_config.json": {"pad_token_id": 8}},
    "generation_config.json": {"generation_config.json": {"pad_token_id": 7}},
    "added_tokens_decoder": {
        "tokenizer_config.json": {"pad_token": {"content": "<p>"}, "added_tokens_decoder": {"7": {"content": "<p>"}}}
    },
    "added_tokens": {
        "tokenizer_config.json": {"pad_token": "<p>"},
        "tokenizer.json": {"added_tokens": [{"id": 3, "content": "<q>"}, {"id": 7, "content": "<p>"}], "model": {}},
    },
    "vocabulary": {
        "special_tokens_map.json": {"pad_token": "<p>"},
        "tokenizer.json": {"added_tokens": [], "model": {"vocab": {"<p>": 7}}},
    },
}
NONE = {
    "nothing": {},
    "null": {"config.json": {"pad_token_id": None}, "generation_config.json": {"pad_token_id": -1}},
    "a token of no vocabulary": {"tokenizer_config.json": {"pad_token": "<p>"}, "tokenizer.json": {"model": {}}},
    "other types": {"generation_config.json": [7], "tokenizer_config.json": {"pad_token": 7}, "tokenizer.json": []},
    "a vocabulary of pieces": {
        "tokenizer_config.json": {"pad_token": "<p>", "added_tokens_decoder": []},
        "tokenizer.json": {"added_tokens": None, "model": {"vocab": [["<p>", 0.5]]}},
    },
}


def _opened(folder: Path, files: dict[str, object]) -> Checkpoint:
    for name, value in {"config.json": {}, **files}.items():
        (folder / name).write_text(json.dumps(value))
    return Checkpoint.open(folder)


@pytest.mark.parametrize("place", TOKENIZERS)
def test_it_is_found(place: str, tmp_path: Path) -> None:
    assert pad_token_id(_opened(tmp_path, TOKENIZERS[place])) == 7


@pytest.mark.parametrize("what", NONE)
def test_it_is_not_made_up(what: str, tmp_path: Path) -> None:
    assert pad_token_id(_opened(tmp_path, NONE[what])) is None
