"""Pools: AveragePool, MaxPool, LpPool, their global forms, and MaxUnpool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType
from miniort.windows import Placement, SlidingWindow, sliding_window
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.integers import is_integer
from miniort_cpu.kernels.reduction import maximum, mean
from miniort_cpu.sliding import SlidingAxis
from miniort_cpu.threads import Threads, threads_of
from miniort_cpu.windows import positions

kernels = KernelTable("cpu")


def _lowest(dtype: DType) -> Any:
    return np.iinfo(dtype).min if is_integer(dtype) else -np.inf


SMALLEST_RANGE = 2 << 20
"""Elements that are worth waking a thread for."""

BLOCK = 64 * 1024
"""Elements that are pooled at a time, along one axis after the other, while they're in the cache."""

Finish: TypeAlias = Callable[[Array], object]
"""f(y) changes pooled planes, [n, *counts], in place; what it returns is dropped."""


@lru_cache(maxsize=256)
def _sliding_axes(window: SlidingWindow, place: Placement, sizes: tuple[int, ...]) -> tuple[SlidingAxis, ...]:
    """The axes along which there's something to do, in order: each finds those before it pooled."""
    axes = (
        SlidingAxis(size, prod(sizes[axis + 1 :]), window.kernel[axis], window.strides[axis], window.dilations[axis], begin, count)
        for axis, (size, begin, count) in enumerate(zip(sizes, place.begins, place.counts, strict=True))
    )
    return tuple(axis for axis in axes if not axis.is_plain)


