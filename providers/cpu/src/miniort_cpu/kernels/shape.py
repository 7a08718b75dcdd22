"""Ops on shapes: those that say what a tensor's shape is, and those that give its elements another one."""

from __future__ import annotations

from math import prod

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.pool import SMALLEST
from miniort.types import Array
from miniort_cpu.axes import as_ints, normalize_axes
from miniort_cpu.buffers import Allocate, copied

kernels = KernelTable("cpu")


@kernels.register("Identity", versions=(1, None), view_of=0)
def identity(node: NodeContext) -> Run:
    """The input itself, of whatever kind."""
    return lambda x: x


@kernels.register("Shape", versions=(1, None), metadata_inputs=(0,))
def shape(node: NodeContext) -> Run:
    """The sizes of the axes from `start` to before `end`. x: [...] -> [number of axes] int64."""
    start, end = node.attribute("start", 0), node.attribute("end", None)
    int64 = np.int64
    if start == 0 and end is None:
        return lambda x: np.array(x.shape, int64)
    return lambda x: np.array(x.shape[start:end], int64)


@kernels.register("Size", versions=(1, None), metadata_inputs=(0,))
def size(node: NodeContext) -> Run:
    """The number of elements. x: [...] -> [] int64."""
    return lambda x: np.array(prod(x.shape), np.int64)


@kernels.register("Reshape", versions=(5, None), view_of=0)
def reshape(node: NodeContext) -> Run:
    """The same elements, in order, in another shape. x: [...]; shape: [rank] int64 -> [*shape].

    One size may be -1, for what is left. A size 0 stands for x's own size of that axis, with `allowzero` for itself.
    """
    keep_zeros = bool(node.attribute("allowzero", 0))
    target = as_ints(node.constant(1))
    allocate = node.provider.allocate
    if target is not None and (keep_zeros or 0 not in target):
        return lambda x, _: reshaped(allocate, x, target)

    def run(x: Array, shape: Array) -> Array:
        sizes: list[int] = shape.tolist()
        if not keep_zeros and 0 in sizes:
            sizes = _with_own_sizes(x.shape, sizes)
        return reshaped(allocate, x, sizes)

    return run


def _with_own_sizes(own: tuple[int, ...], sizes: list[int]) -> list[int]:
    """The target shape with each 0 replaced by x's own size, and then -1 by what is left, also where x has no elements."""
    kept = [index for index, size in enumerate(sizes) if size == 0]
    full = [own[index] if size == 0 else size for index, size in enumerate(sizes)]
    if -1 in full and 0 in own:
        # No product tells -1 from the others here; the axes that are kept have nothing to do with it.
        left = prod(size for index, size in enumerate(own) if index not in kept)
        given = prod(size for index, size in enumerate(sizes) if size > 0)
        full[full.index(-1)] = left // given if given else 0
    return full


def reshaped(allocate: Allocate, x: Array, shape: tuple[int, ...] | list[int]) -> Array:
    """`x` in another shape: a view where its elements lie so that there is one, else a copy, from the pool if it's a large one."""
    if x.nbytes >= SMALLEST and not x.flags.c_contiguous:
        try:
            return x.reshape(shape, copy=False)
        except ValueError:  # no strides reach its elements in this order
            x = copied(allocate, x)
    return x.reshape(shape)


@kernels.register("Flatten", versions=(1, None), view_of=0)
def flatten(node: NodeContext) -> Run:
    """The axes before `axis` made one, and those from there on. x: [d0, ..., dn] -> [d0 · ..., daxis · ...]."""
    axis = node.attribute("axis", 1)
    allocate = node.provider.allocate
    return lambda x: reshaped(allocate, x, (prod(x.shape[:axis]), prod(x.shape[axis:])))


@kernels.register("Squeeze", versions=(1, None), view_of=0)
def squeeze(node: NodeContext) -> Run:
    """Without the axes given, which have size 1 (an attribute until version 11, an input from 13), or without all of that size."""
    axes: tuple[int, ...] | None = node.attribute("axes", None) if node.version < 13 else as_ints(node.constant(1))
    if axes is not None:
        return lambda x, _=None: x.squeeze(axes)
    return lambda x, axes=None: x.squeeze(as_ints(axes))


@kernels.register("Unsqueeze", versions=(1, None), view_of=0)
def unsqueeze(node: NodeContext) -> Run:
    """With a new axis of size 1 at each place given, counted in the result (an attribute until version 11, an input from 13)."""
    axes: tuple[int, ...] | None = node.attribute("axes") if node.version < 13 else as_ints(node.constant(1))
    if axes is not None and len(axes) == 1 and axes[0] >= 0:
        before = (slice(None),) * axes[0]
        key = (*before, None) if axes[0] else (None, ...)
        return lambda x, _=None: x[key]

    def run(x: Array, given: Array | None = None) -> Array:
        places = axes if axes is not None else as_ints(given) or ()
        shape = list(x.shape)
        for axis in sorted(normalize_axes(places, x.ndim + len(places))):
            shape.insert(axis, 1)
        return x.reshape(shape)

    return run


@kernels.register("Transpose", versions=(1, None), view_of=0)
def transpose(node: NodeContext) -> Run:
    """Axes in another order: axis i of the result is axis perm[i] of x; reversed without `perm`."""
    order = node.attribute("perm", None)
    return (lambda x: x.T) if order is None else (lambda x: x.transpose(order))


@kernels.register("Expand", versions=(8, None), view_of=0)
def expand(node: NodeContext) -> Run:
    """`x` repeated along axes of size 1. x: [...]; shape: [any rank] int64 -> the shape that both broadcast to.

    A large result is a view that repeats by having stride 0.
    """
    allocate = node.provider.allocate

    def run(x: Array, shape: Array) -> Array:
        target = tuple(shape.tolist())
        if target != x.shape:
            target = np.broadcast_shapes(x.shape, target)
        if target == x.shape:
            return x
        if prod(target) * x.itemsize >= SMALLEST:
            return np.broadcast_to(x, target)
        out: Array = allocate(target, x.dtype)
        out[...] = x
        return out

    return run
