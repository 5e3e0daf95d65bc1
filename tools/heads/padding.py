"""The padding token of a checkpoint, as its JSON files tell it."""

from collections.abc import Mapping
from typing import Any

from tools.checkpoint.layout import Checkpoint


def pad_token_id(checkpoint: Checkpoint) -> int | None:
    """The id from config.json, generation_config.json or the tokenizer, None when none of them has one."""
    for config in (checkpoint.config, checkpoint.read_json("generation_config.json")):
        found = config.get("pad_token_id") if isinstance(config, dict) else None
        if type(found) is int and found >= 0:
            return found
    return _of_tokenizer(checkpoint)


def _of_tokenizer(checkpoint: Checkpoint) -> int | None:
    settings = checkpoint.read_json("tokenizer_config.json")
    special = checkpoint.read_json("special_tokens_map.json")
    for file in (settings, special):
        token = file.get("pad_token") if isinstance(file, dict) else None
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            return _id_of(text, settings if isinstance(settings, dict) else {}, checkpoint)
    return None


def _id_of(text: str, settings: Mapping[str, Any], checkpoint: Checkpoint) -> int | None:
    decoder = settings.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal():
            return int(key)
    tokenizer = checkpoint.read_json("tokenizer.json")  # megabytes, so only where the settings do not say
    tokenizer = tokenizer if isinstance(tokenizer, dict) else {}
    added, model = tokenizer.get("added_tokens") or [], tokenizer.get("model") or {}
    ids = [entry.get("id") for entry in added if isinstance(entry, dict) and entry.get("content") == text]
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids += [vocabulary.get(text)] if isinstance(vocabulary, dict) else []
    return next((found for found in ids if type(found) is int), None)
