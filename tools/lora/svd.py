"""Randomized singular value decomposition (Halko et al. 2011, arXiv:0909.4061): the greatest singular values alone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[Any]

_OVERSAMPLING = 16
_POWER_ITERATIONS = 3


def greatest(matrix: "Matrix", rank: int) -> "tuple[Matrix, Matrix, Matrix]":
    """U [m, k], S [k] and V^T [k, n] of the greatest singular values, some more than `rank`; the same every time.

    For a `matrix` [m, n] of this rank or a lower one they are exact but for the rounding of its dtype.
    """
    import numpy as np

    width = min(rank + _OVERSAMPLING, *matrix.shape)
    sample = np.random.default_rng(0).standard_normal((matrix.shape[1], width)).astype(matrix.dtype)
    basis = np.linalg.qr(matrix @ sample)[0]  # (m, k)
    for _ in range(_POWER_ITERATIONS):
        basis = np.linalg.qr(matrix.T @ basis)[0]  # (n, k)
        basis = np.linalg.qr(matrix @ basis)[0]  # (m, k)
    inner, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ inner, values, right


def low_rank(matrix: "Matrix", rank: int) -> "tuple[Matrix, Matrix]":
    """`left` [m, rank] and `right` [rank, n], with the roots of the singular values in each: near it multiplied.

    Columns and rows beyond min(m, n) are zero.
    """
    import numpy as np

    u, values, v = greatest(matrix, rank)
    roots = np.sqrt(values[:rank])
    left, right = u[:, :rank] * roots, roots[:, None] * v[:rank]
    spare = rank - len(roots)
    return np.pad(left, ((0, 0), (0, spare))), np.pad(right, ((0, spare), (0, 0)))
