"""Pools: the largest or the mean of what a window sees."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort_cuda.element_types import BYTES, FLOATS, compute_dtype
from miniort_cuda.namespace import array_namespace
from miniort_cuda.windows import Window, padded, window_of, windows

kernels = KernelTable("cuda")


def _refuse_indices(node: NodeView) -> str | None:
    if len(node.outputs) > 1 and node.outputs[1] is not None:
        return "its kernel gives no indices"
    return None


@kernels.register("MaxPool", (8, None), types={"T": FLOATS | BYTES}, refuse=_refuse_indices)
def max_pool(node: NodeContext) -> Run:
    """The largest element that each window sees. x: [N, C, *sizes] -> [N, C, *counts]."""
    xp = array_namespace(node)
    window = window_of(node, node.attribute("kernel_shape"))

    def run(x: Any) -> Any:
        least = -np.inf if x.dtype.kind == "f" else int(np.iinfo(x.dtype).min)
        seen = _seen(xp, x, window, least)
        return seen.max(axis=tuple(range(x.ndim, seen.ndim)))

    return run


def _seen(xp: Any, x: Any, window: Window, value: float) -> Any:
    """[N, C, *counts, *kernel], padding being `value`."""
    placed = window.place(x.shape[2:])
    totals = window.reach(x.shape[2:], placed)
    return windows(xp, padded(xp, x, placed.begins, totals, value), window, placed.counts)


@kernels.register("AveragePool", (7, None), types={"T": FLOATS})
def average_pool(node: NodeContext) -> Run:
    """The mean of what each window sees, with the padding if `count_include_pad`. x: [N, C, *sizes] -> [N, C, *counts]."""
    xp, with_padding = array_namespace(node), bool(node.attribute("count_include_pad", 0))
    window = window_of(node, node.attribute("kernel_shape"))

    def run(x: Any) -> Any:
        wide = x.astype(compute_dtype(x.dtype), copy=False)
        seen = _seen(xp, wide, window, 0)
        total = seen.sum(axis=tuple(range(x.ndim, seen.ndim)))
        for axis, count in enumerate(_counts(xp, window, x.shape[2:], with_padding)):
            total = total / count.astype(total.dtype).reshape((-1,) + (1,) * (x.ndim - 3 - axis))
        return total.astype(x.dtype, copy=False)

    return run


def _counts(xp: Any, window: Window, sizes: tuple[int, ...], with_padding: bool) -> list[Any]:
    """For each axis, how many of the elements that each of its windows sees count: [counts] int64 each."""
    placed = window.place(sizes)
    found = []
    for axis, size in enumerate(sizes):
        first = xp.arange(placed.counts[axis]).reshape(-1, 1) * window.strides[axis] - placed.begins[axis]
        place = first + xp.arange(window.kernel[axis]) * window.dilations[axis]
        low, high = (-placed.begins[axis], size + placed.ends[axis]) if with_padding else (0, size)
        found.append(xp.logical_and(place >= low, place < high).sum(axis=1))
    return found


@kernels.register("GlobalAveragePool", (1, None), types={"T": FLOATS})
@kernels.register("GlobalMaxPool", (1, None), types={"T": FLOATS})
def global_pool(node: NodeContext) -> Run:
    """The mean (largest) of all elements of each channel. x: [N, C, *sizes] -> [N, C, 1, ...]."""
    largest = node.op == "GlobalMaxPool"

    def run(x: Any) -> Any:
        rows = x.reshape((*x.shape[:2], prod(x.shape[2:])))
        y = rows.max(axis=2) if largest else rows.mean(axis=2, dtype=compute_dtype(x.dtype)).astype(x.dtype, copy=False)
        return y.reshape((*x.shape[:2], *(1,) * (x.ndim - 2)))

    return run
