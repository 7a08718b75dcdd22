"""Arrays that are made from nothing but their size: ConstantOfShape, Range. Sizes and bounds are host arrays."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array, type_string
from miniort_cuda.bfloat16 import rounded
from miniort_cuda.element_types import ALL, BFLOAT16, NUMBERS
from miniort_cuda.namespace import array_namespace

kernels = KernelTable("cuda")

ZERO = np.zeros(1, np.float32)


def _refuse_fill(node: NodeView) -> str | None:
    dtype = node.attribute("value", ZERO).dtype
    return None if dtype in ALL else f"it has no arrays of {type_string(dtype)}"


@kernels.register("ConstantOfShape", (9, None), host_inputs=(0,), refuse=_refuse_fill)
def constant_of_shape(node: NodeContext) -> Run:
    """One value in every place. shape: [rank] int64 -> that shape, of the type of `value`."""
    xp, value = array_namespace(node), node.attribute("value", ZERO)
    number = value.reshape(-1)[0].item()

    def run(shape: Array) -> Any:
        sizes = tuple(shape.tolist())
        if value.dtype == BFLOAT16:
            return rounded(xp, xp.full(sizes, number, np.float32))
        return xp.full(sizes, number, value.dtype)

    return run


@kernels.register("Range", (11, None), types={"T": NUMBERS - {BFLOAT16}}, host_inputs=(0, 1, 2))
def range_(node: NodeContext) -> Run:
    """start, start + delta, ..., as long as they lie before limit. start, limit, delta: [] -> [max(⌈(limit - start) / delta⌉, 0)]."""
    xp = array_namespace(node)

    def run(start: Array, limit: Array, delta: Array) -> Any:
        first, last, step = (each.reshape(-1)[0].item() for each in (start, limit, delta))
        count = max(-(-(last - first) // step) if start.dtype.kind in "iu" else ceil((last - first) / step), 0)
        return (first + step * xp.arange(int(count))).astype(start.dtype, copy=False)

    return run
