"""Matrix products: MatMul, Gemm."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import NARROW_FLOATS, as_dtype, widen

kernels = KernelTable("cpu")


def matrix_product(allocate: Allocate, a: Array, b: Array) -> Array:
    """`a` · b over the last two axes, as numpy.matmul. a: [..., M, K] or [K]; b: [..., K, N] or [K] -> [..., M, N]."""
    if b.ndim == 2 and a.ndim >= 2 and a.size:
        inner, columns = b.shape
        out = allocate((*a.shape[:-1], columns), a.dtype)
        if a.ndim == 2:
            return a.dot(b, out)
        a.reshape(-1, inner).dot(b, out.reshape(-1, columns))  # one product of all rows, where matmul would make one per batch
        return out
    if a.ndim < 2 or b.ndim < 2:
        return np.matmul(a, b, out=...)  # type: ignore[no-any-return]
    batch = a.shape[:-2] if a.shape[:-2] == b.shape[:-2] else np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return np.matmul(a, b, allocate((*batch, a.shape[-2], b.shape[-1]), a.dtype))


def widened_constant(node: NodeContext, index: int) -> Array | None:
    """The constant input `index` in the type to compute in, converted once for all sessions; None where it's no constant."""
    weight = node.constant(index)
    if weight is None or weight.dtype not in NARROW_FLOATS:
        return weight
    prepared: Array = node.prepare(index, "cpu.float32", widen)
    return prepared


@kernels.register("MatMul", versions=(1, None))
def matmul(node: NodeContext) -> Run:
    """`a` · b. a: [..., M, K] or [K]; b: [..., K, N] or [K] -> [..., M, N]; narrow floats are summed up in float32."""
    allocate = node.provider.allocate
    left, right = widened_constant(node, 0), widened_constant(node, 1)

    def run(a: Array, b: Array) -> Array:
        if a.dtype not in NARROW_FLOATS:
            return matrix_product(allocate, a, b)
        wide_a = widen(a) if left is None else left
        wide_b = widen(b) if right is None else right
        return matrix_product(allocate, wide_a, wide_b).astype(a.dtype)

    return run


@kernels.register("Gemm", versions=(7, None))
def gemm(node: NodeContext) -> Run:
    """`alpha` · a · b + beta · c. a: [M, K], b: [K, N], each transposed if its attribute says so; c: broadcasts to [M, N] -> [M, N]."""
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    transpose_a, transpose_b = node.attribute("transA", 0), node.attribute("transB", 0)
    left, right = widened_constant(node, 0), widened_constant(node, 1)
    allocate = node.provider.allocate

    def run(a: Array, b: Array, c: Array | None = None) -> Array:
        dtype = a.dtype
        if dtype in NARROW_FLOATS:
            a = widen(a) if left is None else left
            b = widen(b) if right is None else right
        if transpose_a:
            a = a.T
        if transpose_b:
            b = b.T
        y = a.dot(b, allocate((a.shape[0], b.shape[1]), a.dtype))
        if alpha != 1.0:
            np.multiply(y, alpha, out=y, casting="unsafe")
        if c is not None:
            np.add(y, c if beta == 1.0 else as_dtype(widen(c) * beta, y.dtype), out=y)
        return as_dtype(y, dtype)

    return run
