"""Products of matrices."""

from __future__ import annotations

from typing import Any

from miniort.kernels import KernelTable, NodeContext, Run
from miniort_cuda.element_types import FLOATS
from miniort_cuda.products import product_of

kernels = KernelTable("cuda")


@kernels.register("MatMul", (1, None), types={"T": FLOATS})
def matmul(node: NodeContext) -> Run:
    """a: [..., M, K], b: [..., K, N] -> [..., M, N]; leading axes broadcast, and a vector's missing axis is left out of the result."""
    return product_of(node)


@kernels.register("Gemm", (7, None), types={"T": FLOATS})
def gemm(node: NodeContext) -> Run:
    """General product alpha · a · b + beta · c. a: [M, K] or transposed, b: [K, N] or transposed, c: broadcasts to [M, N] -> [M, N]."""
    product = product_of(node)
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    transpose_a, transpose_b = bool(node.attribute("transA", 0)), bool(node.attribute("transB", 0))

    def run(a: Any, b: Any, c: Any = None) -> Any:
        y = product(a.T if transpose_a else a, b.T if transpose_b else b)
        if alpha != 1:
            y *= alpha
        if c is not None and beta != 0:
            y += c if beta == 1 else beta * c
        return y

    return run
