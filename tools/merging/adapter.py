"""What an adapter brings to a merge: products of low rank, and tensors that replace those of the base."""

from collections.abc import Mapping
from dataclasses import dataclass

from tools.checkpoint.change import Stored, refuse_ungathered, same_bytes, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.heads.finding import choose_head
from tools.lora.adapters import PREFIX, LoraModule, beside_factors, changes_base, lora_modules
from tools.merging.floats import require_floats

_TOKENS = ".token_adapter.trainable_tokens_delta"
# A fully trained module is written under its plain name, by some saves under this one too.
_SAVED = ".modules_to_save."
_ORIGINAL = ".original_module."


@dataclass(frozen=True)
class Adapter:
    """An adapter, by names without `base_model.model.`.

    `modules` change what the base holds; `saved` tensors take its place, and `copies` are of base tensors that some
    saves put beside the factors. `tokens` are rows of embeddings, `head` is a value head in a file beside. `weight`
    multiplies all changes. `redundant` names on disk what is there twice.
    """

    checkpoint: Checkpoint
    weight: float
    modules: tuple[LoraModule, ...]
    saved: Mapping[str, Stored]
    copies: Mapping[str, Stored]
    tokens: Mapping[str, tuple[tuple[int, ...], Stored]]
    head: Mapping[str, Stored]
    redundant: frozenset[str]

    @property
    def ties(self) -> bool:
        """Whether it was trained to keep embedding and output matrix one (`ensure_weight_tying`)."""
        return bool((self.checkpoint.adapter_config or {}).get("ensure_weight_tying"))

    def saves(self, module: str) -> bool:
        """Whether `modules_to_save` names this module; else a save added it because the vocabulary had grown."""
        wanted = (self.checkpoint.adapter_config or {}).get("modules_to_save") or ()
        return any(module == name or module.endswith(f".{name}") for name in wanted)


def read_adapter(path: Checkpoint, weight: float = 1.0) -> Adapter:
    """Raise CheckpointError unless `path` is a plain LoRA adapter whose every tensor is understood."""
    config = path.adapter_config
    if config is None or path.adapter is None:
        if path.model is not None:
            raise CheckpointError(path.path, "a full model, not an adapter; nothing to merge", "use it directly")
        raise CheckpointError(path.path, "holds no adapter", "name the directory with adapter_config.json")
    if changes_base(kind := config.get("init_lora_weights")):
        problem = f"a {kind} adapter: it belongs to a base that its initialisation changed"
        raise CheckpointError(path.path, problem, f"first run: tools convert-pissa {path.path} -o DIR")
    refuse_ungathered(path)
    modules = lora_modules(config, path.adapter)
    for source in stored(path.adapter).values():
        require_floats(source)
    rest = {name.removeprefix(PREFIX): source for name, source in beside_factors(config, path.adapter).items()}
    copies = {name: s for name, s in rest.items() if name.endswith(".base_layer.weight")}
    saved = _saved({name: s for name, s in rest.items() if name not in copies and not name.endswith(_TOKENS)})
    tokens = {n.removesuffix(_TOKENS): (_indices(path, n), s) for n, s in rest.items() if n.endswith(_TOKENS)}
    if not modules and not saved and not tokens:
        raise CheckpointError(path.path / path.adapter.name, "holds no tensor of an adapter", "the save was cut short")
    used = {source.name for source in saved.values()}
    redundant = frozenset(s.name for n, s in rest.items() if s.name not in used and not n.endswith(_TOKENS))
    copies = {n.replace(".token_adapter.", ".").replace(".base_layer.", "."): s for n, s in copies.items()}
    return Adapter(path, weight, tuple(modules.values()), saved, copies, tokens, _head(path), redundant)


def _saved(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Tensors that replace those of the base, by the names they have there.

    Raises CheckpointError when a save wrote one under two names with other values.
    """
    saved: dict[str, Stored] = {}
    for name, source in tensors.items():
        if _ORIGINAL in name:
            continue
        plain = name.replace(_SAVED, ".").replace(".base_layer.", ".")
        if plain in saved and not same_bytes(saved[plain], source):
            problem = f"{name} and {saved[plain].name} are the same parameter with other values"
            raise CheckpointError(source.file.path, problem, "save the adapter again")
        saved[plain] = source
    return saved


def _indices(adapter: Checkpoint, name: str) -> tuple[int, ...]:
    """The token ids whose rows `trainable_tokens_delta` of this name holds (PEFT 0.21, `trainable_token_indices`)."""
    module = name.removeprefix(PREFIX).removesuffix(_TOKENS)
    wanted = (adapter.adapter_config or {}).get("trainable_token_indices")
    if isinstance(wanted, dict):
        wanted = next((ids for key, ids in wanted.items() if module == key or module.endswith(f".{key}")), None)
    if not isinstance(wanted, list) or not all(type(each) is int for each in wanted):
        problem = f"holds rows of {module}, and trainable_token_indices does not say which"
        raise CheckpointError(adapter.path / "adapter_config.json", problem, "save the adapter again")
    return tuple(wanted)


def _head(adapter: Checkpoint) -> dict[str, Stored]:
    """The value head in a `pytorch_model.bin` beside the adapter, by bare names.

    Raises CheckpointError when that file holds anything else.
    """
    if adapter.model is None:
        return {}
    head = choose_head(adapter.path, adapter.model.tensors, None)
    names = head.names if head else {}
    if odd := next((name for name in adapter.model.tensors if name not in names), None):
        problem = f"{odd} lies beside the adapter and is no part of it nor of a value head"
        raise CheckpointError(adapter.path / adapter.model.name, problem, "move the file away if it does not belong")
    return {names[name]: source for name, source in stored(adapter.model).items()}
