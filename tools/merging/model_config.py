"""config.json of a merged model: that of the base, with what the adapters changed about the model."""

from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.heads.finding import architectures_of
from tools.lora.base_config import WITH_OUTPUT_MATRIX, Config

# How PEFT calls the task of a classifier, and how transformers ends the name of its class.
_CLASSIFIERS = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}


def untied(config: Config) -> dict[str, Any]:
    """The config after the output matrix became one of its own."""
    return _with(config, "tie_word_embeddings", False)


def with_vocabulary(config: Config, rows: int) -> dict[str, Any]:
    """The config of a model whose embedding has this many rows."""
    return _with(config, "vocab_size", rows)


def _with(config: Config, key: str, value: Any) -> dict[str, Any]:
    """`key` set wherever it stands, in the file itself where it stands nowhere."""
    text = config.get("text_config") or {}
    nested = {"text_config": {**text, key: value}} if key in text else {}
    return {**config, **nested, **({key: value} if key in config or not nested else {})}


def as_classifier(path: Path, config: Config, task: str | None, labels: int) -> dict[str, Any]:
    """The config of the classifier that an adapter for `task` made of this model.

    Raises CheckpointError where the class cannot be named.
    """
    architecture = next(iter(architectures_of(config)), "")
    if architecture.endswith(tuple(_CLASSIFIERS.values())):
        return with_labels(config, labels)
    ending = next((e for e in (*WITH_OUTPUT_MATRIX, "Model") if architecture.endswith(e)), None)
    if ending is None or task not in _CLASSIFIERS:
        problem = (
            f"a classification head of task {task}, and no class of transformers is known for {architecture or 'it'}"
        )
        raise CheckpointError(path, problem, "set architectures in the base's config.json to that class")
    name = architecture.removesuffix(ending) + _CLASSIFIERS[task]
    return with_labels({**config, "architectures": [name]}, labels)


def with_labels(config: Config, labels: int) -> dict[str, Any]:
    """The config of a classifier of this many labels; those that it names stay when they are as many."""
    if len(config.get("id2label") or {}) == labels:
        return dict(config)
    names = {str(number): f"LABEL_{number}" for number in range(labels)}
    return {**config, "id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
