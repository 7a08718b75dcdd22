"""Taking elements by their indices, and putting others in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.pool import SMALLEST
from miniort.types import Array
from miniort_cpu.axes import as_ints, normalize_axis
from miniort_cpu.buffers import Allocate, copied

kernels = KernelTable("cpu")

Key: TypeAlias = tuple[Any, ...]
"""What stands between the brackets of x[...]. An Ellipsis at its end makes the result an array even where it has rank 0."""


@kernels.register("Gather", versions=(1, None), view_of=0)
def gather(node: NodeContext) -> Run:
    """Slices of x by their index along an axis. x: [before..., N, after...]; indices: [I...] -> [before..., I..., after...]."""
    axis = node.attribute("axis", 0)
    allocate = node.provider.allocate
    index = node.constant(1)
    if index is not None and index.ndim == 0 and axis >= 0:
        key: Key = (*(slice(None),) * axis, int(index), ...)
        return lambda x, _: x[key]

    def run(x: Array, indices: Array) -> Array:
        if indices.ndim == 0:
            before: Key = (slice(None),) * normalize_axis(axis, x.ndim)
            return x[(*before, int(indices), ...)]
        if indices.size * x.nbytes < SMALLEST * x.shape[axis]:  # the size of the result
            return x.take(indices, axis)
        return _gather_into_pool(allocate, x, indices, normalize_axis(axis, x.ndim))

    return run


def _gather_into_pool(allocate: Allocate, x: Array, indices: Array, axis: int) -> Array:
    length = x.shape[axis]
    if indices.size and not (-length <= indices.min() and indices.max() < length):
        raise IndexError(f"Gather's indices must lie in [-{length}, {length}), found {indices.min()} to {indices.max()}")
    out = allocate((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    return x.take(indices, axis, out, "wrap") if out.size else out  # "raise", the default, goes through a second buffer


def _along_axis(indices: Array, axis: int) -> tuple[Array, ...]:
    """An index of every element of `indices`: its own place, but along `axis` what it says. Each: broadcasts to indices' shape."""
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = indices
    return tuple(places)


@kernels.register("GatherElements", versions=(11, None))
def gather_elements(node: NodeContext) -> Run:
    """y[i, j, k] = x[indices[i, j, k], j, k] for axis 0. x: [...]; indices: the same rank, no longer off the axis -> indices' shape."""
    axis = node.attribute("axis", 0)

    def run(x: Array, indices: Array) -> Array:
        return x[_along_axis(indices, normalize_axis(axis, x.ndim))]

    return run


@kernels.register("GatherND", versions=(11, None), view_of=0)
def gather_nd(node: NodeContext) -> Run:
    """Slices of x by tuples of indices. x: [batch..., rest...]; indices: [batch..., I..., k] -> [batch..., I..., rest[k:]...]."""
    batch_axes = node.attribute("batch_dims", 0)

    def run(x: Array, indices: Array) -> Array:
        outer = indices.ndim - 1
        rows: tuple[Array, ...] = np.indices(x.shape[:batch_axes], sparse=True)
        batch = [row.reshape(row.shape + (1,) * (outer - batch_axes)) for row in rows]
        return x[(*batch, *np.moveaxis(indices, -1, 0), ...)]

    return run


REDUCTIONS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "add": np.add.at,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}
"""What a scatter does with the element that is there already; None: puts another in its place."""


def _scatter(node: NodeContext) -> Callable[[Array, tuple[Array, ...], Array], Array]:
    """f(x, key, updates) -> a copy of x with `updates` put, or reduced, into its elements `key`."""
    name = node.attribute("reduction", "none")
    if name not in REDUCTIONS:
        raise KernelError(f"node {node.name!r} ({node.op}): its reduction must be one of {', '.join(REDUCTIONS)}, found {name!r}")
    reduce_at = REDUCTIONS[name]
    allocate = node.provider.allocate

    def scatter(x: Array, key: tuple[Array, ...], updates: Array) -> Array:
        out = copied(allocate, x)
        if reduce_at is None:
            out[key] = updates
        else:
            reduce_at(out, key, updates)
        return out

    return scatter


