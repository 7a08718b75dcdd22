"""Normalization of images, whose axis 1 holds channels, and of vectors along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType
from miniort_cpu.axes import normalize_axes, normalize_axis
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.threads import Threads, threads_of

kernels = KernelTable("cpu")


def _along_channels(values: Array, rank: int) -> Array:
    """Values per channel, or per channel and place, in a shape that broadcasts to [N, C, *sizes]. values: [C] or [C, *sizes]."""
    return values.reshape(*values.shape, *(1,) * (rank - 1 - values.ndim)) if rank > 1 else values


BLOCK = 64 * 1024
"""Elements of an image that are scaled and then shifted while they're in the cache."""

SMALLEST_RANGE = 2 << 20
"""Elements that are worth waking a thread for."""


def _scaled(allocate: Allocate, threads: Threads, x: Array, factor: Array, term: Array) -> Array:
    """`x` · factor + term, of x's dtype. x: [N, C, *sizes]; factor, term: [C] or [C, *sizes] -> x's shape."""
    y: Array = allocate(x.shape, x.dtype)
    if x.ndim < 2 or x.size <= BLOCK:
        np.multiply(x, _along_channels(factor, x.ndim), out=y, casting="same_kind")
        return np.add(y, _along_channels(term, x.ndim), out=y, casting="same_kind")
    factors, terms = _along_channels(factor, x.ndim), _along_channels(term, x.ndim)
    count = max(BLOCK * x.shape[1] // x.size, 1)

    def of_channels(start: int, end: int) -> None:
        for first in range(start, end, count):
            chosen = slice(first, min(first + count, end))
            part = y[:, chosen]
            np.multiply(x[:, chosen], factors[chosen], out=part, casting="same_kind")
            np.add(part, terms[chosen], out=part, casting="same_kind")

    threads.split(x.shape[1], max(SMALLEST_RANGE * x.shape[1] // x.size, 1), of_channels)
    return y


def _line(scale: Array, bias: Array, mean: Array, variance: Array, epsilon: float, dtype: DType) -> tuple[Array, Array]:
    """The factor and the term of (x - mean) / √(variance + epsilon) · scale + bias. All: [C] or [C, *sizes]; in float64 -> dtype."""
    factor = scale.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    return factor.astype(dtype), (bias.astype(np.float64) - mean.astype(np.float64) * factor).astype(dtype)


@kernels.register("BatchNormalization", versions=(6, None))
def batch_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias per channel (Ioffe and Szegedy 2015, arXiv:1502.03167).

    In training mode mean and variance are the batch's own, and running = running · momentum + batch's · (1 - momentum) comes out too. That
    mode is an attribute from version 14 on, and before that implied by outputs beyond the first (until version 6: by `is_test` = 0).

    x: [N, C, *sizes]; scale, bias, mean, variance: [C], with `spatial` = 0 [C, *sizes] -> x's shape; two of mean's (until 9: four)
    """
    epsilon, momentum = node.attribute("epsilon", 1e-5), node.attribute("momentum", 0.9)
    per_place = not node.attribute("spatial", 1)
    if node.version >= 14:
        training = bool(node.attribute("training_mode", 0))
    elif node.version >= 7:
        training = any(output is not None for output in node.outputs[1:])
    else:
        training = not node.attribute("is_test", 0)
    outputs = len(node.outputs)
    allocate, threads = node.provider.allocate, threads_of(node.provider)
    fixed: tuple[Array, Array] | None = None
    constants = [node.constant(index) for index in range(1, 5)]
    dtype = node.dtype(0)
    if dtype is not None and not training and all(each is not None for each in constants):
        scale, bias, mean, variance = (each for each in constants if each is not None)
        with np.errstate(all="ignore"):
            fixed = _line(scale, bias, mean, variance, epsilon, widen(np.empty(0, dtype)).dtype)

    def run(x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array:
        wide = widen(x)
        factor, term = _line(scale, bias, mean, variance, epsilon, wide.dtype) if fixed is None else fixed
        return as_dtype(_scaled(allocate, threads, wide, factor, term), x.dtype)

    def train(x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array | tuple[Array, ...]:
        wide = widen(x)
        axes = 0 if per_place else (0, *range(2, x.ndim))
        own_mean, own_variance = np.mean(wide, axes), np.var(wide, axes)
        factor, term = _line(scale, bias, own_mean, own_variance, epsilon, wide.dtype)
        y = as_dtype(_scaled(allocate, threads, wide, factor, term), x.dtype)
        if outputs == 1:
            return y
        running = [
            as_dtype(np.asarray(widen(old) * momentum + new * (1 - momentum)), old.dtype)
            for old, new in ((mean, own_mean), (variance, own_variance))
        ]
        saved = [as_dtype(own_mean, mean.dtype), as_dtype(own_variance, variance.dtype)]
        return (y, *running, *saved)[:outputs]

    return train if training else run


def _normalize_rows(allocate: Allocate, rows: Array, epsilon: float) -> Array:
    """(row - mean) / √(variance + epsilon) for each row. rows: [R, L] float32 or float64 -> same shape."""
    length = max(rows.shape[1], 1)
    mean = np.add.reduce(rows, 1, keepdims=True) / rows.dtype.type(length)
    y = np.subtract(rows, mean, out=allocate(rows.shape, rows.dtype))
    inverse = np.vecdot(y, y)[:, None] / rows.dtype.type(length)
    inverse += rows.dtype.type(epsilon)
    np.sqrt(inverse, out=inverse)
    np.reciprocal(inverse, out=inverse)
    return np.multiply(y, inverse, out=y)  # type: ignore[no-any-return]


@kernels.register("InstanceNormalization", versions=(1, None))
def instance_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias over the spatial axes of each image's channel (Ulyanov et al., arXiv:1607.08022).

    x: [N, C, *sizes]; scale, bias: [C] -> x's shape
    """
    epsilon = node.attribute("epsilon", 1e-5)
    allocate = node.provider.allocate

    def run(x: Array, scale: Array, bias: Array) -> Array:
        wide = widen(x)
        y = _normalize_rows(allocate, wide.reshape(prod(x.shape[:2]), prod(x.shape[2:])), epsilon).reshape(x.shape)
        np.multiply(y, _along_channels(widen(scale), x.ndim), out=y)
        np.add(y, _along_channels(widen(bias), x.ndim), out=y)
        return as_dtype(y, x.dtype)

    return run


@kernels.register("GroupNormalization", versions=(18, None))
def group_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias over each group of channels of an image (Wu and He 2018, arXiv:1803.08494).

    x: [N, C, *sizes]; scale, bias: [C], in version 18 [num_groups] -> x's shape
    """
    epsilon, groups = node.attribute("epsilon", 1e-5), node.attribute("num_groups")
    per_group = node.version < 21
    allocate = node.provider.allocate

    def run(x: Array, scale: Array, bias: Array) -> Array:
        wide, factor, term = widen(x), widen(scale), widen(bias)
        y = _normalize_rows(allocate, wide.reshape(x.shape[0] * groups, prod(x.shape[1:]) // groups), epsilon)
        parts = y.reshape((x.shape[0], groups, -1) if per_group else x.shape) if y.size else y.reshape(x.shape)
        np.multiply(parts, _along_channels(factor, parts.ndim), out=parts)
        np.add(parts, _along_channels(term, parts.ndim), out=parts)
        return as_dtype(y.reshape(x.shape), x.dtype)

    return run


@kernels.register("LRN", versions=(1, None))
def local_response_normalization(node: NodeContext) -> Run:
    """`x` / (bias + alpha / size · Σ x²)^beta, the sum over `size` neighbouring channels (Krizhevsky et al. 2012, section 3.3).

    x: [N, C, *sizes] -> same shape
    """
    size, alpha, beta, bias = node.attribute("size"), *(node.attribute(n, v) for n, v in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    before, after = (size - 1) // 2, size // 2
    allocate = node.provider.allocate

    def run(x: Array) -> Array:
        wide = widen(x)
        channels = x.shape[1]
        squares = np.multiply(wide, wide, out=allocate(x.shape, wide.dtype))
        total = allocate(x.shape, wide.dtype)
        total[...] = squares
        for shift in range(-before, after + 1):
            if shift and abs(shift) < channels:
                here, there = (slice(channels - shift), slice(shift, None)) if shift > 0 else (slice(-shift, None), slice(channels + shift))
                total[:, here] += squares[:, there]
        np.multiply(total, alpha / size, out=total)
        np.add(total, bias, out=total)
        np.power(total, -beta, out=total)
        return as_dtype(np.multiply(wide, total, out=total), x.dtype)

    return run


@kernels.register("LpNormalization", versions=(1, None))
def lp_normalization(node: NodeContext) -> Run:
    """`x` / (Σ |x|ᵖ)^(1/p) along an axis, p 1 or 2; zeros where the norm is zero. x: [...] -> same shape."""
    axis, power = node.attribute("axis", -1), node.attribute("p", 2)
    if power not in (1, 2):
        raise KernelError(f"node {node.name!r} (LpNormalization) has p {power}; only 1 and 2 are defined")

    def run(x: Array) -> Array:
        wide = widen(x)
        place = normalize_axis(axis, x.ndim)
        if power == 1:
            norm = np.add.reduce(np.abs(wide), place, keepdims=True)
        else:
            norm = np.sqrt(np.add.reduce(wide * wide, place, keepdims=True))
        y = np.where(norm == 0, wide.dtype.type(0), wide / norm)
        return as_dtype(y, x.dtype)

    return run


@kernels.register("MeanVarianceNormalization", versions=(9, None))
def mean_variance_normalization(node: NodeContext) -> Run:
    """(x - mean) / (√variance + 1e-9) over `axes`. x: [...] -> same shape."""
    axes: Sequence[int] = node.attribute("axes", (0, 2, 3))

    def run(x: Array) -> Array:
        wide = widen(x)
        places = normalize_axes(axes, x.ndim)
        deviation = wide - np.mean(wide, places, keepdims=True)
        spread = np.sqrt(np.mean(deviation * deviation, places, keepdims=True)) + wide.dtype.type(1e-9)
        return as_dtype(np.divide(deviation, spread, out=deviation), x.dtype)

    return run
