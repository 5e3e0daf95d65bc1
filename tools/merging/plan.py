"""The plan of a merge: the files of a whole model, from those of a base and of its adapters."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.checkpoint.change import Change, Computed, Content, FileCopy, Source, Stored, TensorFile, json_file
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.hub import local_copy
from tools.lora.base_config import says_tied
from tools.merging.adapter import Adapter
from tools.merging.base import Base, files_from, is_head, quantisation
from tools.merging.fitting import CLASSIFIER_HEADS
from tools.merging.floats import ITEM_BYTES, Matrices
from tools.merging.low_rank import Block, merged_blocks
from tools.merging.model_config import as_classifier, untied, with_labels, with_vocabulary
from tools.merging.parameters import Parameters, parameters_of
from tools.merging.shards import in_shards, like_base
from tools.merging.stored_rows import replaced, with_rows, with_vectors
from tools.merging.tying import output_matrix
from tools.merging.vocabulary import require_vocabulary

VALUE_HEAD = "value_head.safetensors"
# Counts and compares the blocks of a tensor, and passes on what they become.
Watch = Callable[[Iterable[Block]], Iterator[bytes]]


def merge_plan(adapters: Sequence[Adapter], base: Base, largest: int | None, watch: Watch) -> Change:
    """The change that makes the directory of the first adapter the merged model.

    Raises CheckpointError for what cannot be merged, naming it.
    """
    _refuse_more_heads(adapters)
    parameters = parameters_of(adapters, base)
    head, start = output_matrix(base, parameters, adapters)
    weights = {**parameters.weights, **({head: start} if head and start else {})}
    stale = start if head is None else None
    names = dict.fromkeys(
        (*(name for name, source in base.tensors.items() if source != stale), *([head] if head else ()))
    )
    read = Matrices()
    tensors = {name: _tensor(name, weights[name], parameters, base, read, watch) for name in names}
    require_vocabulary(base, adapters[0].checkpoint, tensors)
    config = _config(base, adapters[0], parameters, tensors, is_untied=head is not None)
    if parameters.heads:
        tensors = {name: source for name, source in tensors.items() if not is_head(name)}
        tensors |= {name: _replaced(None, source, source.dtype, watch) for name, source in parameters.heads.items()}
    files = in_shards(tensors, largest, base.weights.files[0].metadata) if largest else like_base(base.weights, tensors)
    taken, left = files_from(base.checkpoint, adapters[0].checkpoint)
    value_head = _value_head(adapters[0])
    new = {
        **files,
        **{name: FileCopy(base.path / name) for name in taken},
        "config.json": json_file(config),
        **value_head,
    }
    return Change(
        _summary(adapters, base, parameters),
        {**dict.fromkeys(_left_behind(adapters[0].checkpoint)), **new},
        _details(adapters, base, tensors, config, left),
        adapters[0].redundant | _not_used(adapters[0], tensors),
    )


def _tensor(name: str, weight: Stored, parameters: Parameters, base: Base, read: Matrices, watch: Watch) -> Source:
    """One tensor of the merged model, in the dtype that the base has it in."""
    dtype = base.tensors.get(name, weight).dtype
    if source := parameters.saved.get(name):
        return _replaced(base.tensors.get(name), source, dtype, watch)
    if parts := parameters.low_rank.get(name):
        sources = [source for changes in parts for change in changes for source in change.sources]
        return _computed(weight, dtype, lambda: watch(merged_blocks(weight, parts, dtype, read)), sources)
    if vectors := parameters.vectors.get(name):
        return _computed(weight, dtype, lambda: watch(with_vectors(weight, vectors, read)), [v for _, v in vectors])
    if name in parameters.tokens:
        indices, rows = parameters.tokens[name]
        return _computed(weight, dtype, lambda: watch(with_rows(weight, indices, rows, dtype)), [rows])
    return weight


def _replaced(weight: Stored | None, source: Stored, dtype: str, watch: Watch) -> Computed:
    """A tensor of the adapter in the place of one of the base, None where the base has none."""
    nbytes = source.tensor.elements * ITEM_BYTES[dtype]
    return Computed(dtype, source.shape, nbytes, lambda: watch(replaced(weight, source, dtype)), (source,), apart=True)


def _computed(weight: Stored, dtype: str, blocks: Callable[[], Iterator[bytes]], sources: Sequence[Stored]) -> Computed:
    nbytes = weight.tensor.elements * ITEM_BYTES[dtype]
    return Computed(dtype, weight.shape, nbytes, blocks, (weight, *sources), apart=True)


def _config(
    base: Base, adapter: Adapter, parameters: Parameters, tensors: Mapping[str, Source], *, is_untied: bool
) -> dict[str, Any]:
    config = dict(base.config)
    if base.embedding and tensors[base.embedding].shape != base.tensors[base.embedding].shape:
        config = with_vocabulary(config, tensors[base.embedding].shape[0])
    if is_untied or (base.head in tensors and says_tied(config) and parameters.touched & {base.embedding, base.head}):
        config = untied(config)
    if parameters.heads:
        task = (adapter.checkpoint.adapter_config or {}).get("task_type")
        labels = list(parameters.heads.values())[-1].shape[0]
        config = as_classifier(base.path, config, task, labels)
    for name, source in parameters.saved.items():
        if name.startswith(CLASSIFIER_HEADS) and source.shape != base.tensors[name].shape:
            config = with_labels(config, source.shape[0])
    return config


def _left_behind(adapter: Checkpoint) -> list[str]:
    """The files that make the directory an adapter; a model card of PEFT calls it one too."""
    weights = [each for each in (adapter.model, adapter.adapter) if each]
    names = [name for each in weights for name in (*(file.name for file in each.files), each.index_name)]
    return [name for name in (*names, "adapter_config.json", "README.md") if (adapter.path / name).exists()]


def _value_head(adapter: Adapter) -> dict[str, Content]:
    return {VALUE_HEAD: TensorFile(adapter.head)} if adapter.head else {}


def _refuse_more_heads(adapters: Sequence[Adapter]) -> None:
    for adapter in adapters[1:]:
        if adapter.head or adapter.checkpoint.head:
            problem = "has a value head, and the merged model gets that of the first adapter alone"
            raise CheckpointError(adapter.checkpoint.path, problem, "name this adapter first, or move its head away")


def _not_used(adapter: Adapter, tensors: Mapping[str, Source]) -> frozenset[str]:
    """What the adapter holds of an output matrix that stays tied to the embedding: the same as for that."""
    if any(is_head(name) for name in tensors):
        return frozenset()
    assert adapter.checkpoint.adapter is not None
    return frozenset(name for name in adapter.checkpoint.adapter.tensors if "lm_head." in name or "embed_out." in name)


def _summary(adapters: Sequence[Adapter], base: Base, parameters: Parameters) -> str:
    count = sum(len(adapter.modules) for adapter in adapters)
    parts = [f"{base.path} with {count} of {count} modules merged in"]
    if parameters.saved:
        parts.append(f"{len(parameters.saved)} tensors replaced")
    if parameters.tokens:
        parts.append(f"{sum(len(indices) for indices, _ in parameters.tokens.values())} token rows replaced")
    if parameters.heads:
        parts.append(f"head {', '.join(sorted(parameters.heads))} carried along")
    if (kept := adapters[0].checkpoint.head) or adapters[0].head:
        parts.append(f"value head carried along in {kept.name if kept else VALUE_HEAD}")
    return "; ".join(parts)


def _details(
    adapters: Sequence[Adapter], base: Base, tensors: Mapping[str, Source], config: Mapping[str, Any], left: list[str]
) -> dict[str, Any]:
    details: dict[str, Any] = {"adapters": {str(each.checkpoint.path): f"weight {each.weight:g}" for each in adapters}}
    if base.embedding and (new := tensors[base.embedding].shape[0]) != (old := base.tensors[base.embedding].shape[0]):
        details["vocabulary"] = f"{old} -> {new} rows"
    if config.get("architectures") != base.config.get("architectures"):
        details["architectures"] = ", ".join(config["architectures"])
    if says_tied(config) != says_tied(base.config):
        details["tie_word_embeddings"] = "false: embedding and output matrix were trained apart"
    own = adapters[0].checkpoint.processor_files
    details["tokenizer and processor"] = "from the adapter" if own else "from the base"
    notes = (each(adapters[0], base) for each in (_begun_by_loftq, _trained_on_quantised, _trained_on_another))
    if note := next(filter(None, notes), None):
        details["note"] = note
    if left:
        details["left in the base"] = left
    return details


def _begun_by_loftq(adapter: Adapter, base: Base) -> str | None:
    """LoftQ (arXiv:2310.08659) begins with Q + s B A near W, so an adapter goes on Q, and nothing here tells which."""
    if (adapter.checkpoint.adapter_config or {}).get("init_lora_weights") != "loftq":
        return None
    return f"a loftq adapter belongs on the quantised weights it began with; is {base.path} those, dequantised?"


def _trained_on_quantised(adapter: Adapter, base: Base) -> str | None:
    named = (adapter.checkpoint.adapter_config or {}).get("base_model_name_or_path") or ""
    there = local_copy(named) if named else None
    method = quantisation(Checkpoint.open(there).config or {}) if there else None
    if method is None and not re.search(r"4bit|8bit|bnb|gptq|awq", Path(named).name, re.IGNORECASE):
        return None
    return f"trained on {named}{f' ({method})' if method else ''}; on {base.path} it can be a little off"


def _trained_on_another(adapter: Adapter, base: Base) -> str | None:
    """A note when the adapter names a base of another name; where a model lies says nothing of which it is."""
    named = (adapter.checkpoint.adapter_config or {}).get("base_model_name_or_path") or ""
    there = local_copy(named) if named else None
    if not named or Path(named).name == base.path.resolve().name or (there and there.resolve() == base.path.resolve()):
        return None
    return f"the adapter names {named} as its base"
