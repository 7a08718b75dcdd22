"""Convolutions: Conv, ConvTranspose, and the integer ConvInteger and QLinearConv."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType
from miniort_cpu.buffers import Allocate, copied
from miniort_cpu.floating_point import FLOAT32, FLOAT64, as_dtype, widen
from miniort_cpu.kernels.matrix import widened_constant
from miniort_cpu.windows import Index, SlidingWindow, gather_windows, positions, scatter_windows, sliding_window

kernels = KernelTable("cpu")

COLUMN_BYTES = 2 << 20
"""Bytes of gathered windows that are multiplied at a time: they should still be in the cache when the product reads them."""

CHANNEL_BYTES = 512 << 10
"""Bytes of gathered rows that a depthwise convolution takes at a time."""


@dataclass(frozen=True)
class Weights:
    """A convolution's weights. dense: [M, C / groups, *kernel]; by_row: the same as [height, M, C / groups · width], or None."""

    dense: Array
    by_row: Array | None = None


def _by_row(w: Array) -> Array:
    """The weights of each row of a two-dimensional kernel. w: [M, C, height, width] -> [height, M, C · width]."""
    return np.ascontiguousarray(w.transpose(2, 0, 1, 3)).reshape(w.shape[2], w.shape[0], -1)


def _prefers_rows(w: Array, points: int, packed: bool) -> bool:
    """Whether a product per row of the kernel moves less memory than one for all of it, which takes a row of windows per tap."""
    features, channels, height, width = w.shape
    all_taps = points * channels * height * width
    per_row = points * channels * width + 2 * points * features * (height - 1)
    return bool(per_row + (0 if packed else 2 * w.size) < all_taps)


def convolve(allocate: Allocate, x: Array, weights: Weights, window: SlidingWindow, groups: int) -> Array:
    """The convolution of x with w, without a bias: cross-correlation, as every framework has it.

    x: [N, C, *sizes]; weights: of [M, C / groups, *kernel], x's dtype -> [N, M, *counts]
    """
    w = weights.dense
    place = window.place(x.shape[2:])
    out = allocate((x.shape[0], w.shape[0], *place.counts), x.dtype)
    if not out.size:
        return out
    if not x.size:
        out[...] = 0  # all that a window sees is padding
        return out
    if all(size == 1 for size in window.kernel) and not any(place.begins) and not any(place.ends):
        _convolve_points(allocate, x, w, window.strides, groups, out)
    elif w.shape[1] == 1 and groups > 1 and len(window.kernel) <= 2:
        _convolve_depthwise(allocate, x, w, window, place.begins, out)
    elif groups == 1 and len(window.kernel) == 2 and _prefers_rows(w, prod(place.counts), weights.by_row is not None):
        _convolve_rows(allocate, x, _by_row(w) if weights.by_row is None else weights.by_row, window, place.begins, out)
    else:
        _convolve_columns(allocate, x, w, window, place.begins, groups, out)
    return out


