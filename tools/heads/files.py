"""The files of a checkpoint that may hold its value head, and what must not disagree between them."""

from collections.abc import Iterable, Mapping
from typing import Any

from tools.checkpoint.change import Source, same_bytes
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import HEAD_FILES, MODEL_FILES, Checkpoint, read_weight_file
from tools.heads.finding import find_heads
from tools.heads.layouts import LAYOUTS
from tools.heads.wrappers import ACTOR_CRITIC, bare_names, strip_wrappers


def refuse_contradictions(source: Checkpoint) -> None:
    """Raise CheckpointError, naming tensors and files, where it cannot be told which head is the head.

    So it is with a head in a safetensors file and in a `.bin`, with an adapter whose `modules_to_save` lists a head
    that no file holds, and with the weights of a policy and a value model in one.
    """
    both = [name for name in HEAD_FILES if (source.path / name).exists()]
    if len(both) > 1 and source.head:
        problem = f"both {' and '.join(both)} are here for {', '.join(source.head.tensors)}"
        raise CheckpointError(source.path, problem, "remove the older one")
    _refuse_ignored_weights(source)
    _refuse_missing_module(source)
    for weights in source.weights:
        halves = [name for name in weights.tensors if strip_wrappers(name).startswith(ACTOR_CRITIC)]
        if halves:
            problem = f"a policy with its value model: {', '.join(halves[:2])}"
            raise CheckpointError(source.path / weights.name, problem, "run tools split-actor-critic")


def refuse_other_values(source: Checkpoint, tensors: Mapping[str, Source], present: Mapping[str, Source]) -> None:
    """Raise CheckpointError when the head in the weights and the one in the head file are not the same, to the byte."""
    if present.keys() != tensors.keys() or not all(same_bytes(tensors[name], present[name]) for name in tensors):
        assert source.head
        raise CheckpointError(
            source.path,
            f"{', '.join(tensors)} in the weights differ from what {source.head.name} holds",
            "keep one of the two: move the file away if the weights are newer",
        )


def _refuse_ignored_weights(source: Checkpoint) -> None:
    """A `pytorch_model.bin` beside a model.safetensors is read by nobody; its head may be another."""
    ignored = MODEL_FILES[1]
    if source.model is None or source.model.name == ignored:
        return
    heads = [h for w in (source.model, source.head) if w for h in find_heads(w.tensors, source.config)]
    inner = {name for head in heads for name in head.names.values()}
    names = bare_names(_names_in(source, ignored)) if inner else {}
    twice = [name for name, bare in names.items() if bare in inner]
    if twice:
        problem = f"{', '.join(twice)} in {ignored} and in {(source.head or source.model).name}"
        raise CheckpointError(source.path, problem, "keep one of the two: move the other file away")


def _names_in(source: Checkpoint, file: str) -> Iterable[str]:
    if (source.path / file).is_file():
        return read_weight_file(source.path / file).tensors
    index: Any = source.read_json(f"{file}.index.json")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    return weight_map if isinstance(weight_map, dict) else ()


def _refuse_missing_module(source: Checkpoint) -> None:
    """`modules_to_save` of an adapter lists `score` and `classifier` where PEFT does not know which one there is."""
    saved = (source.adapter_config or {}).get("modules_to_save")
    labels = {layout.label for layout in LAYOUTS}
    listed = [name for name in saved if name in labels] if isinstance(saved, list) else []
    parts = {part for weights in source.weights for name in weights.tensors for part in name.split(".")}
    if listed and not parts & set(listed):
        held = ", ".join(file.name for weights in source.weights for file in weights.files)
        problem = f"modules_to_save lists {', '.join(listed)}, of which {held} has no tensor"
        raise CheckpointError(source.path / "adapter_config.json", problem, "was the head saved elsewhere?")
