"""Numbers of 8 bits: DynamicQuantizeLinear and MatMulInteger."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_numba.kernels import FLOAT32, crew_of

KERNELS = KernelTable("numba")

UINT8, INT32 = np.dtype(np.uint8), np.dtype(np.int32)


@KERNELS.register("DynamicQuantizeLinear", versions=(11, None))
def dynamic_quantize_linear(node: NodeContext) -> Run:
    """x in uint8, with the scale and the zero point that spread its range, and 0, over all of uint8.

    x: [...] float32 -> same shape, [] float32, [] uint8. Where x has no value but 0, or none at all, the scale is 1, as in onnxruntime.
    """
    from miniort_numba.compiled.integers import QUANTIZE, RANGE, find_range, quantize

    board, helpers = crew_of(node)
    allocate = node.provider.allocate

    def run(x: Array) -> tuple[Array, Array, Array]:
        flat = np.ascontiguousarray(x).reshape(-1)
        low, high = (np.float32(each) for each in find_range(board, helpers, RANGE, flat))
        scale = np.float32(1) if high == low else (high - low) / np.float32(255)
        zero = np.rint(np.fmax(np.minimum(-low / scale, np.float32(255)), np.float32(0)))
        y: Array = allocate(x.shape, UINT8)
        quantize(board, helpers, QUANTIZE, flat, np.array([scale, zero], FLOAT32), y.reshape(-1))
        return y, np.array(scale), np.array(zero, UINT8)

    return run


def _refuse_product(node: NodeView) -> str | None:
    for index in (0, 1):
        info = node.inputs[index]
        if info is None or info.shape is None or len(info.shape) != 2:
            return "it multiplies two matrices only"
    for index in (2, 3):
        info = node.inputs[index] if node.has_input(index) else None
        if info is not None and (info.shape is None or any(size != 1 for size in info.shape)):
            return "it takes one zero point for a matrix only"
    return None


@KERNELS.register("MatMulInteger", versions=(10, None), refuse=_refuse_product)
def matmul_integer(node: NodeContext) -> Run:
    """(a - a_zero_point) · (b - b_zero_point). a: [M, K]; b: [K, N], both of 8 bits; the zero points: one number -> [M, N] int32."""
    from miniort_numba.compiled.integers import PRODUCTS, multiply
    from miniort_numba.compiled.tiles import HAS_BYTE_DOTS

    board, helpers = crew_of(node)
    allocate, as_floats = node.provider.allocate, to_floats(node)
    by_dots = _product_by_dots(node) if HAS_BYTE_DOTS and node.constant(1) is not None else None

    def run(a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None) -> Array:
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"can't multiply {a.shape} and {b.shape}: the second has to have as many rows as the first has columns")
        y: Array = allocate((a.shape[0], b.shape[1]), INT32)
        if by_dots is not None and y.size and a.size:
            by_dots(a, a_zero_point, b_zero_point, y)
        elif y.size:
            left, zero = as_floats(a, a_zero_point), zero_of(b_zero_point)
            multiply(board, helpers, PRODUCTS, left, np.ascontiguousarray(b).view(UINT8), b.dtype != UINT8, zero, y)
        return y

    return run


def _product_by_dots(node: NodeContext) -> Run:
    """f(a, a_zero_point, b_zero_point, y) writes the product of a and the constant b into y, by the processor's own products of bytes.

    With u = a's numbers without a sign and s = b's with one, both less zero points p and q that are shifted alike, a row and a column give
    Σ (u - p)(s - q) = Σ u s - p Σ s - q Σ u + K p q.
    """
    from miniort_numba.compiled.byte_dots import FOUR, PRODUCTS, multiply, pack

    board, helpers = crew_of(node)
    unsigned = node.dtype(1) == UINT8
    panels, column_sums = node.prepare(1, "numba.bytes_in_panels", lambda b: pack(_other_sign(b) if unsigned else b))

    def run(a: Array, a_zero_point: Array | None, b_zero_point: Array | None, y: Array) -> None:
        rows, inner = a.shape
        p, q = (0 if each is None else int(each.reshape(())) for each in (a_zero_point, b_zero_point))
        if a.dtype != UINT8:
            a, p = _other_sign(a), p + 128
        if unsigned:
            q -= 128
        if inner % FOUR:
            left = np.zeros((rows, -(-inner // FOUR) * FOUR), UINT8)
            left[:, :inner] = a
        else:
            left = np.ascontiguousarray(a)
        row_terms = (inner * p - a.sum(axis=1, dtype=np.int64)) * q if q else np.zeros(rows, np.int64)
        multiply(board, helpers, PRODUCTS, left, panels, (-p * column_sums).astype(INT32), row_terms.astype(INT32), y)

    return run


def _other_sign(x: Array) -> Array:
    """Numbers of 8 bits less 128, with a sign if they had none, and plus 128 without one if they had."""
    return (x.view(UINT8) ^ UINT8.type(128)).view(np.int8 if x.dtype == UINT8 else UINT8)


def zero_of(zero_point: Array | None) -> Array:
    """A zero point as compiled functions take it. -> [1] float32."""
    return np.zeros(1, FLOAT32) if zero_point is None else zero_point.astype(FLOAT32).reshape(1)


def to_floats(node: NodeContext) -> Run:
    """f(x, zero_point) -> x - zero_point. x: [...] of 8 bits; zero_point: of one element, or None -> same shape, float32."""
    from miniort_numba.compiled.integers import WIDEN, widen

    board, helpers = crew_of(node)
    allocate = node.provider.allocate

    def run(x: Array, zero_point: Array | None) -> Array:
        y: Array = allocate(x.shape, FLOAT32)
        flat = np.ascontiguousarray(x).view(UINT8).reshape(-1)
        widen(board, helpers, WIDEN, flat, x.dtype != UINT8, zero_of(zero_point), y.reshape(-1))
        return y

    return run