def _convolve_points(allocate: Allocate, x: Array, w: Array, strides: Sequence[int], groups: int, out: Array) -> None:
    """With a kernel of one element: a matrix product of each point's channels. out: [N, M, *counts]."""
    steps: Index = (..., *(slice(0, (count - 1) * stride + 1, stride) for count, stride in zip(out.shape[2:], strides, strict=True)))
    x = x[steps]
    if not x.flags.c_contiguous:
        x = copied(allocate, x)
    batch, channels = x.shape[:2]
    features, points = out.shape[1], prod(out.shape[2:])
    np.matmul(
        w.reshape(groups, features // groups, channels // groups),
        x.reshape(batch, groups, channels // groups, points),
        out.reshape(batch, groups, features // groups, points),
    )


def _blocks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Blocks of at most `size`, and all of about the same: their starts and lengths."""
    length = -(-total // -(-total // max(min(size, total), 1)))
    for start in range(0, total, length):
        yield start, min(length, total - start)


def _convolve_columns(
    allocate: Allocate, x: Array, w: Array, window: SlidingWindow, begins: tuple[int, ...], groups: int, out: Array
) -> None:
    """By products of the weights with gathered windows, a block of the first axis' windows at a time. out: [N, M, *counts]."""
    batch, channels, *sizes = x.shape
    features, (first, *rest) = out.shape[1], out.shape[2:]
    taps = channels // groups * prod(window.kernel)
    row = channels * prod(window.kernel) * prod(rest)
    limit = COLUMN_BYTES // (row * x.itemsize)
    weights = w.reshape(groups, features // groups, taps)
    products = out.reshape(batch, groups, features // groups, first, prod(rest))
    space: Array | None = None
    for image, images in _blocks(batch, limit // first):
        part = x[image : image + images]
        for top, height in _blocks(first, first if images > 1 else limit):
            start = (begins[0] - top * window.strides[0], *begins[1:])
            seen = positions(window.kernel, window.strides, window.dilations, start, tuple(sizes), (height, *rest))
            if space is None:
                space = allocate((images * row * height,), x.dtype)  # the first block is the largest
            shape = (images, channels, *window.kernel, height, *rest)
            columns = gather_windows(part, space[: prod(shape)].reshape(shape), seen)
            target = products[image : image + images, :, :, top : top + height]
            np.matmul(
                weights, columns.reshape(images, groups, taps, -1), target.reshape(images, groups, features // groups, -1, copy=False)
            )


@dataclass(frozen=True)
class _Rows:
    """How windows of two axes are gathered by row: the taps of a kernel's row side by side, and an input's rows dealt out by the stride.

    Tap (i, j) of channel c's window in row r and column q is at [i · dilation % stride, c, j, i · dilation // stride + r, q] of what is
    gathered. So what all windows see at one tap follows each other without a gap, and one array serves all rows of the kernel.
    """

    window: SlidingWindow
    rows: int
    columns: int

    @property
    def depth(self) -> int:
        """Rows of windows that a part must have, so that those of the last row of the kernel are in it."""
        return self.rows + (self.window.kernel[0] - 1) * self.window.dilations[0] // self.window.strides[0]

    def elements(self, channels: int) -> int:
        """How many elements are gathered."""
        return self.window.strides[0] * channels * self.window.kernel[1] * self.depth * self.columns

    def gather(self, x: Array, space: Array, begins: tuple[int, ...]) -> Array:
        """x: [C, height, width]; space: [at least `elements`] -> [stride, C, kernel's width, depth, columns], in `space`."""
        (stride, step), width = self.window.strides, self.window.kernel[1]
        counts = (self.depth, self.columns)
        out = space[: self.elements(len(x))].reshape(stride, len(x), width, *counts)
        seen = positions((stride, width), (stride, step), (1, self.window.dilations[1]), begins, x.shape[1:], counts)
        gather_windows(x, out.swapaxes(0, 1), seen)
        return out

    def part(self, index: int) -> tuple[int, int]:
        """Where row `index` of the kernel is found: which part, and how many elements after its start."""
        part, row = index * self.window.dilations[0] % self.window.strides[0], index * self.window.dilations[0] // self.window.strides[0]
        return part, row * self.columns


def _convolve_rows(allocate: Allocate, x: Array, by_row: Array, window: SlidingWindow, begins: tuple[int, ...], out: Array) -> None:
    """By a product per row of the kernel, which saves gathering each element once per row. by_row: [height, M, C · width]."""
    batch, channels = x.shape[:2]
    features, height, width = out.shape[1:]
    products = out.reshape(batch, features, height * width)
    space: Array | None = None
    for top, count in _blocks(height, COLUMN_BYTES // (channels * window.kernel[1] * width * x.itemsize)):
        rows, points = _Rows(window, count, width), count * width
        if space is None:
            space = allocate((rows.elements(channels),), x.dtype)  # the first block is the largest
            terms = allocate((features * points,), x.dtype)
        term = terms[: features * points].reshape(features, points)
        for image in range(batch):
            gathered = rows.gather(x[image], space, (begins[0] - top * window.strides[0], begins[1]))
            parts = gathered.reshape(window.strides[0], channels * window.kernel[1], -1)
            total = products[image, :, top * width : top * width + points]
            for index, weight in enumerate(by_row):
                part, start = rows.part(index)
                seen = parts[part, :, start : start + points]
                if index == 0:
                    np.matmul(weight, seen, total)
                else:
                    np.add(total, np.matmul(weight, seen, term), out=total)


def _convolve_depthwise(allocate: Allocate, x: Array, w: Array, window: SlidingWindow, begins: tuple[int, ...], out: Array) -> None:
    """With one channel to a group: each window's elements times the weights, summed up. out: [N, M, *counts]."""
    if len(window.kernel) == 1:  # as an image of one row
        window = SlidingWindow((1, *window.kernel), (1, *window.strides), (1, *window.dilations), (0,), (0,))
        x, w, out, begins = x[:, :, None], w[:, :, None], out[:, :, None], (0, *begins)
    batch, channels = x.shape[:2]
    factor = out.shape[1] // channels
    rows = _Rows(window, *out.shape[2:])
    points = rows.rows * rows.columns
    weights = np.ascontiguousarray(w.reshape(channels, factor, *window.kernel).swapaxes(2, 3))
    parts = [[i for i in range(window.kernel[0]) if rows.part(i)[0] == part] for part in range(window.strides[0])]
    block = max(CHANNEL_BYTES // (rows.elements(1) * x.itemsize), 1)
    space: Array | None = None
    results = out.reshape(batch, channels, factor, points)
    for first, count in _blocks(channels, block):
        if space is None:
            space = allocate((rows.elements(count),), x.dtype)
            term = allocate((count, points), x.dtype)
        for image in range(batch):
            gathered = rows.gather(x[image, first : first + count], space, begins)
            for feature in range(factor):
                total = results[image, first : first + count, feature]
                for place, taps in enumerate(each for each in parts if each):
                    # What is seen at these taps, as a view in which taps lie over each other: [count, width, taps, points].
                    part, start = rows.part(taps[0])
                    step = (rows.part(taps[1])[1] - start) if len(taps) > 1 else 0
                    source = gathered[part].reshape(count, window.kernel[1], -1)[:, :, start:]
                    strides = (*source.strides[:2], step * x.itemsize, x.itemsize)
                    seen = as_strided(source, (count, window.kernel[1], len(taps), points), strides, writeable=False)
                    weight = weights[first : first + count, feature][:, :, taps]
                    np.einsum("cjip,cji->cp", seen, weight, out=term[:count] if place else total)
                    if place:
                        np.add(total, term[:count], out=total)


def add_bias(y: Array, bias: Array | None) -> Array:
    """Y + bias, in place. y: [N, M, ...]; bias: [M] or None -> y."""
    if bias is not None:
        np.add(y, bias.reshape(-1, *(1,) * (y.ndim - 2)), out=y)
    return y


@kernels.register("Conv", versions=(1, None))
def conv(node: NodeContext) -> Run:
    """A convolution. x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M] -> [N, M, *counts]."""
    groups = node.attribute("group", 1)
    weights, biases = _prepared_weights(node, 1), widened_constant(node, 2)
    window_of = cache(lambda kernel: sliding_window(node, kernel))
    allocate = node.provider.allocate

    def run(x: Array, w: Array, bias: Array | None = None) -> Array:
        y = convolve(allocate, widen(x), Weights(widen(w)) if weights is None else weights, window_of(w.shape[2:]), groups)
        if bias is not None:
            add_bias(y, widen(bias) if biases is None else biases)
        return as_dtype(y, x.dtype)

    return run


def _prepared_weights(node: NodeContext, index: int) -> Weights | None:
    """Constant weights in the type to compute in, packed by row where a large image would be convolved by row; None if not constant."""
    dense = widened_constant(node, index)
    if dense is None:
        return None
    if dense.ndim == 4 and node.attribute("group", 1) == 1 and dense.shape[2] > 1 and _prefers_rows(dense, 1 << 20, True):
        return Weights(dense, node.prepare(index, "cpu.convolution_by_row", lambda w: _by_row(widen(w))))
    return Weights(dense)


@dataclass(frozen=True)
class _TransposedShape:
    """What a ConvTranspose's attributes say of its output's size, per axis; None where it follows from the padding."""

    window: SlidingWindow
    output_padding: tuple[int, ...]
    output_shape: tuple[int, ...] | None

    def place(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The output's sizes, and how many elements are cut off before its first, from the op's own equations."""
        window = self.window
        full = [
            stride * (size - 1) + more + extent
            for stride, size, more, extent in zip(window.strides, sizes, self.output_padding, window.extents, strict=True)
        ]
        same = window.auto_pad in ("SAME_UPPER", "SAME_LOWER")
        wanted = self.output_shape
        if wanted is None and same:
            wanted = tuple(size * stride for size, stride in zip(sizes, window.strides, strict=True))
        if wanted is None:
            begins, ends = (window.begins, window.ends) if window.auto_pad != "VALID" else ((0,) * len(full),) * 2
            return tuple(size - begin - end for size, begin, end in zip(full, begins, ends, strict=True)), tuple(begins)
        cut = [size - want for size, want in zip(full, wanted, strict=True)]
        if window.auto_pad == "SAME_UPPER":
            return wanted, tuple(each // 2 for each in cut)
        return wanted, tuple(each - each // 2 for each in cut)


@kernels.register("ConvTranspose", versions=(1, None))
def conv_transpose(node: NodeContext) -> Run:
    """The transpose of Conv's linear map: each input element adds its multiple of the kernel to the output.

    x: [N, C, *sizes]; w: [C, M / group, *kernel]; bias: [M] -> [N, M, *output sizes]
    """
    groups = node.attribute("group", 1)
    weights, biases = widened_constant(node, 1), widened_constant(node, 2)
    output_padding, output_shape = node.attribute("output_padding", None), node.attribute("output_shape", None)
    allocate = node.provider.allocate

    def run(x: Array, w: Array, bias: Array | None = None) -> Array:
        wide = widen(x)
        window = sliding_window(node, w.shape[2:])
        rank = len(window.kernel)
        shape = _TransposedShape(
            window, tuple(output_padding or (0,) * rank), None if output_shape is None else tuple(output_shape[-rank:])
        )
        y = _convolve_transposed(allocate, wide, widen(w) if weights is None else weights, shape, groups)
        if bias is not None:
            add_bias(y, widen(bias) if biases is None else biases)
        return as_dtype(y, x.dtype)

    return run


def _convolve_transposed(allocate: Allocate, x: Array, w: Array, shape: _TransposedShape, groups: int) -> Array:
    """x: [N, C, *sizes]; w: [C, M / groups, *kernel] -> [N, M, *output sizes]."""
    batch, channels, *sizes = x.shape
    window = shape.window
    outputs, begins = shape.place(sizes)
    features = w.shape[1]
    y = allocate((batch, groups * features, *outputs), x.dtype)
    y[...] = 0
    if not x.size or not y.size:
        return y
    points = prod(sizes)
    weights = w.reshape(groups, channels // groups, -1).swapaxes(1, 2)
    seen = positions(window.kernel, window.strides, window.dilations, begins, outputs, tuple(sizes))
    for image in range(batch):
        inputs = np.ascontiguousarray(x[image]).reshape(groups, channels // groups, points)
        columns = np.matmul(weights, inputs, allocate((groups, features * prod(window.kernel), points), x.dtype))
        scatter_windows(columns.reshape(groups * features, *window.kernel, *sizes), y[image], seen)
    return y


def _exact_dtype(w: Array, largest: int) -> DType:
    """The float type in which a convolution of integers is exact: every partial sum is an integer that it can hold.

    w: [M, ...] integers as float64; largest: of the other factor's absolute values
    """
    total = float(np.abs(w).reshape(len(w), -1).sum(axis=1).max(initial=0)) * largest
    return FLOAT32 if total < 2**24 else FLOAT64


def _per_channel(values: Array, rank: int) -> Array:
    """One value, or one per output channel, in a shape that broadcasts to [M, ...] of this rank."""
    return values.reshape(-1, *(1,) * (rank - 1)) if values.size > 1 else values.reshape(())


def _integer_weights(w: Array, zero_point: Array | None, largest: int) -> Array:
    """Weights without their zero point, in the float type that makes the convolution exact. w: [M, ...] 8-bit -> same shape."""
    wide = w.astype(FLOAT64)
    if zero_point is not None:
        wide -= _per_channel(zero_point.astype(FLOAT64), w.ndim)
    return as_dtype(wide, _exact_dtype(wide, largest))


def _integer_convolution(node: NodeContext, weight: int, weight_zero: int) -> Run:
    """f(x, x_zero, w, w_zero) -> Σ (x - x_zero) · (w - w_zero) over each window, exact, in float32 or float64.

    x: [N, C, *sizes] 8-bit; w: [M, C / group, *kernel] 8-bit; x_zero: []; w_zero: [] or [M] -> [N, M, *counts]
    """
    groups = node.attribute("group", 1)
    window_of = cache(lambda kernel: sliding_window(node, kernel))
    allocate = node.provider.allocate
    constant, zero = node.constant(weight), node.constant(weight_zero)
    prepared: Array | None = None
    if constant is not None and (zero is not None or not node.has_input(weight_zero)):
        if zero is None or not zero.any():
            prepared = node.prepare(weight, "cpu.exact_integer_convolution", lambda w: _integer_weights(w, None, 255))
        else:
            prepared = _integer_weights(constant, zero, 255)

    def run(x: Array, x_zero: Array | None, w: Array, w_zero: Array | None) -> Array:
        weights = _integer_weights(w, w_zero, 255) if prepared is None else prepared
        wide = allocate(x.shape, weights.dtype)
        if x_zero is None:
            np.copyto(wide, x)
        else:
            np.subtract(x, x_zero.reshape(()).astype(weights.dtype), out=wide, dtype=weights.dtype)
        return convolve(allocate, wide, Weights(weights), window_of(w.shape[2:]), groups)

    return run


@kernels.register("ConvInteger", versions=(10, None))
def conv_integer(node: NodeContext) -> Run:
    """A convolution of 8-bit integers. x: [N, C, *sizes]; w: [M, C / group, *kernel] -> [N, M, *counts] int32."""
    product = _integer_convolution(node, 1, 3)
    allocate = node.provider.allocate

    def run(x: Array, w: Array, x_zero: Array | None = None, w_zero: Array | None = None) -> Array:
        exact = product(x, x_zero, w, w_zero)
        y: Array = allocate(exact.shape, np.dtype(np.int32))
        np.copyto(y, exact, casting="unsafe")
        return y

    return run


@kernels.register("QLinearConv", versions=(10, None))
def qlinear_conv(node: NodeContext) -> Run:
    """A convolution of quantized tensors: y = saturate(round(Σ · x_scale · w_scale / y_scale) + y_zero), ties to even.

    x: [N, C, *sizes]; w: [M, C / group, *kernel]; w_scale: [] or [M]; bias: [M] int32 in units of x_scale · w_scale -> [N, M, *counts]
    """
    product = _integer_convolution(node, 3, 5)

    def run(
        x: Array,
        x_scale: Array,
        x_zero: Array | None,
        w: Array,
        w_scale: Array,
        w_zero: Array | None,
        y_scale: Array,
        y_zero: Array | None,
        bias: Array | None = None,
    ) -> Array:
        y: Array = product(x, x_zero, w, w_zero)
        if bias is not None:
            add_bias(y, bias.astype(y.dtype))
        scale = as_dtype(x_scale.reshape(()) * w_scale / y_scale.reshape(()), y.dtype)
        np.multiply(y, _per_channel(scale, y.ndim - 1), out=y)
        np.rint(y, out=y)
        dtype = x.dtype if y_zero is None else y_zero.dtype
        if y_zero is not None:
            np.add(y, y_zero.reshape(()), out=y, casting="unsafe")
        limits = np.iinfo(dtype)
        np.clip(y, limits.min, limits.max, out=y)
        return y.astype(dtype)

    return run
