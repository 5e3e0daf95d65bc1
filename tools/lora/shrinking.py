"""An adapter with less rank, or with its scale in its factors: the same change of the base, or the nearest there is."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tools.checkpoint.change import Computed, Source
from tools.checkpoint.errors import CheckpointError
from tools.lora.adapters import LoraModule
from tools.lora.floats import computed, fitting, numbers
from tools.lora.stacking import matrices, unblocked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[Any]


@dataclass(frozen=True)
class Product:
    """A module as it shall be written: it adds `scaling * B A`. `module`, of which it is made, gives the shapes."""

    module: LoraModule
    A: Source
    B: Source
    bias: Source | None
    r: int
    scaling: float


@dataclass(frozen=True)
class Loss:
    """What less rank costs: the squared Frobenius norms of what was left out, and of the whole change."""

    left_out: float
    whole: float

    @property
    def relative(self) -> float:
        return math.sqrt(self.left_out / self.whole) if self.whole else 0.0


def product_of(module: LoraModule) -> Product:
    """A module as it is stored."""
    return Product(module, module.A, module.B, module.bias, module.r, module.scaling)


def folded(product: Product) -> Product:
    """The same change with a scale of 1: it is multiplied into B, and into the bias of B."""
    import numpy as np

    def scaled(source: Source) -> Computed:
        def data() -> Iterable[bytes]:
            with np.errstate(over="ignore"):
                yield fitting(numbers(source) * product.scaling, source.dtype, source.sources[0])

        return Computed(source.dtype, source.shape, source.nbytes, data, source.sources)

    if product.scaling == 1:
        return product
    bias = scaled(product.bias) if product.bias else None
    return replace(product, B=scaled(product.B), bias=bias, scaling=1.0)


def shrunk(product: Product, max_rank: int) -> tuple[Product, Loss]:
    """The nearest change of rank `max_rank` in the Frobenius norm (Eckart and Young 1936), its scale folded in.

    From QR of both factors and the SVD of the small core between them, so the change itself [out, in] is never made:
    B = Q_b R_b and A^T = Q_a R_a give B A = Q_b (R_b R_a^T) Q_a^T.
    """
    module = product.module
    if product.r <= max_rank:
        return folded(product), Loss(0.0, _squares(_cores(product)[1]))
    groups = module.blocks if module.kind == "conv" else 1
    if max_rank % groups:
        problem = f"{module.name} is a convolution in {groups} groups, and {max_rank} is no multiple of that"
        raise CheckpointError(module.A.file.path, problem, "choose another --max-rank")
    (left, right), singular, (u, v) = _cores(product)
    kept = max_rank // groups
    root = _padded(singular[:, :kept], kept, axis=1) ** 0.5
    b = _padded(left @ u[:, :, :kept], kept, axis=2) * root[:, None, :]  # (blocks, out, kept)
    a = root[:, :, None] * _padded(v[:, :kept] @ right.transpose(0, 2, 1), kept, axis=1)  # (blocks, kept, in)
    new_a, new_b = unblocked(module, a, b)
    sources = (*product.A.sources, *product.B.sources)
    bias = folded(product).bias
    return (
        Product(
            module,
            computed(new_a, module.A.dtype, sources),
            computed(new_b, module.B.dtype, sources),
            bias,
            max_rank,
            1.0,
        ),
        Loss(_squares(singular[:, kept:]), _squares(singular)),
    )


def overall(losses: Iterable[Loss]) -> Loss:
    """The loss over all modules together."""
    losses = list(losses)
    return Loss(sum(loss.left_out for loss in losses), sum(loss.whole for loss in losses))


def _cores(product: Product) -> "tuple[tuple[Matrix, Matrix], Matrix, tuple[Matrix, Matrix]]":
    """Per block orthonormal (Q_b, Q_a), and the SVD of the core: singular values of `scaling * B A`, and (U, V^T)."""
    import numpy as np

    a, b = (each.astype(np.float64) for each in matrices(product.module, product.A, product.B))
    for factor, values in ((product.A, a), (product.B, b)):
        if not np.isfinite(values).all():
            problem = f"{factor.sources[0].name} holds NaN or infinity"
            raise CheckpointError(factor.sources[0].file.path, problem, "the training had diverged")
    left, left_core = np.linalg.qr(b * product.scaling)
    right, right_core = np.linalg.qr(a.transpose(0, 2, 1))
    u, singular, v = np.linalg.svd(left_core @ right_core.transpose(0, 2, 1), full_matrices=False)
    return (left, right), singular, (u, v)


def _padded(values: "Matrix", length: int, axis: int) -> "Matrix":
    """Zeros added behind, where a module has fewer inputs or outputs than the rank."""
    import numpy as np

    widths = [(0, max(0, length - values.shape[axis]) if each == axis else 0) for each in range(values.ndim)]
    return np.pad(values, widths)


def _squares(singular: "Matrix") -> float:
    return float((singular**2).sum())
