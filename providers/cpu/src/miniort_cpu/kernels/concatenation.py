"""Joining tensors along an axis, and cutting them up again: Concat, Split, Tile."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.pool import SMALLEST
from miniort.types import Array
from miniort_cpu.axes import as_ints, normalize_axis

kernels = KernelTable("cpu")


@kernels.register("Concat", versions=(4, None))
def concat(node: NodeContext) -> Run:
    """Inputs one after the other. Each: the same shape but for the axis -> their sizes along the axis added up."""
    axis = node.attribute("axis")
    allocate = node.provider.allocate

    def run(*xs: Array) -> Array:
        if sum([x.nbytes for x in xs]) < SMALLEST:
            return np.concatenate(xs, axis)
        shape = list(xs[0].shape)
        shape[axis] = sum([x.shape[axis] for x in xs])
        return np.concatenate(xs, axis, allocate(shape, xs[0].dtype))

    return run


@kernels.register("Split", versions=(13, None), view_of=0)
@kernels.register("Split", versions=(2, 12), view_of=0)
def split(node: NodeContext) -> Run:
    """Parts along an axis: of the sizes given (an attribute until version 11, an input from 13), or equal, the last one smaller.

    x: [..., N, ...] -> for each output [..., size, ...], views of x
    """
    axis, count = node.attribute("axis", 0), node.attribute("num_outputs", len(node.outputs))
    sizes: tuple[int, ...] | None = node.attribute("split", None) if node.version < 13 else as_ints(node.constant(1))

    def run(x: Array, split: Array | None = None) -> tuple[Array, ...]:
        length, before = x.shape[axis], (slice(None),) * normalize_axis(axis, x.ndim)
        lengths = sizes or as_ints(split) or equal_sizes(length, count)
        if sum(lengths) != length:
            raise ValueError(f"the parts of a Split must add up to the size of its axis: {list(lengths)} for {length}")
        parts, start = [], 0
        for size in lengths:
            parts.append(x[(*before, slice(start, start + size))])
            start += size
        return tuple(parts)

    return run


def equal_sizes(length: int, count: int) -> tuple[int, ...]:
    """Sizes of `count` parts of `length`: equal, but the last one smaller where it doesn't divide evenly."""
    size = -(-length // count)
    return (*(size,) * (count - 1), length - size * (count - 1))


@kernels.register("Tile", versions=(6, None))
def tile(node: NodeContext) -> Run:
    """`x` repeated along every axis. x: [d0, ...]; repeats: [rank of x] int64 -> [d0 · repeats0, ...]."""

    def run(x: Array, repeats: Array) -> Array:
        return np.tile(x, repeats.tolist())

    return run