def pool(
    allocate: Allocate, threads: Threads, ufunc: np.ufunc, empty: Any, x: Array, window: SlidingWindow, finish: Finish | None = None
) -> Array:
    """`ufunc` of all elements that each window sees, `empty` where it sees none. Padding counts for nothing.

    Each axis is pooled by itself: k passes for each, where all at once would take their product. The first axis comes first, since its
    passes run over whole rows. Channels come in blocks that stay in the cache, and are divided over threads where they are many.

    x: [N, C, *sizes] -> a new [N, C, *counts]
    """
    sizes = x.shape[2:]
    place = window.place(sizes)
    axes = _sliding_axes(window, place, sizes)
    out: Array = allocate((*x.shape[:2], *place.counts), x.dtype)
    if not out.size:
        return out
    planes, elements = x.shape[0] * x.shape[1], [prod(sizes)]  # of a plane, before and after each axis
    for axis in axes:
        elements.append(elements[-1] // max(axis.size, 1) * axis.count)
    xs, ys = np.ascontiguousarray(x).reshape(planes, elements[0]), out.reshape(planes, *place.counts)
    block = max(BLOCK // max(elements), 1)

    def of_planes(start: int, end: int) -> None:
        most = min(block, end - start)
        space, *between = [allocate((most * size,), x.dtype) for size in (max(elements), *elements[1:-1])]
        for first in range(start, end, block):
            last = min(first + block, end)
            source, target = xs[first:last], ys[first:last]
            for axis, size, result in zip(axes, elements[1:], [*between, target.reshape(-1)], strict=True):
                outer = source.size // (axis.size * axis.inner)
                reduced = result[: (last - first) * size].reshape(outer, axis.count, axis.inner)
                axis.reduce(ufunc, empty, source.reshape(outer, axis.size, axis.inner), reduced, space)
                source = reduced
            if finish is not None:
                finish(target)

    if axes and x.size:
        threads.split(planes, max(SMALLEST_RANGE // max(elements), 1), of_planes)
        return out
    out[...] = x if x.size else empty
    if finish is not None:
        finish(ys)
    return out


@lru_cache(maxsize=256)
def _window_counts(window: SlidingWindow, place: Placement, sizes: tuple[int, ...], with_padding: bool) -> Array | int:
    """How many elements each window averages over: [*counts] int, or one number where it's the same for all."""
    per_axis = []
    for axis, (size, count) in enumerate(zip(sizes, place.counts, strict=True)):
        begin, end = (place.begins[axis], place.ends[axis]) if with_padding else (0, 0)
        at = np.arange(count)[:, None] * window.strides[axis] + np.arange(window.kernel[axis]) * window.dilations[axis]
        at -= place.begins[axis]
        per_axis.append(((at >= -begin) & (at < size + end)).sum(axis=1))
    counts = per_axis[0]
    for each in per_axis[1:]:
        counts = counts[..., None] * each
    return int(counts.flat[0]) if counts.size and (counts == counts.flat[0]).all() else counts


@kernels.register("AveragePool", versions=(1, None))
def average_pool(node: NodeContext) -> Run:
    """The mean of what each window sees; its padding counts as zeros with `count_include_pad`, what lies past that never.

    x: [N, C, *sizes] -> [N, C, *counts]
    """
    window = sliding_window(node, node.attribute("kernel_shape"))
    with_padding = bool(node.attribute("count_include_pad", 0))
    allocate, threads = node.provider.allocate, threads_of(node.provider)

    @lru_cache(maxsize=64)
    def divide(sizes: tuple[int, ...], dtype: DType) -> Finish:
        counts = _window_counts(window, window.place(sizes), sizes, with_padding)
        if isinstance(counts, int):
            factor = 1 / counts if counts else np.nan
            return lambda y: np.multiply(y, factor, out=y)
        divisors = counts.astype(dtype)
        return lambda y: np.divide(y, divisors, out=y)

    def run(x: Array) -> Array:
        wide = widen(x)
        return as_dtype(pool(allocate, threads, np.add, 0, wide, window, divide(x.shape[2:], wide.dtype)), x.dtype)

    return run


@kernels.register("LpPool", versions=(1, None))
def lp_pool(node: NodeContext) -> Run:
    """(Σ |x|ᵖ)^(1/p) over what each window sees. x: [N, C, *sizes] -> [N, C, *counts]."""
    window = sliding_window(node, node.attribute("kernel_shape"))
    power = node.attribute("p", 2)
    allocate, threads = node.provider.allocate, threads_of(node.provider)

    def run(x: Array) -> Array:
        wide = widen(x)
        powers = np.power(np.abs(wide), power, out=allocate(wide.shape, wide.dtype))
        total = pool(allocate, threads, np.add, 0, powers, window)
        return as_dtype(np.power(total, 1 / power, out=total), x.dtype)

    return run


@kernels.register("MaxPool", versions=(1, None))
def max_pool(node: NodeContext) -> Run:
    """The largest of what each window sees, and where it is: its index in x, flattened in the order that `storage_order` says.

    x: [N, C, *sizes] -> [N, C, *counts], and the same of int64; of equal elements the first one's index
    """
    window = sliding_window(node, node.attribute("kernel_shape"))
    column_major = bool(node.attribute("storage_order", 0))
    allocate, threads = node.provider.allocate, threads_of(node.provider)

    def run(x: Array) -> Array:
        return pool(allocate, threads, np.maximum, _lowest(x.dtype), x, window)

    def run_with_indices(x: Array) -> tuple[Array, Array]:
        return _max_pool_with_indices(allocate, x, window, column_major)

    return run_with_indices if len(node.outputs) > 1 and node.outputs[1] is not None else run


def _max_pool_with_indices(allocate: Allocate, x: Array, window: SlidingWindow, column_major: bool) -> tuple[Array, Array]:
    batch, channels, *sizes = x.shape
    place = window.place(x.shape[2:])
    y = allocate((batch, channels, *place.counts), x.dtype)
    y[...] = _lowest(x.dtype)
    indices = allocate(y.shape, np.dtype(np.int64))
    indices[...] = -1
    element = np.arange(prod(sizes)).reshape(sizes, order="F" if column_major else "C")
    for each in positions(window.kernel, window.strides, window.dilations, place.begins, tuple(sizes), place.counts):
        here, seen = each.windows, x[each.elements]
        better = (seen > y[here]) | (indices[here] < 0) | ((seen != seen) & (y[here] == y[here]))  # NaN is largest
        np.copyto(y[here], seen, where=better)
        np.copyto(indices[here], element[each.elements], where=better)
    indices += np.arange(batch * channels).reshape(batch, channels, *(1,) * len(sizes)) * prod(sizes)
    return y, indices


@kernels.register("MaxUnpool", versions=(9, None))
def max_unpool(node: NodeContext) -> Run:
    """The input of a MaxPool again: its maxima where they were, zeros elsewhere.

    The indices are those of a tensor of the shape that the attributes imply; an `output_shape` that is larger has zeros after it.

    x, indices: [N, C, *counts]; output_shape: [rank] int64 -> [N, C, *sizes], or output_shape
    """
    window = sliding_window(node, node.attribute("kernel_shape"))

    def run(x: Array, indices: Array, output_shape: Array | None = None) -> Array:
        sizes = [
            (count - 1) * stride + kernel - begin - end
            for count, stride, kernel, begin, end in zip(
                x.shape[2:], window.strides, window.kernel, window.begins, window.ends, strict=True
            )
        ]
        y = np.zeros((*x.shape[:2], *sizes), x.dtype)
        shape = y.shape if output_shape is None else tuple(output_shape.tolist())
        y.reshape(-1)[indices.reshape(-1)] = x.reshape(-1)
        if shape == y.shape:
            return y
        larger = np.zeros(shape, x.dtype)
        kept = tuple(slice(min(size, wanted)) for size, wanted in zip(y.shape, shape, strict=True))
        larger[kept] = y[kept]
        return larger

    return run


def _spatial(x: Array) -> Sequence[int]:
    return range(2, x.ndim)


@lru_cache(maxsize=16)
def _ones(number: int, dtype: DType) -> Array:
    ones = np.ones(number, dtype)
    ones.flags.writeable = False
    return ones


@kernels.register("GlobalAveragePool", versions=(1, None))
def global_average_pool(node: NodeContext) -> Run:
    """The mean over all spatial axes. x: [N, C, *sizes] -> [N, C, 1...]."""

    def run(x: Array) -> Array:
        batch, channels, *sizes = x.shape
        points, wide = prod(sizes), widen(x)
        if not wide.size or wide.dtype.kind != "f":
            return as_dtype(mean(wide, tuple(_spatial(x)), True), x.dtype)
        total = wide.reshape(batch * channels, points).dot(_ones(points, wide.dtype))  # a product sums up faster than a reduction
        np.divide(total, points, out=total)
        return as_dtype(total, x.dtype).reshape(batch, channels, *(1,) * len(sizes))

    return run


@kernels.register("GlobalMaxPool", versions=(1, None))
def global_max_pool(node: NodeContext) -> Run:
    """The largest over all spatial axes. x: [N, C, *sizes] -> [N, C, 1...]."""

    def run(x: Array) -> Array:
        return as_dtype(maximum(widen(x), tuple(_spatial(x)), True), x.dtype)

    return run


@kernels.register("GlobalLpPool", versions=(1, None))
def global_lp_pool(node: NodeContext) -> Run:
    """(Σ |x|ᵖ)^(1/p) over all spatial axes. x: [N, C, *sizes] -> [N, C, 1...]."""
    power = node.attribute("p", 2)

    def run(x: Array) -> Array:
        total = np.add.reduce(np.power(np.abs(widen(x)), power), tuple(_spatial(x)), keepdims=True)
        return as_dtype(np.power(total, 1 / power), x.dtype)

    return run
