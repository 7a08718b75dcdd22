"""Matrix products of com.microsoft that do one thing more: FusedMatMul, TransposeMatMul, FusedGemm, CDist."""

from __future__ import annotations

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.kernels.contrib_activation import CONTRIB, fused_activation
from miniort_cpu.kernels.matrix import gemm, matrix_product, widened_constant

kernels = KernelTable("cpu")


def _transposed(x: Array, batch: bool, matrix: bool) -> Array:
    """A view. batch: [M, batch..., K] -> [batch..., M, K]; matrix: [..., M, K] -> [..., K, M]. A vector stays as it is."""
    if x.ndim < 2:
        return x
    if batch:
        x = np.moveaxis(x, 0, -2)
    return x.swapaxes(-1, -2) if matrix else x


@kernels.register("TransposeMatMul", domain=CONTRIB)
@kernels.register("FusedMatMul", domain=CONTRIB)
def fused_matmul(node: NodeContext) -> Run:
    """`alpha` · a · b, each transposed as its attributes say. a: [..., M, K] or [K]; b: [..., K, N] or [K] -> [..., M, N]."""
    alpha = node.attribute("alpha", 1.0)
    transpose_a = bool(node.attribute("transBatchA", 0)), bool(node.attribute("transA", 0))
    transpose_b = bool(node.attribute("transBatchB", 0)), bool(node.attribute("transB", 0))
    left, right = widened_constant(node, 0), widened_constant(node, 1)
    allocate = node.provider.allocate

    def run(a: Array, b: Array) -> Array:
        wide_a = _transposed(widen(a) if left is None else left, *transpose_a)
        wide_b = _transposed(widen(b) if right is None else right, *transpose_b)
        y = matrix_product(allocate, wide_a, wide_b)
        if alpha != 1.0:
            y = np.multiply(y, alpha, out=y)
        return as_dtype(y, a.dtype)

    return run


@kernels.register("FusedGemm", domain=CONTRIB)
def fused_gemm(node: NodeContext) -> Run:
    """An activation of Gemm. a: [M, K], b: [K, N], each transposed if its attribute says so; c: broadcasts to [M, N] -> [M, N]."""
    activate = fused_activation(node, node.attribute("activation_alpha", None), node.attribute("activation_beta", None))
    product = gemm(node)
    if activate is None:
        return product

    def run(a: Array, b: Array, c: Array | None = None) -> Array:
        y: Array = product(a, b, c)
        wide = widen(y)
        activate(wide)
        return as_dtype(wide, y.dtype)

    return run


@kernels.register("CDist", domain=CONTRIB)
def distances(node: NodeContext) -> Run:
    """Distances of all rows of a from all rows of b. a: [M, N]; b: [K, N] -> [M, K].

    |a - b|² = |a|² - 2 a·b + |b|², which is one matrix product; metric "euclidean" is its root.
    """
    metric = node.attribute("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        raise KernelError(f"node {node.name!r} (CDist): its metric must be euclidean or sqeuclidean, found {metric!r}")
    allocate = node.provider.allocate

    def run(a: Array, b: Array) -> Array:
        y = matrix_product(allocate, a, b.T)
        np.multiply(y, -2, out=y)
        np.add(y, np.vecdot(a, a)[:, None], out=y)
        np.add(y, np.vecdot(b, b), out=y)
        np.maximum(y, 0, out=y)
        return np.sqrt(y, out=y) if metric == "euclidean" else y

    return run