@kernels.register("ScatterElements", versions=(11, None))
def scatter_elements(node: NodeContext) -> Run:
    """`x` with x[indices[i, j, k], j, k] = updates[i, j, k] for axis 0. indices, updates: one shape of x's rank -> x's shape."""
    axis = node.attribute("axis", 0)
    scatter = _scatter(node)

    def run(x: Array, indices: Array, updates: Array) -> Array:
        return scatter(x, _along_axis(indices, normalize_axis(axis, x.ndim)), updates)

    return run


@kernels.register("ScatterND", versions=(11, None))
def scatter_nd(node: NodeContext) -> Run:
    """`x` with x[indices[i]] = updates[i], slices of it. x: [...]; indices: [I..., k]; updates: [I..., x.shape[k:]...] -> x's shape."""
    scatter = _scatter(node)

    def run(x: Array, indices: Array, updates: Array) -> Array:
        return scatter(x, tuple(np.moveaxis(indices, -1, 0)), updates)

    return run


@kernels.register("Slice", versions=(10, None), view_of=0)
def slice_(node: NodeContext) -> Run:
    """x[start:end:step] along some axes, all of them if none are named. starts, ends, axes, steps: [number of axes] -> a view of x."""
    constants = [as_ints(node.constant(index)) for index in range(1, 5)]
    if all(values is not None or not node.has_input(index) for index, values in enumerate(constants, 1)):
        starts, ends, axes, steps = constants
        return _fixed_slice(starts or (), ends or (), axes, steps)

    def run(x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Array:
        return x[_slices(x.shape, starts.tolist(), ends.tolist(), as_ints(axes), as_ints(steps))]

    return run


@kernels.register("Slice", versions=(1, 9), view_of=0)
def slice_attributes(node: NodeContext) -> Run:
    """Slice with its starts, ends and axes in attributes, and step 1."""
    return _fixed_slice(node.attribute("starts"), node.attribute("ends"), node.attribute("axes", None), None)


def _fixed_slice(starts: tuple[int, ...], ends: tuple[int, ...], axes: tuple[int, ...] | None, steps: tuple[int, ...] | None) -> Run:
    """A Slice whose numbers are known when the session is built; what is counted from the back, and clamped, needs the shape too."""
    if any(axis < 0 for axis in axes or ()) or any(start < 0 and step < 0 for start, step in zip(starts, steps or (), strict=False)):
        return lambda x, *_: x[_slices(x.shape, starts, ends, axes, steps)]
    axes = tuple(range(len(starts))) if axes is None else axes
    key = _slices((0,) * (max(axes, default=-1) + 1), starts, ends, axes, steps)
    return lambda x, *_: x[(*key, ...)]


def _slices(
    shape: tuple[int, ...], starts: Any, ends: Any, axes: tuple[int, ...] | None, steps: tuple[int, ...] | None
) -> tuple[slice, ...]:
    """One slice per axis. Python clamps starts and ends as ONNX does, but for a start before the first element of a backward slice."""
    slices = [slice(None)] * len(shape)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = index if axes is None else normalize_axis(axes[index], len(shape))
        step = 1 if steps is None else steps[index]
        slices[axis] = slice(start if step > 0 else max(start, -shape[axis]), end, step)
    return tuple(slices)


@kernels.register("NonZero", versions=(9, None))
def non_zero(node: NodeContext) -> Run:
    """The indices of all elements that aren't zero (or empty text), in row-major order. x: [d0, ...] -> [rank of x, count] int64."""

    def run(x: Array) -> Array:
        if x.ndim == 0:
            return np.empty((0, 1 if x else 0), np.int64)
        return np.array(np.nonzero(x), np.int64)

    return run
