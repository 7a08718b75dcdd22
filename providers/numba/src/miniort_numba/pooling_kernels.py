"""Pools of rows and of images in float32: MaxPool, AveragePool and GlobalAveragePool."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort.windows import SlidingWindow
from miniort_numba.kernels import FLOAT32, NO_VECTOR, crew_of
from miniort_numba.windows import Layout, layout_of, window_of

KERNELS = KernelTable("numba")


def _refuse_pool(node: NodeView) -> str | None:
    if len(node.attribute("kernel_shape")) > 2:
        return "it pools rows and images only"
    if len(node.outputs) > 1 and node.outputs[1] is not None:
        return "it doesn't say where the largest is"
    return None


@KERNELS.register("MaxPool", types={"T": [FLOAT32]}, refuse=_refuse_pool)
def max_pool(node: NodeContext) -> Run:
    """The largest of what each window sees, NaN if there's one. x: [N, C, *sizes] -> [N, C, *counts]."""
    from miniort_numba.compiled.pooling import LARGEST

    return _pool(node, LARGEST, False)


@KERNELS.register("AveragePool", types={"T": [FLOAT32]}, refuse=_refuse_pool)
def average_pool(node: NodeContext) -> Run:
    """The mean of what each window sees; its padding counts as zeros with `count_include_pad`, what lies past that never.

    x: [N, C, *sizes] -> [N, C, *counts]
    """
    from miniort_numba.compiled.pooling import MEAN

    return _pool(node, MEAN, True)


def _pool(node: NodeContext, part: int, by_mean: bool) -> Run:
    from miniort_numba.compiled.pooling import pool

    board, helpers = crew_of(node)
    allocate, window = node.provider.allocate, window_of(node, node.attribute("kernel_shape"))
    with_padding = bool(node.attribute("count_include_pad", 0))

    @lru_cache(maxsize=64)
    def planned(sizes: tuple[int, ...]) -> tuple[Layout, tuple[int, ...], Array]:
        height, width = (1, *sizes) if len(sizes) == 1 else sizes
        layout = layout_of(window, (height, width))
        counts = _window_counts(window, (height, width), with_padding) if by_mean else NO_VECTOR
        return layout, layout.counts[2 - len(sizes) :], counts

    def run(x: Array) -> Array:
        layout, result, counts = planned(x.shape[2:])
        y: Array = allocate((*x.shape[:2], *result), FLOAT32)
        if y.size:
            channels = x.shape[0] * x.shape[1]
            pool(board, helpers, part, layout.words, np.ascontiguousarray(x).reshape(channels, -1), counts, y.reshape(channels, -1))
        return y

    return run


def _window_counts(window: SlidingWindow, sizes: tuple[int, int], with_padding: bool) -> Array:
    """How many elements each window averages over. -> [windows]."""
    placed = window.place(sizes)
    counts, begins, ends = placed.counts, placed.begins, placed.ends
    per_axis = []
    for axis in range(2):
        begin, end = (begins[axis], ends[axis]) if with_padding else (0, 0)
        at = (
            np.arange(counts[axis])[:, None] * window.strides[axis] + np.arange(window.kernel[axis]) * window.dilations[axis] - begins[axis]
        )
        per_axis.append(((at >= -begin) & (at < sizes[axis] + end)).sum(axis=1))
    return (per_axis[0][:, None] * per_axis[1]).astype(np.float32).reshape(-1)  # type: ignore[no-any-return]


@KERNELS.register("GlobalAveragePool", types={"T": [FLOAT32]})
def global_average_pool(node: NodeContext) -> Run:
    """The mean over all spatial axes. x: [N, C, *sizes] -> [N, C, 1...]."""
    from miniort_numba.compiled.pooling import WHOLE_MEAN, mean_of_rows

    board, helpers = crew_of(node)
    allocate = node.provider.allocate

    def run(x: Array) -> Array:
        channels = x.shape[0] * x.shape[1]
        y: Array = allocate((*x.shape[:2], *(1,) * (x.ndim - 2)), FLOAT32)
        if y.size:
            rows = np.ascontiguousarray(x).reshape(channels, prod(x.shape[2:]))
            mean_of_rows(board, helpers, WHOLE_MEAN, rows, y.reshape(channels))
        return y

    return run
