"""Base weights that were saved with an adapted embedding or output matrix: those of the changed base."""

from collections.abc import Iterable

from tools.checkpoint.change import Computed, Stored
from tools.checkpoint.layout import Checkpoint
from tools.lora.adapters import PREFIX, beside_factors
from tools.lora.floats import numbers, require_floats, rounded
from tools.lora.origin import Modules, Origin
from tools.lora.stacking import Initial

_SUFFIX = ".base_layer.weight"
_ROWS_AT_ONCE = 4096


def base_layers(trained: Checkpoint, modules: Modules, origin: Origin) -> tuple[dict[str, Computed], frozenset[str]]:
    """Those that are restored, by name, and those that are dropped, because the original base has its own.

    Restored are embeddings of a vocabulary that has grown since, and all when the base is not here to tell.
    """
    assert trained.adapter is not None
    restored: dict[str, Computed] = {}
    dropped = set()
    for name, source in beside_factors(trained.adapter_config or {}, trained.adapter).items():
        module = modules.get(name.removeprefix(PREFIX).removesuffix(_SUFFIX))
        if module is None or not name.endswith(_SUFFIX):
            continue
        if origin.vocabulary == source.shape[0]:
            dropped.add(name)
        else:
            restored[name] = _restored(source, module.scaling, origin.factors[module.name], module.kind == "embedding")
    return restored, frozenset(dropped)


def _restored(residual: Stored, scaling: float, taken: Initial, transposed: bool) -> Computed:
    """W = W_res + s B0 A0, or its transpose for an embedding, in blocks of rows."""
    require_floats(residual)

    def blocks() -> Iterable[bytes]:
        a, b = numbers(taken.A), numbers(taken.B)
        left, right = (a.T, b.T) if transposed else (b, a)
        weight = numbers(residual)
        for row in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(row, row + _ROWS_AT_ONCE)
            yield rounded(weight[rows] + scaling * left[rows] @ right, residual.dtype)

    sources = (residual, *taken.A.sources, *taken.B.sources)
    return Computed(residual.dtype, residual.shape, residual.nbytes, blocks, sources)
