"""Normalization over the last axes: LayerNormalization, RMSNormalization."""

from __future__ import annotations

from math import prod

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.tape import call
from miniort.types import Array, dtype_from_onnx
from miniort_cpu.axes import normalize_axis
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.threads import threads_of

kernels = KernelTable("cpu")

BLOCK = 64 * 1024
"""Elements that are normalized at a time, so that all passes but the first find them in the cache."""

SMALLEST_RANGE = 64 * 1024
"""Elements that a thread should have to normalize at least: some 40 µs."""


def _rows(x: Array, axis: int) -> tuple[int, int]:
    """The number of rows that are normalized, and their length: the sizes before `axis`, and from there on, multiplied."""
    axis = normalize_axis(axis, x.ndim)
    return prod(x.shape[:axis]), prod(x.shape[axis:])


@kernels.register("LayerNormalization", versions=(17, None))
def layer_normalization(node: NodeContext) -> Run:
    """`y` = (x - mean) / √(variance + epsilon) · scale + bias, mean and variance over the axes from `axis` on.

    Ba et al. 2016, arXiv:1607.06450.

    x: [before..., after...]; scale, bias: broadcast to [after...] -> y: x's shape, dtype; mean, 1/√(...): [before..., 1...] of `stash_type`
    """
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)
    stash = dtype_from_onnx(node.attribute("stash_type", 1))
    allocate, threads = node.provider.allocate, threads_of(node.provider)
    statistics = any(output is not None for output in node.outputs[1:])

    def run(x: Array, scale: Array, bias: Array | None = None) -> Array | tuple[Array, Array, Array]:
        wide = widen(x)
        count, length = _rows(x, axis)
        y = allocate(x.shape, wide.dtype)
        if count == 1 and not statistics:
            call(_normalize_row, wide, length, epsilon, scale, bias, y, writes=(y,))
            return as_dtype(y, x.dtype)
        rows = wide.reshape(count, length)
        deviation = y.reshape(count, length)
        mean = np.empty((count, 1), wide.dtype)
        inverse = np.empty((count, 1), wide.dtype)
        by_row = scale.ndim < 2 and (bias is None or bias.ndim < 2)

        def normalize(first: int, last: int) -> None:
            for start in range(first, last, block):
                part = slice(start, min(start + block, last))
                np.add.reduce(rows[part], 1, keepdims=True, out=mean[part])
                np.divide(mean[part], length, out=mean[part])
                own, factor = deviation[part], inverse[part]
                np.subtract(rows[part], mean[part], out=own)
                np.vecdot(own, own, out=factor[:, 0])
                np.divide(factor, length, out=factor)
                np.add(factor, epsilon, out=factor)
                np.sqrt(factor, out=factor)
                np.reciprocal(factor, out=factor)
                np.multiply(own, factor, out=own)
                if by_row:
                    np.multiply(own, scale, out=own)
                    if bias is not None:
                        np.add(own, bias, out=own)

        block = max(1, BLOCK // max(1, length))
        threads.split(count, max(1, SMALLEST_RANGE // max(1, length)), normalize)
        if not by_row:
            np.multiply(y, scale, out=y)
            if bias is not None:
                np.add(y, bias, out=y)
        y = as_dtype(y, x.dtype)
        if not statistics:
            return y
        first = normalize_axis(axis, x.ndim)
        kept = x.shape[:first] + (1,) * (x.ndim - first)
        return y, as_dtype(mean.reshape(kept), stash), as_dtype(inverse.reshape(kept), stash)

    return run


def _normalize_row(x: Array, length: int, epsilon: float, scale: Array, bias: Array | None, y: Array) -> None:
    """One row, written into y: the statistics are single numbers then, which cost less than arrays of one. x, y: [length], in any shape."""
    row, deviation = x.reshape(length), y.reshape(length)
    np.subtract(row, np.add.reduce(row) / length, out=deviation)
    np.multiply(deviation, 1 / np.sqrt(np.vecdot(deviation, deviation) / length + epsilon), out=deviation)
    np.multiply(y, scale, out=y)
    if bias is not None:
        np.add(y, bias, out=y)


def _scale_row(x: Array, length: int, epsilon: float, scale: Array, y: Array) -> None:
    """One row by the root of its mean square, written into y, as `_normalize_row`."""
    row = x.reshape(length)
    np.multiply(row, 1 / np.sqrt(np.vecdot(row, row) / length + epsilon), out=y.reshape(length))
    np.multiply(y, widen(scale), out=y, casting="same_kind")


@kernels.register("RMSNormalization", versions=(23, None))
def rms_normalization(node: NodeContext) -> Run:
    """`y` = x / √(mean of x² + epsilon) · scale, the mean over the axes from `axis` on (Zhang and Sennrich 2019, arXiv:1910.07467).

    x: [before..., after...]; scale: broadcasts to [after...] -> x's shape, of scale's dtype
    """
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)
    allocate = node.provider.allocate

    def run(x: Array, scale: Array) -> Array:
        wide = widen(x)
        count, length = _rows(x, axis)
        y = allocate(x.shape, wide.dtype)
        if count == 1:
            call(_scale_row, wide, length, epsilon, scale, y, writes=(y,))
            return as_dtype(y, scale.dtype)
        rows = wide.reshape(count, length)
        inverse = np.vecdot(rows, rows)[:, None]
        np.divide(inverse, length, out=inverse)
        np.add(inverse, epsilon, out=inverse)
        np.sqrt(inverse, out=inverse)
        np.reciprocal(inverse, out=inverse)
        np.multiply(rows, inverse, out=y.reshape(count, length))
        np.multiply(y, widen(scale), out=y, casting="same_kind")
        return as_dtype(y, scale.dtype)

    return run
