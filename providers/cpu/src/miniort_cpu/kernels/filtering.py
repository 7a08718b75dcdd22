"""Keeping some elements or slices of a tensor: those that a condition holds for (Compress), or one of each kind (Unique)."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, IntArray
from miniort_cpu.axes import normalize_axis
from miniort_cpu.floating_point import widen

kernels = KernelTable("cpu")


@kernels.register("Compress", versions=(9, None))
def compress(node: NodeContext) -> Run:
    """The slices along an axis for which a condition holds, or without an axis the elements of all of x in row-major order.

    x: [..., N, ...]; condition: [at most N] bool -> [..., number that hold, ...], or [number that hold]
    """
    axis: int | None = node.attribute("axis", None)
    return lambda x, condition: np.compress(condition, x, axis)


@kernels.register("Unique", versions=(11, None))
def unique(node: NodeContext) -> Run:
    """The different slices of x along an axis, or its different elements, sorted, or as they come first. All NaNs count as one.

    x: [..., N, ...] -> values [..., U, ...] (or [U]), place of each one's first [U], number of each of x's in the values [N], counts [U]
    """
    axis: int | None = node.attribute("axis", None)
    in_order = bool(node.attribute("sorted", 1))

    def run(x: Array) -> tuple[Array, IntArray, IntArray, IntArray]:
        place = 0 if axis is None else normalize_axis(axis, x.ndim)
        items = x.reshape(-1) if axis is None else x
        first, inverse, counts = unique_slices(items, place)
        if not in_order:
            order = np.argsort(first)
            rank = np.empty_like(order)
            rank[order] = np.arange(order.size)
            first, inverse, counts = first[order], rank[inverse], counts[order]
        return items.take(first, place), first, inverse, counts

    return run


def unique_slices(x: Array, axis: int) -> tuple[IntArray, IntArray, IntArray]:
    """Of the different slices of x along an axis, in ascending order: where each is first [U], which one each of x's is [N], counts [U]."""
    _, codes = np.unique(widen(x), return_inverse=True)  # every element as its rank, so any type can be sorted by slices
    rows = np.moveaxis(codes.reshape(x.shape), axis, 0).reshape(x.shape[axis], -1 if x.size else 0)
    if rows.shape[1] == 1:
        _, first, inverse, counts = np.unique(rows[:, 0], return_index=True, return_inverse=True, return_counts=True)
    elif rows.shape[1] == 0:  # slices without elements are all the same
        count = rows.shape[0]
        first, counts = np.zeros(min(count, 1), np.int64), np.full(min(count, 1), count)
        inverse = np.zeros(count, np.int64)
    else:
        _, first, inverse, counts = np.unique(rows, return_index=True, return_inverse=True, return_counts=True, axis=0)
    return first.astype(np.int64), inverse.reshape(-1).astype(np.int64), counts.astype(np.int64)
