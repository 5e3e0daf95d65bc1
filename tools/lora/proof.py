"""What the factors of an initialisation must satisfy, in themselves and with the base they were taken from.

PiSSA (arXiv:2404.02948, PEFT 0.21 `pissa_init`): B0 = U sqrt(S/s), A0 = sqrt(S/s) V^T, so B0^T B0 = A0 A0^T = S/s.
OLoRA (arXiv:2406.01775): B0 = Q_r, A0 = R_r, so B0^T B0 = 1. The base projected on B0, or on A0, is s B0 A0 for PiSSA
and CorDA (arXiv:2406.05223), and B0 A0 for OLoRA, which does not divide by s what it then takes out s times.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError
from tools.lora.adapters import LoraModule
from tools.lora.floats import numbers, precision

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[Any]

_FP32_TOLERANCE = 1e-3


def refuse_trained_factors(kind: str, modules: Iterable[LoraModule]) -> None:
    """Raise CheckpointError when these are not factors that PiSSA or OLoRA makes, so that something trained them."""
    for module in modules:
        if module.kind != "linear" or not kind.startswith(("pissa", "olora")):
            continue
        off = _imbalance(kind, numbers(module.A), numbers(module.B))
        if not _is_rounding(off, module):
            raise CheckpointError(
                module.A.file.path.parent,
                f"{module.name} is not how {kind} begins (off by {off:.1%}): it was trained, or a resume wrote over it",
                "name the adapter as it was before the first step, or recover it: see tools convert-pissa --help",
            )


def refuse_other_base(kind: str, modules: Iterable[LoraModule], weight: Callable[[LoraModule], "Matrix"]) -> None:
    """Raise CheckpointError unless the factors are a part of these base weights: those of the smallest module."""
    linear = [module for module in modules if module.kind == "linear"]
    if not linear or not kind.startswith(("pissa", "olora", "corda")):
        return
    module = min(linear, key=lambda each: each.A.nbytes + each.B.nbytes)
    off = _distance(module, 1.0 if kind == "olora" else module.scaling, weight(module))
    if not _is_rounding(off, module):
        raise CheckpointError(
            module.A.file.path.parent,
            f"{module.name} is no part of the base weights (off by {off:.1%})",
            "is it the initial adapter of this run, and --base the model that it started from?",
        )


def _is_rounding(off: float, module: LoraModule) -> bool:
    """Whether factors are off by no more than rounding makes them; NaN never is."""
    return off <= _FP32_TOLERANCE or off <= 8 * max(precision(factor) for factor in (module.A, module.B))


def _imbalance(kind: str, a: "Matrix", b: "Matrix") -> float:
    """How far B0^T B0 is from A0 A0^T (PiSSA) or from 1 (OLoRA), relative to the latter."""
    import numpy as np

    wanted = np.eye(len(a), dtype=a.dtype) if kind == "olora" else a @ a.T
    return float(np.linalg.norm(b.T @ b - wanted) / (np.linalg.norm(wanted) or 1))


def _distance(module: LoraModule, scale: float, weight: "Matrix") -> float:
    """How far `scale` B0 A0 is from W projected on the columns of B0, or on the rows of A0, whichever is nearer.

    A decomposition by random projection has one of the two exactly, by the shape of W (torch 2.13, `svd_lowrank`).
    """
    import numpy as np

    a, b = numbers(module.A), numbers(module.B)
    left, right = scale * (b.T @ b) @ a, scale * b @ (a @ a.T)
    if weight.shape != (len(b), a.shape[1]):
        return float("inf")
    sides = ((b.T @ weight, left), (weight @ a.T, right))
    return min(float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1)) for found, wanted in sides)
