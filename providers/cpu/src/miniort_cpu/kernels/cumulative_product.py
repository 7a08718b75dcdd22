"""The running product along an axis: CumProd."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import normalize_axis
from miniort_cpu.floating_point import as_dtype, widen

kernels = KernelTable("cpu")


@kernels.register("CumProd", versions=(26, None))
def cumulative_product(node: NodeContext) -> Run:
    """y[i] = x[0] · … · x[i] along an axis; `exclusive` leaves x[i] out, `reverse` counts from the end.

    x: [...]; axis: [] -> same shape
    """
    exclusive, backward = bool(node.attribute("exclusive", 0)), bool(node.attribute("reverse", 0))
    allocate = node.provider.allocate

    def run(x: Array, axis: Array) -> Array:
        place = normalize_axis(int(axis.item()), x.ndim)
        before = (slice(None),) * place
        direction = (*before, slice(None, None, -1 if backward else 1))
        wide = widen(x)[direction]
        y: Array = allocate(x.shape, wide.dtype)
        if exclusive:
            y[(*before, slice(None, 1))] = 1
            first, rest = (*before, slice(None, -1)), (*before, slice(1, None))
            np.multiply.accumulate(wide[first], place, wide.dtype, y[rest])
        else:
            np.multiply.accumulate(wide, place, wide.dtype, y)
        return as_dtype(y[direction], x.dtype)

    return run
