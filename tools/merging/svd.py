"""The best product of low rank for a matrix: a randomized singular value decomposition (arXiv:0909.4061)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    Floats = NDArray[float32]

_OVERSAMPLING = 16
_POWER_ITERATIONS = 3


def low_rank(matrix: "Floats", rank: int) -> "tuple[Floats, Floats]":
    """`left` [m, rank] and `right` [rank, n], with the roots of the singular values in each: near it multiplied.

    For a `matrix` [m, n] of this rank or a lower one they are exact but for float32; the same every time. Columns and
    rows beyond min(m, n) are zero.
    """
    import numpy as np

    width = min(rank + _OVERSAMPLING, *matrix.shape)
    basis = np.random.default_rng(0).standard_normal((matrix.shape[1], width), np.float32)
    basis = np.linalg.qr(matrix @ basis)[0]  # (m, width)
    for _ in range(_POWER_ITERATIONS):
        basis = np.linalg.qr(matrix.T @ basis)[0]  # (n, width)
        basis = np.linalg.qr(matrix @ basis)[0]  # (m, width)
    inner, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    kept = min(rank, width)
    roots = np.sqrt(values[:kept])
    left, right = basis @ inner[:, :kept] * roots, roots[:, None] * right[:kept]
    spare = rank - kept
    return np.pad(left, ((0, 0), (0, spare))), np.pad(right, ((0, spare), (0, 0)))
