"""Products of integer matrices, exact: MatMulInteger, QLinearMatMul.

BLAS multiplies floats only, and does it a hundred times faster than NumPy multiplies integers. Float32 counts whole numbers exactly up
to 2^24, so a product whose sums can't pass that is exact, whatever the order of its additions. Where they could, it's cut into several.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import FLOAT32, FLOAT64, as_dtype
from miniort_cpu.kernels.matrix import matrix_product
from miniort_cpu.kernels.quantization import saturated

kernels = KernelTable("cpu")

EXACT_IN_FLOAT32 = 1 << 24

LARGEST = 255
"""The largest difference of two numbers of 8 bits."""

PANEL = EXACT_IN_FLOAT32 // LARGEST**2
"""How many products of two such differences float32 adds up exactly, whatever they are."""

INT32 = np.dtype(np.int32)


def per_row(parameter: Array) -> Array:
    """A scale or zero point of the left matrix [..., M, K]: one, one per row [M], or [..., M, 1] -> broadcasts to it, and to a product."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter[:, None] if parameter.ndim == 1 else parameter


def per_column(parameter: Array) -> Array:
    """A scale or zero point of the right matrix [..., K, N]: one, [N], or [..., 1, N] -> broadcasts to it, and to a product."""
    return parameter.reshape(()) if parameter.size == 1 else parameter


def shifted(allocate: Allocate, x: Array, zero_point: Array | None) -> Array:
    """`x` - zero_point. x: [...] 8-bit integers; zero_point: broadcasts to it -> same shape, float32."""
    out = allocate(x.shape, FLOAT32)
    if zero_point is None or not zero_point.any():
        np.copyto(out, x)
    else:
        np.subtract(x, zero_point, out=out, dtype=FLOAT32)
    return out


class RightMatrix:
    """The right matrix less its zero point as floats, for products with one left matrix after the other. b: [..., K, N] or [K]."""

    def __init__(self, allocate: Allocate, b: Array, zero_point: Array | None) -> None:
        self.matrix = shifted(allocate, b, None if zero_point is None else per_column(zero_point))
        self.parts = _exact_parts(self.matrix[:, None] if b.ndim == 1 else self.matrix)


def _exact_parts(matrix: Array) -> tuple[slice, ...]:
    """Runs of rows whose products with 8-bit numbers can't add up to more than float32 counts. matrix: [..., K, N]."""
    rows = matrix.shape[-2]
    parts, start, sums = [], 0, np.zeros(())
    for row in range(0, rows, PANEL):
        own = np.add.reduce(np.absolute(matrix[..., row : row + PANEL, :]), -2)
        if row > start and np.max(sums + own, initial=0) * LARGEST > EXACT_IN_FLOAT32:
            parts.append(slice(start, row))
            start, sums = row, own
        else:
            sums = sums + own
    return (*parts, slice(start, rows))


def integer_product(allocate: Allocate, a: Array, a_zero_point: Array | None, right: RightMatrix) -> Array:
    """(a - zero_point) · right, whole numbers in float32 or float64. a: [..., M, K] or [K] -> [..., M, N], as numpy.matmul."""
    left = shifted(allocate, a, None if a_zero_point is None else per_row(a_zero_point))
    b = right.matrix
    if len(right.parts) == 1:
        return matrix_product(allocate, left, b)
    total: Array | None = None
    for part in right.parts:
        product = matrix_product(allocate, left[..., part], b[part] if b.ndim == 1 else b[..., part, :])
        total = product.astype(FLOAT64) if total is None else np.add(total, product, out=total)
    assert total is not None, "a matrix has one part at least"
    return total


def as_int32(allocate: Allocate, product: Array) -> Array:
    """Whole numbers as int32; those out of its range wrap around, as sums of int32 do."""
    out = allocate(product.shape, INT32)
    if product.dtype == FLOAT32:
        np.copyto(out, product, casting="unsafe")
    else:
        np.copyto(out, product.astype(np.int64), casting="unsafe")
    return out


def right_matrix(node: NodeContext, index: int, zero_point_index: int, transpose: bool = False) -> RightMatrix | None:
    """The right matrix where it and its zero point are constants, made once for all sessions that share them; else None.

    transpose: the constant is [N, K].

    Its floats take 4 times the memory of its integers. That buys a product per token at the speed of memory, without a conversion
    of the whole matrix before each.
    """
    if node.constant(index) is None:
        return None
    zero_point = node.constant(zero_point_index)
    if zero_point is None and node.has_input(zero_point_index):
        return None
    label = "none" if zero_point is None else f"{zero_point.dtype}:{zero_point.shape}:{sha256(zero_point.tobytes()).hexdigest()}"
    made: RightMatrix = node.prepare(
        index, f"cpu.right_matrix:{transpose}:{label}", lambda b: RightMatrix(np.empty, b.T if transpose else b, zero_point)
    )
    return made


@kernels.register("MatMulInteger", versions=(10, None))
def matmul_integer(node: NodeContext) -> Run:
    """(a - a_zero_point) · (b - b_zero_point). a: [..., M, K] or [K]; b: [..., K, N] or [K], both of 8 bits -> [..., M, N] int32.

    a_zero_point: [], [M] or [..., M, 1]; b_zero_point: [], [N] or [..., 1, N]
    """
    constant = right_matrix(node, 1, 3)
    allocate = node.provider.allocate

    def run(a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None) -> Array:
        right = constant or RightMatrix(allocate, b, b_zero_point)
        return as_int32(allocate, integer_product(allocate, a, a_zero_point, right))

    return run


@kernels.register("QLinearMatMul", versions=(10, None))
def qlinear_matmul(node: NodeContext) -> Run:
    """Product of two quantized matrices, quantized. a: [..., M, K] or [K]; b: [..., K, N] or [K] -> [..., M, N] of y_zero_point's type.

    a_scale, a_zero_point: [], [M] or [..., M, 1]; b_scale, b_zero_point: [], [N] or [..., 1, N]; y_scale, y_zero_point: [] or as a's
    """
    dtype = node.dtype(3)
    constant = right_matrix(node, 3, 5) if dtype is not None and dtype.kind in "iu" else None
    allocate = node.provider.allocate

    def run(
        a: Array, a_scale: Array, a_zero_point: Array, b: Array, b_scale: Array, b_zero_point: Array, y_scale: Array, y_zero_point: Array
    ) -> Array:
        if a.dtype.kind in "iu" and b.dtype.kind in "iu":
            product = integer_product(allocate, a, a_zero_point, constant or RightMatrix(allocate, b, b_zero_point))
        else:
            left = _widened(a, per_row(a_zero_point))
            product = matrix_product(allocate, left, _widened(b, per_column(b_zero_point)))
        scales = per_row(as_dtype(a_scale, FLOAT32)) * per_column(as_dtype(b_scale, FLOAT32))
        np.multiply(product, scales / per_row(as_dtype(y_scale, FLOAT32)), out=product)
        return saturated(allocate, product, per_row(y_zero_point), y_zero_point.dtype)

    return run


def _widened(x: Array, zero_point: Array) -> Array:
    """Floats of 8 bits less their zero point, in float32."""
    return np.subtract(as_dtype(x, FLOAT32), as_dtype(zero_point, FLOAT32), out=...)
