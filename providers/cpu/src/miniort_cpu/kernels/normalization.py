"""Normalization over the last axes: LayerNormalization, RMSNormalization."""

from __future__ import annotations

from math import prod

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, dtype_from_onnx
from miniort_cpu.axes import normalize_axis
from miniort_cpu.floating_point import as_dtype, widen

kernels = KernelTable("cpu")


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
    allocate = node.provider.allocate
    statistics = any(output is not None for output in node.outputs[1:])

    def run(x: Array, scale: Array, bias: Array | None = None) -> Array | tuple[Array, Array, Array]:
        wide = widen(x)
        count, length = _rows(x, axis)
        rows = wide.reshape(count, length)
        mean = np.add.reduce(rows, 1, keepdims=True)
        np.divide(mean, length, out=mean)
        y = allocate(x.shape, wide.dtype)
        deviation = np.subtract(rows, mean, out=y.reshape(count, length))
        inverse = np.vecdot(deviation, deviation)[:, None]
        np.divide(inverse, length, out=inverse)
        np.add(inverse, epsilon, out=inverse)
        np.sqrt(inverse, out=inverse)
        np.reciprocal(inverse, out=inverse)
        np.multiply(deviation, inverse, out=deviation)
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
        rows = wide.reshape(count, length)
        inverse = np.vecdot(rows, rows)[:, None]
        np.divide(inverse, length, out=inverse)
        np.add(inverse, epsilon, out=inverse)
        np.sqrt(inverse, out=inverse)
        np.reciprocal(inverse, out=inverse)
        y = allocate(x.shape, wide.dtype)
        np.multiply(rows, inverse, out=y.reshape(count, length))
        np.multiply(y, widen(scale), out=y, casting="same_kind")
        return as_dtype(y, scale.dtype)

    return run
