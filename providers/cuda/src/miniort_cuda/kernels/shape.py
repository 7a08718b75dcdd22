"""Ops that move, pick and rename elements. Shapes, axes and bounds are host arrays; no kernel here waits for the device to learn them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from miniort.errors import InputError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cuda.element_types import ALL
from miniort_cuda.namespace import array_namespace

kernels = KernelTable("cuda")


def reshaped(shape: tuple[int, ...], target: tuple[int, ...], allow_zero: bool) -> tuple[int, ...]:
    """The shape that Reshape gives an array of `shape`: 0 keeps the axis (unless `allow_zero`), one -1 takes what is left.

    InputError where no size fits.
    """
    sizes = [shape[axis] if size == 0 and not allow_zero else size for axis, size in enumerate(target)]
    if -1 in sizes:
        known, count = prod(size for size in sizes if size != -1), prod(shape)
        if known == 0 or count % known:
            raise InputError(f"Reshape: {list(shape)} has {count} elements, which no size for -1 in {list(target)} makes up")
        sizes[sizes.index(-1)] = count // known
    return tuple(sizes)


def bounds(start: int, end: int, step: int, size: int) -> slice:
    """Slice's start and end on an axis of `size`, counted from its end where negative, then clamped as the ONNX spec says."""
    start += size if start < 0 else 0
    end += size if end < 0 else 0
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end == -1 else end, step)


@kernels.register("Identity", (1, 13), types={"T": ALL}, view_of=0)
@kernels.register("Identity", (14, None), types={"V": ALL}, view_of=0)
def identity(node: NodeContext) -> Run:
    """The input itself."""
    return lambda x: x


@kernels.register("Reshape", (5, None), types={"T": ALL}, host_inputs=(1,), view_of=0)
def reshape(node: NodeContext) -> Run:
    """The elements of x with the sizes that the host array `shape` gives."""
    allow_zero = bool(node.attribute("allowzero", 0))

    def run(x: Any, shape: Array) -> Any:
        return x.reshape(reshaped(x.shape, tuple(shape.tolist()), allow_zero))

    return run


@kernels.register("Flatten", (1, None), types={"T": ALL}, view_of=0)
def flatten(node: NodeContext) -> Run:
    """x: [d0, ..., dn] -> [d0 · ... · d(axis-1), d(axis) · ... · dn]."""
    axis = node.attribute("axis", 1)

    def run(x: Any) -> Any:
        split = axis + x.ndim if axis < 0 else axis
        return x.reshape((prod(x.shape[:split]), prod(x.shape[split:])))

    return run


@kernels.register("Transpose", (1, None), types={"T": ALL}, view_of=0)
def transpose(node: NodeContext) -> Run:
    """Axis i of the result is axis perm[i] of x; without `perm` the axes are reversed."""
    perm = node.attribute("perm", None)
    return lambda x: x.transpose(perm)


@kernels.register("Unsqueeze", (1, 12), types={"T": ALL}, view_of=0)
@kernels.register("Unsqueeze", (13, None), types={"T": ALL}, host_inputs=(1,), view_of=0)
def unsqueeze(node: NodeContext) -> Run:
    """View of x with an axis of size 1 at each of `axes`, which count in the result."""
    xp = array_namespace(node)
    fixed = node.attribute("axes", None)

    def run(x: Any, axes: Array | None = None) -> Any:
        return xp.expand_dims(x, fixed if axes is None else tuple(axes.tolist()))

    return run


@kernels.register("Squeeze", (1, 12), types={"T": ALL}, view_of=0)
@kernels.register("Squeeze", (13, None), types={"T": ALL}, host_inputs=(1,), view_of=0)
def squeeze(node: NodeContext) -> Run:
    """View of x without `axes`, which must be of size 1; without all axes of size 1 if none are named."""
    fixed = node.attribute("axes", None)

    def run(x: Any, axes: Array | None = None) -> Any:
        return x.squeeze(fixed if axes is None else tuple(axes.tolist()))

    return run


@kernels.register("Expand", (8, None), types={"T": ALL}, host_inputs=(1,), view_of=0)
def expand(node: NodeContext) -> Run:
    """View of x, broadcast together with `shape`; a size of 1 there leaves x's own."""
    xp = array_namespace(node)

    def run(x: Any, shape: Array) -> Any:
        return xp.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist())))

    return run


@kernels.register("Concat", (4, None), types={"T": ALL})
def concat(node: NodeContext) -> Run:
    """The inputs one after another along `axis`."""
    xp = array_namespace(node)
    axis = node.attribute("axis")

    def run(*inputs: Any) -> Any:
        return xp.concatenate(inputs, axis=axis)

    return run


@kernels.register("Split", (2, 12), types={"T": ALL})
@kernels.register("Split", (13, None), types={"T": ALL}, host_inputs=(1,))
def split(node: NodeContext) -> Run:
    """Pieces of x, cut along `axis` in the sizes `split`, else equal ones, of which the last may be smaller.

    The pieces are copies: a kernel may hand on a view as its first output only.
    """
    axis = node.attribute("axis", 0)
    fixed = node.attribute("split", None)
    pieces = len(node.outputs)

    def run(x: Any, sizes: Array | None = None) -> tuple[Any, ...]:
        total = x.shape[axis]
        each = -(-total // pieces)
        lengths = fixed if sizes is None else sizes.tolist()
        if lengths is None:
            lengths = [max(0, min(each, total - piece * each)) for piece in range(pieces)]
        ends = np.cumsum(lengths).tolist()
        if ends[-1] != total:
            raise InputError(f"Split: {list(lengths)} adds up to {ends[-1]}, but axis {axis} has size {total}")
        before = (slice(None),) * (axis % x.ndim)
        return tuple(x[(*before, slice(end - length, end))].copy() for end, length in zip(ends, lengths, strict=True))

    return run


@kernels.register("Slice", (10, None), types={"T": ALL}, host_inputs=(1, 2, 3, 4), view_of=0)
def slice_(node: NodeContext) -> Run:
    """x[start:end:step] on each of `axes`, all axes in order if none are named."""

    def run(x: Any, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Any:
        index = [slice(None)] * x.ndim
        chosen = range(len(starts)) if axes is None else axes.tolist()
        strides = [1] * len(starts) if steps is None else steps.tolist()
        for axis, start, end, step in zip(chosen, starts.tolist(), ends.tolist(), strides, strict=True):
            index[axis] = bounds(start, end, step, x.shape[axis])
        return x[tuple(index)]

    return run


@kernels.register("Gather", (1, None), types={"T": ALL})
def gather(node: NodeContext) -> Run:
    """x: [..., N, ...], indices: any shape S -> [..., S, ...] along `axis`; a negative index counts from the end.

    CuPy takes an index that is out of range modulo N: to refuse it would mean to wait for the device.
    """
    xp = array_namespace(node)
    axis = node.attribute("axis", 0)

    def run(x: Any, indices: Any) -> Any:
        return xp.take(x, indices, axis=axis)

    return run
