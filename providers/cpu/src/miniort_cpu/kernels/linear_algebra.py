"""Properties of square matrices: Det, and Inverse of com.microsoft."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import as_dtype, widen

kernels = KernelTable("cpu")


@kernels.register("Det", versions=(11, None))
def determinant(node: NodeContext) -> Run:
    """Determinants of square matrices, by LU decomposition. x: [..., M, M] -> [...], of 1 where M is 0."""

    def run(x: Array) -> Array:
        return np.asarray(np.linalg.det(widen(x))).astype(x.dtype)

    return run


@kernels.register("Inverse", domain="com.microsoft")
def inverse(node: NodeContext) -> Run:
    """Inverses of square matrices. x: [..., M, M] -> same shape. LinAlgError if one has no inverse."""

    def run(x: Array) -> Array:
        return as_dtype(np.linalg.inv(widen(x)), x.dtype)

    return run
