"""Comparisons and tests of values: booleans from any type, with NumPy's broadcasting (opset 7 and later)."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.ufuncs import binary, unary

kernels = KernelTable("cpu")

BOOL = np.dtype(np.bool_)

kernels.register("Equal", versions=(7, None))(binary(np.equal, BOOL))
kernels.register("Less", versions=(7, None))(binary(np.less, BOOL))
kernels.register("LessOrEqual", versions=(12, None))(binary(np.less_equal, BOOL))
kernels.register("Greater", versions=(7, None))(binary(np.greater, BOOL))
kernels.register("GreaterOrEqual", versions=(12, None))(binary(np.greater_equal, BOOL))
kernels.register("IsNaN", versions=(9, None))(unary(np.isnan, BOOL))


@kernels.register("IsInf", versions=(10, None))
def is_infinite(node: NodeContext) -> Run:
    """Whether x is an infinity of a sign that the attributes ask for. x: [...] float -> same shape, bool."""
    positive, negative = node.attribute("detect_positive", 1), node.attribute("detect_negative", 1)
    if positive and negative:
        return unary(np.isinf, BOOL)(node)

    def run(x: Array) -> Array:
        found: Array = np.isinf(x, out=...)
        if positive:
            np.logical_and(found, x > x.dtype.type(0), out=found)
        elif negative:
            np.logical_and(found, x < x.dtype.type(0), out=found)
        else:
            found.fill(False)
        return found

    return run
