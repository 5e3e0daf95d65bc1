"""Two adapters of one module as one: B' A' = B A - B0 A0, with A' = [A; A0] and B' = [B, -B0], for every kind."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.checkpoint.change import Computed, Source
from tools.lora.adapters import LoraModule
from tools.lora.floats import bits, negated, numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Initial:
    """The factors that an initialisation took out of the base: A0 and B0 of a module, in its shapes and dtypes."""

    A: Source
    B: Source


def stacked_a(module: LoraModule, initial: Initial) -> Computed:
    """A' = [A; A0], expert by expert: (r, in) -> (2r, in). Bytes are moved, never decoded."""

    def data() -> Iterable[bytes]:
        import numpy as np

        parts = [_rows(bits(factor), module.blocks) for factor in (module.A, initial.A)]
        yield np.concatenate(parts, axis=1).tobytes()

    shape = (2 * module.A.shape[0], *module.A.shape[1:])
    return Computed(module.A.dtype, shape, 2 * module.A.nbytes, data, (module.A, *initial.A.sources))


def stacked_b(module: LoraModule, initial: Initial) -> Computed:
    """B' = [B, -B0]: (out, r) -> (out, 2r). The minus is the sign bit."""

    def data() -> Iterable[bytes]:
        import numpy as np

        now, then = (_columns(bits(factor), module) for factor in (module.B, initial.B))
        yield np.concatenate([now, negated(then, module.B.dtype)], axis=1).tobytes()

    shape = (module.B.shape[0], 2 * module.B.shape[1], *module.B.shape[2:])
    return Computed(module.B.dtype, shape, 2 * module.B.nbytes, data, (module.B, *initial.B.sources))


def is_stacked(module: LoraModule, initial: Initial) -> bool:
    """Whether the last half of A is A0 and the last half of B is -B0; the configuration cannot tell."""
    if (module.A.dtype, module.B.dtype) != (initial.A.dtype, initial.B.dtype):
        return False
    if (module.A.shape[1:], module.B.shape[0]) != (initial.A.shape[1:], initial.B.shape[0]):
        return False
    if (module.A.shape[0], module.B.shape[1]) != (2 * initial.A.shape[0], 2 * initial.B.shape[1]):
        return False
    a, a0 = (_rows(bits(factor), module.blocks) for factor in (module.A, initial.A))
    b, b0 = (_columns(bits(factor), module) for factor in (module.B, initial.B))
    a_tail, b_tail = a[:, a0.shape[1] :], negated(b[:, b0.shape[1] :], module.B.dtype)
    return bool((a_tail == a0).all() and (b_tail == b0).all())


def matrices(module: LoraModule, a: Source, b: Source) -> "tuple[NDArray[Any], NDArray[Any]]":
    """The factors of every block of a module as matrices of numbers: [blocks, r, in] and [blocks, out, r]."""
    rows, columns = _rows(numbers(a), module.blocks), numbers(b)
    rows = rows.reshape(*rows.shape[:2], -1)
    if module.kind == "parameter":
        return rows, _columns(columns, module).transpose(2, 0, 1)
    return rows, columns.reshape(module.blocks, -1, columns.shape[1])


def unblocked(module: LoraModule, a: "NDArray[Any]", b: "NDArray[Any]") -> "tuple[NDArray[Any], NDArray[Any]]":
    """The inverse of `matrices`, for any rank: factors in the shapes that PEFT stores."""
    if module.kind == "parameter":
        b = b.transpose(1, 2, 0)  # (blocks, out, r) -> (out, r, blocks)
        return a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)
    shape = (module.B.shape[0], b.shape[-1], *module.B.shape[2:])
    return a.reshape(-1, *module.A.shape[1:]), b.reshape(shape)


def _rows(a: "NDArray[Any]", blocks: int) -> "NDArray[Any]":
    return a.reshape(blocks, a.shape[0] // blocks, *a.shape[1:])


def _columns(b: "NDArray[Any]", module: LoraModule) -> "NDArray[Any]":
    return b.reshape(b.shape[0], b.shape[1] // module.blocks, module.blocks) if module.kind == "parameter" else b
