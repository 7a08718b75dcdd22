"""Which elements are largest or smallest: ArgMax, ArgMin, TopK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import normalize_axis
from miniort_cpu.floating_point import widen

kernels = KernelTable("cpu")


def _extreme(find: Callable[..., Any]) -> CompileKernel:
    """A kernel for the index of an extreme along an axis, the first of equal ones, or with `select_last_index` the last.

    x: [..., N, ...] -> [..., 1, ...] int64, or without that axis if not `keepdims`
    """

    def compile_extreme(node: NodeContext) -> Run:
        axis, keepdims = node.attribute("axis", 0), bool(node.attribute("keepdims", 1))
        last = bool(node.attribute("select_last_index", 0))

        def run(x: Array) -> Array:
            wide = widen(x)
            if last:
                found = x.shape[axis] - 1 - find(np.flip(wide, axis), axis=axis, keepdims=keepdims)
            else:
                found = find(wide, axis=axis, keepdims=keepdims)
            return np.asarray(found, np.int64)

        return run

    return compile_extreme


kernels.register("ArgMax", versions=(1, None))(_extreme(np.argmax))
kernels.register("ArgMin", versions=(1, None))(_extreme(np.argmin))


@kernels.register("TopK", versions=(1, None))
def top_k(node: NodeContext) -> Run:
    """The k largest (or smallest) elements along an axis, best first, and where they are; of equal ones the first comes first.

    x: [..., N, ...]; k: [1] int64, an attribute until version 9 -> values, indices (int64): [..., k, ...]
    """
    axis, largest = node.attribute("axis", -1), bool(node.attribute("largest", 1))
    fixed: int | None = node.attribute("k") if node.version < 10 else None

    def run(x: Array, k: Array | None = None) -> tuple[Array, Array]:
        count = int(k.item()) if k is not None else fixed or 0
        length = x.shape[axis]
        if not 0 <= count <= length:
            raise ValueError(f"TopK's k must lie in [0, {length}], the size of the axis; found {count}")
        rows = np.moveaxis(x, axis, -1)
        order = top_indices(widen(rows), count, largest)
        place = normalize_axis(axis, x.ndim)
        values = np.take_along_axis(rows, order, -1)
        return np.ascontiguousarray(np.moveaxis(values, -1, place)), np.ascontiguousarray(np.moveaxis(order, -1, place))

    return run


FEW = 8
"""TopK looks for the k-th element first, rather than sort all of them, where k is less than 1/FEW of them."""


def top_indices(rows: Array, count: int, largest: bool) -> Array:
    """The indices of the best of each row, best first, the first of equal ones first. rows: [..., N] -> [..., count] int64."""
    if 0 < count * FEW < rows.shape[-1]:
        chosen = _chosen(rows, count, largest)
        if chosen is not None:
            order = _sorted_indices(np.take_along_axis(rows, chosen, -1), largest)
            return np.take_along_axis(chosen, order, -1)
    return _sorted_indices(rows, largest)[..., :count]


def _sorted_indices(rows: Array, largest: bool) -> Array:
    """Indices of each row sorted. A stable sort keeps equal elements in order; from the largest down it has to see them backwards."""
    if not largest:
        return np.argsort(rows, -1, kind="stable")
    backwards = np.argsort(rows[..., ::-1], -1, kind="stable")[..., ::-1]
    return rows.shape[-1] - 1 - backwards  # type: ignore[no-any-return]


def _chosen(rows: Array, count: int, largest: bool) -> Array | None:
    """The indices of the best of each row, in ascending order; None where a NaN spoils comparing. rows: [..., N] -> [..., count]."""
    length = rows.shape[-1]
    place = length - count if largest else count - 1
    limit = np.partition(rows, place, -1)[..., place : place + 1]  # the count-th best: [..., 1]
    better = rows > limit if largest else rows < limit
    equal = rows == limit
    wanted = count - np.count_nonzero(better, -1, keepdims=True)
    chosen = better | (equal & (np.cumsum(equal, -1) <= wanted))
    if not np.array_equal(np.count_nonzero(chosen, -1), np.full(rows.shape[:-1], count)):
        return None
    return np.nonzero(chosen)[-1].reshape(*rows.shape[:-1], count)
