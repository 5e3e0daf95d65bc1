"""Initial factors without an initial adapter: from base and residual base, or from the base alone."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.checkpoint.change import Stored, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.lora.adapters import LoraModule
from tools.lora.floats import computed, numbers, require_floats
from tools.lora.stacking import Initial
from tools.lora.svd import greatest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[Any]
    Factors = tuple[Matrix, Matrix]

# A difference of the rank that was taken out falls off by some hundreds in bf16 and a million in fp32.
_LEAST_GAP = 10.0


@dataclass(frozen=True)
class Recovered:
    """Initial factors by module, and what shows that they are right."""

    factors: Mapping[str, Initial]
    details: Mapping[str, Any]


def from_residual(
    modules: Mapping[str, LoraModule], base: Checkpoint, residual: Checkpoint, transposed: bool
) -> Recovered:
    """s B0 A0 as the rank-r part of W - W_res, one matrix in memory at a time.

    Raises CheckpointError when the singular values do not drop after the r-th: then the two do not belong together.
    """
    import numpy as np

    factors, gaps = {}, {}
    for name, module in modules.items():
        sources = weight_of(base, module), weight_of(residual, module)
        if sources[0].shape != sources[1].shape:
            problem = f"{name} is {list(sources[1].shape)}, in {base.path} {list(sources[0].shape)}"
            raise CheckpointError(residual.path, problem, "is it the residual base of that model?")
        difference = numbers(sources[0]) - numbers(sources[1])
        if not difference.any():
            factors[name] = _unchanged(module, residual)
            continue
        u, s, v = greatest(_as_linear(module, difference, transposed), module.r)
        gaps[name] = float(s[module.r - 1] / max(s[module.r], np.finfo(s.dtype).tiny)) if len(s) > module.r else np.inf
        if gaps[name] < _LEAST_GAP:
            problem = f"{name} differs from {base.path} by more than rank {module.r}"
            problem += f" (singular values drop by {gaps[name]:.1f} after it, not by {_LEAST_GAP:g} or more)"
            raise CheckpointError(residual.path, problem, "is it the residual base of that model and this adapter?")
        factors[name] = _initial(module, u * np.sqrt(s), np.sqrt(s)[:, None] * v, sources)
    least = f"least drop of the singular values after the rank: {min(gaps.values()):.0f}-fold" if gaps else "none"
    return Recovered(factors, {"initial adapter": f"W - W_res of {residual.path}; {least}"})


def recomputed(kind: str, modules: Mapping[str, LoraModule], base: Checkpoint, transposed: bool) -> Recovered:
    """s B0 A0 decomposed again from W, for initialisations that are a function of W: pissa and olora."""
    import numpy as np

    factors, digest = {}, hashlib.sha256()
    for name, module in modules.items():
        if module.kind != "linear":  # PEFT 0.21 begins these with a product of zero
            factors[name] = _zero(module)
            continue
        source = weight_of(base, module)
        digest.update(source.read())
        weight = _as_linear(module, numbers(source), transposed)
        b, a = _olora(module, weight, transposed) if kind == "olora" else _pissa(module, weight)
        factors[name] = _initial(module, b, a, (source,))
    how = f"{kind} of {base.path}, decomposed again by numpy {np.__version__}"
    return Recovered(factors, {"initial adapter": how, "sha256 of the base weights": digest.hexdigest()})


def why_not_recomputed(kind: str) -> str | None:
    """Why an initialisation is no function of the base weights; None for those that are."""
    if kind.startswith("pissa_niter"):
        return f"{kind} starts from a random projection, so the base does not tell what it took out"
    if kind in ("corda", "lora_ga"):
        return f"{kind} depends on the data it was calibrated with, so the base does not tell what it took out"
    return None if kind in ("pissa", "olora") else f"{kind} is no initialisation that takes something out of the base"


def find_weight(base: Checkpoint, module: LoraModule) -> Stored | None:
    """The weight of a module in the base, under its name with or without the prefix of a causal LM."""
    tensors = stored(base.model) if base.model else {}
    wanted = f"{module.name}.weight"
    found = next((n for n in (wanted, wanted.partition(".")[2], f"model.{wanted}") if n in tensors), None)
    return tensors[found] if found else None


def weight_of(base: Checkpoint, module: LoraModule) -> Stored:
    """The same. Raises CheckpointError, with its name, when it is not there, or is no matrix of floats."""
    if (found := find_weight(base, module)) is None:
        problem = f"has no {module.name}.weight"
        raise CheckpointError(base.path, problem, "is it the base that the adapter was trained on?")
    require_floats(found)
    return found


def linear_weight(base: Checkpoint, module: LoraModule, transposed: bool) -> "Matrix":
    """The weight of a module in the base as [out, in]."""
    return _as_linear(module, numbers(weight_of(base, module)), transposed)


def _as_linear(module: LoraModule, weight: "Matrix", transposed: bool) -> "Matrix":
    if module.kind not in ("linear", "embedding") or weight.ndim != 2:
        problem = f"{module.name} is a {module.kind}, for which no base-changing initialisation is known"
        raise CheckpointError(module.A.file.path, problem, "name the initial adapter with --init")
    return weight.T if module.kind == "embedding" or transposed else weight


def _pissa(module: LoraModule, weight: "Matrix") -> "Factors":
    import numpy as np

    u, s, v = np.linalg.svd(weight, full_matrices=False)
    r = module.r
    if r < len(s) and s[r - 1] - s[r] <= 1e-6 * s[0]:
        problem = (
            f"{module.name}: singular values {r} and {r + 1} of the base are equal, so its principal part is not one"
        )
        raise CheckpointError(module.A.file.path, problem, "name the initial adapter with --init")
    root = np.sqrt(s[:r])
    return u[:, :r] * root, root[:, None] * v[:r]


def _olora(module: LoraModule, weight: "Matrix", transposed: bool) -> "Factors":
    """Q_r and R_r; they are not divided by s, so their product is taken out s times."""
    import numpy as np

    if transposed:
        problem = f"{module.name} is a Conv1D, which PEFT decomposes as if it were not transposed"
        raise CheckpointError(module.A.file.path, problem, "name the initial adapter with --init")
    q, r = np.linalg.qr(weight)
    return module.scaling * q[:, : module.r], r[: module.r]


def _initial(module: LoraModule, b: "Matrix", a: "Matrix", sources: tuple[Stored, ...]) -> Initial:
    """Factors whose product is what was taken out: s B0 A0. The base weights they come from are named as sources."""
    r = module.r
    a0, b0 = computed(a[:r], module.A.dtype, sources), computed(b[:, :r] / module.scaling, module.B.dtype, sources)
    if (a0.shape, b0.shape) != (module.A.shape, module.B.shape):
        problem = f"{module.name} is {[b0.shape[0], a0.shape[1]]}, adapted as {[module.B.shape[0], module.A.shape[1]]}"
        raise CheckpointError(sources[0].file.path, problem, "is it the base that the adapter was trained on?")
    return Initial(a0, b0)


def _unchanged(module: LoraModule, residual: Checkpoint) -> Initial:
    if module.kind == "linear":
        problem = f"{module.name} is the same as in the base, so nothing was taken out of it"
        raise CheckpointError(residual.path, problem, "is it the residual base, and --base the original one?")
    return _zero(module)


def _zero(module: LoraModule) -> Initial:
    import numpy as np

    a, b = (computed(np.zeros(f.shape, "<f4"), f.dtype, ()) for f in (module.A, module.B))
    return Initial(a, b)
