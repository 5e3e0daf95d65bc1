"""What adapters do to the parameters of their base, by the names that these have in the base's files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tools.checkpoint.change import Stored, same_bytes
from tools.checkpoint.errors import CheckpointError
from tools.merging.adapter import Adapter
from tools.merging.base import Base, is_head
from tools.merging.changes import Parts, changes_of
from tools.merging.fitting import CLASSIFIER_HEADS, require_one_change, require_rows, require_shapes
from tools.merging.floats import require_floats
from tools.merging.matching import Rename, renaming

# Ids of tokens, and the rows that they get, in this order.
Rows = tuple[tuple[int, ...], Stored]


@dataclass(frozen=True)
class Parameters:
    """`weights` are what is added to: the base's tensors, an embedding as it was when the vocabulary had grown.

    `saved` replace them, `low_rank` and `vectors` are added to them, `tokens` replace rows of them; `heads` are new.
    """

    weights: Mapping[str, Stored]
    saved: Mapping[str, Stored]
    low_rank: Mapping[str, Parts]
    vectors: Mapping[str, tuple[tuple[float, Stored], ...]]
    tokens: Mapping[str, Rows]
    heads: Mapping[str, Stored]

    @property
    def touched(self) -> set[str]:
        """The names of the base's tensors that are not as they were."""
        return {*self.saved, *self.low_rank, *self.vectors, *self.tokens}


def parameters_of(adapters: Sequence[Adapter], base: Base) -> Parameters:
    """What all adapters do together: their changes are added up.

    Raises CheckpointError for what cannot be added up, and for modules that the base does not have.
    """
    every = [_of_one(adapter, base) for adapter in adapters]
    for adapter in adapters:
        _require_sum(adapter, alone=len(adapters) == 1)
    low_rank: dict[str, Parts] = {}
    vectors: dict[str, tuple[tuple[float, Stored], ...]] = {}
    for each in every:
        for name, parts in each.low_rank.items():
            before = low_rank.get(name, ((),) * len(parts))
            low_rank[name] = tuple((*some, *more) for some, more in zip(before, parts, strict=True))
        for name, more in each.vectors.items():
            vectors[name] = (*vectors.get(name, ()), *more)
    return Parameters(
        {**base.tensors, **{name: source for each in every for name, source in each.weights.items()}},
        {name: source for each in every for name, source in each.saved.items()},
        low_rank,
        vectors,
        {name: rows for each in every for name, rows in each.tokens.items()},
        {name: source for each in every for name, source in each.heads.items()},
    )


def _require_sum(adapter: Adapter, *, alone: bool) -> None:
    """Raise CheckpointError when an adapter that is not merged alone and in full replaces tensors, or scales sums."""
    if alone and adapter.weight == 1:
        return
    replaced = [*adapter.saved, *adapter.tokens]
    scaled = [module.name for module in adapter.modules if module.magnitude is not None]
    if replaced or scaled:
        what = f"replaces {replaced[0]}" if replaced else f"scales {scaled[0]} to a norm (DoRA)"
        problem = f"{what}, which has no weighted sum with others"
        raise CheckpointError(adapter.checkpoint.path, problem, "merge it alone, with weight 1")


def _of_one(adapter: Adapter, base: Base) -> Parameters:
    weights = _tied_too(adapter, base)
    rename = _renaming(adapter, base, weights)
    weights |= _grown(adapter, base, weights, rename)
    heads, saved = {}, {}
    for name, source in adapter.saved.items():
        if name.startswith(CLASSIFIER_HEADS) and name not in weights:
            heads[name] = source
        else:
            saved[rename(name)] = source
    tokens = {rename(f"{module}.weight"): rows for module, rows in adapter.tokens.items()}
    vectors = {
        rename(f"{module.name}.bias"): ((adapter.weight * module.scaling, module.bias),)
        for module in adapter.modules
        if module.bias is not None
    }
    _require_biases(adapter, base, weights, vectors)
    require_shapes(adapter, base, weights, saved)
    require_rows(adapter, base, weights, tokens)
    low_rank = changes_of(adapter, base, weights, rename)
    require_one_change(adapter, saved, tokens, vectors, low_rank)
    for name in {*saved, *low_rank, *vectors, *tokens}:
        require_floats(weights[name])
    own = {name: source for name, source in weights.items() if source != base.tensors.get(name)}
    return Parameters(own, saved, low_rank, vectors, tokens, heads)


def _tied_too(adapter: Adapter, base: Base) -> dict[str, Stored]:
    """The base's tensors, and under the name that the adapter uses for it an output matrix tied to the embedding."""
    weights = dict(base.tensors)
    if base.head is None and base.embedding:
        touched = (*(f"{module.name}.weight" for module in adapter.modules), *adapter.saved, *_token_names(adapter))
        weights |= {name: weights[base.embedding] for name in touched if is_head(name)}
    return weights


def _token_names(adapter: Adapter) -> list[str]:
    return [f"{module}.weight" for module in adapter.tokens]


def _renaming(adapter: Adapter, base: Base, weights: Mapping[str, Stored]) -> Rename:
    owners = {f"{module.name.replace('.base_layer', '')}." for module in adapter.modules if module.kind == "parameter"}
    plain = [f"{module.name}.weight" for module in adapter.modules if module.kind != "parameter"]
    names = [*plain, *sorted(owners)] or [
        *(name for name in adapter.saved if not name.startswith(CLASSIFIER_HEADS)),
        *_token_names(adapter),
    ]

    def is_there(name: str) -> bool:
        return name in weights or (name.endswith(".") and any(held.startswith(name) for held in weights))

    return renaming(adapter.checkpoint.path, base.path, names, is_there, base.tensors)


def _grown(adapter: Adapter, base: Base, weights: Mapping[str, Stored], rename: Rename) -> dict[str, Stored]:
    """The adapter's copies of base tensors that have more rows than the base, since its vocabulary had grown.

    Raises CheckpointError for a copy with other values than the base: the adapter belongs to another one.
    """
    grown = {}
    for name, copy in adapter.copies.items():
        held = weights.get(rename(name))
        if held is None or held.shape[1:] != copy.shape[1:]:
            problem = f"{copy.name} {list(copy.shape)} is a copy of a tensor that the base does not have"
            raise CheckpointError(adapter.checkpoint.path, problem, "is it the base that the adapter was trained on?")
        if copy.shape != held.shape:
            grown[rename(name)] = copy
            if rename(name) not in base.tensors and base.embedding:  # tied, so it is that of the embedding too
                grown.setdefault(base.embedding, copy)
        elif copy.dtype == held.dtype and not same_bytes(copy, held):
            problem = f"{copy.name} is a copy of the base's {held.name}, and the base has other values there"
            raise CheckpointError(adapter.checkpoint.path, problem, "merge it into the base that it was trained on")
    return grown


def _require_biases(adapter: Adapter, base: Base, weights: Mapping[str, Stored], names: Iterable[str]) -> None:
    if name := next((name for name in names if name not in weights), None):
        problem = f"has biases of its own (lora_bias), and {base.path} has no {name} that one could be added to"
        raise CheckpointError(adapter.checkpoint.path, problem, "use it as an adapter; it cannot be merged")
