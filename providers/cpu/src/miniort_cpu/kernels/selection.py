"""Choosing between values, by a condition or by place: Where, Trilu."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.pool import SMALLEST
from miniort.types import STRING, Array
from miniort_cpu.buffers import copied

kernels = KernelTable("cpu")


@kernels.register("Where", versions=(9, None))
def where(node: NodeContext) -> Run:
    """`x` where the condition holds, else y. condition: bool; all three of any shapes that broadcast -> their common shape."""
    allocate = node.provider.allocate

    def run(condition: Array, x: Array, y: Array) -> Array:
        if condition.nbytes < SMALLEST and x.nbytes < SMALLEST and y.nbytes < SMALLEST:
            return np.where(condition, x, y)
        out: Array = allocate(np.broadcast(condition, x, y).shape, x.dtype)
        np.copyto(out, y)
        np.copyto(out, x, where=condition)
        return out

    return run


@kernels.register("Trilu", versions=(14, None))
def trilu(node: NodeContext) -> Run:
    """The triangle of the last two axes that lies on and above (`upper`), or on and below diagonal k, the rest zero.

    x: [..., M, N]; k: [] int64, 0 if absent -> same shape
    """
    upper = bool(node.attribute("upper", 1))
    allocate = node.provider.allocate

    def run(x: Array, k: Array | None = None) -> Array:
        rows, columns = x.shape[-2:]
        diagonal = 0 if k is None else int(k.item())
        below = np.tri(rows, columns, diagonal - 1 if upper else diagonal, np.bool_)
        out = copied(allocate, x)
        np.copyto(out, "" if x.dtype == STRING else np.zeros((), x.dtype), where=below if upper else ~below)
        return out

    return run
