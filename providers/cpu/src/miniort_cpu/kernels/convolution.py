"""Convolutions: Conv, ConvTranspose, and the integer ConvInteger and QLinearConv."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import prod
from time import perf_counter
from typing import TypeAlias

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType
from miniort.windows import SlidingWindow, sliding_window
from miniort_cpu.buffers import Allocate, copied
from miniort_cpu.depthwise import depthwise
from miniort_cpu.epilogue import NOTHING, Activation, Epilogue
from miniort_cpu.floating_point import FLOAT32, FLOAT64, NARROW_FLOATS, as_dtype, widen
from miniort_cpu.kernels.matrix import widened_constant
from miniort_cpu.threads import Threads, threads_of
from miniort_cpu.windows import Index, gather_windows, positions, scatter_windows

kernels = KernelTable("cpu")

COLUMN_BYTES = 2 << 20
"""Bytes of gathered windows that a core multiplies at a time: not so many that they leave the caches before the product reads them."""

RESULT_BYTES = 768 << 10
"""Bytes of a product that a core works on at a time, for the same reason."""

SMALLEST_RANGE = 64_000_000
"""Multiplications that are worth waking a thread for, where BLAS has one thread only."""

ONE_THREAD = 1 << 18
"""Multiplications of a product that OpenBLAS leaves to one thread, which can't be kept waiting by another."""

SMALL_PRODUCT = 4_000_000
"""Multiplications of a product that takes no longer than the calls around it."""

FEW_COLUMNS = 128
"""A product with fewer columns spends its time on packing the weights."""


FEW_TAPS = 288
"""So many products for each result, or fewer, take no longer with one more, by which the bias needs no pass over all results."""


@dataclass(frozen=True)
class Weights:
    """A convolution's weights. dense: [M, C / groups, *kernel]; by_row: the same as [height, M, C / groups · width], or None.

    with_bias: the weights of one group and the bias that belongs to them, as [M, C · kernel + 1], or None.
    """

    dense: Array
    by_row: Array | None = None
    with_bias: Array | None = None


def _by_row(w: Array) -> Array:
    """The weights of each row of a two-dimensional kernel. w: [M, C, height, width] -> [height, M, C · width]."""
    return np.ascontiguousarray(w.transpose(2, 0, 1, 3)).reshape(w.shape[2], w.shape[0], -1)


def _prefers_rows(shape: Sequence[int], points: int, packed: bool) -> bool:
    """Whether a product per row of the kernel moves less memory than one for all of it, which takes a row of windows per tap."""
    features, channels, height, width = shape
    all_taps = points * channels * height * width
    per_row = points * channels * width + 2 * points * features * (height - 1)
    return bool(per_row + (0 if packed else 2 * prod(shape)) < all_taps)


Compute: TypeAlias = Callable[[Array, Weights, Array, Epilogue], None]
"""f(x, weights, out, epilogue) convolves inputs of one shape."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is known of inputs of one shape: the result's, what computes it (None where there's nothing to compute with), and as what its
    times are watched for stalls of BLAS, "" for not at all.
    """

    shape: tuple[int, ...]
    compute: Compute | None
    watched: str = ""


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution with all that doesn't depend on data: the window, the groups, and where memory and threads come from.

    fixed: the weights where they never change. It's the cross-correlation that every framework has.
    """

    window: SlidingWindow
    groups: int
    allocate: Allocate
    threads: Threads
    fixed: Array | None = None
    planned: Callable[[tuple[int, ...], int, bool], _Plan] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "planned", lru_cache(maxsize=64)(self.plan))

    def __call__(self, x: Array, weights: Weights, epilogue: Epilogue = NOTHING) -> Array:
        """x: [N, C, *sizes]; weights: of [M, C / groups, *kernel], x's dtype -> [N, M, *counts]."""
        plan = self.planned(x.shape, len(weights.dense), weights.by_row is not None)
        shape, compute = plan.shape, plan.compute
        out: Array = self.allocate(shape, x.dtype)
        if compute is not None:
            started, threads = perf_counter(), self.threads
            compute(x if x.flags.c_contiguous else copied(self.allocate, x), weights, out, epilogue)
            if plan.watched and not threads.divides_products():
                threads.blas_retreat.note(plan.watched, 1, perf_counter() - started)
        elif out.size:
            out[...] = 0  # all that a window sees is padding
            for image in range(shape[0]):
                epilogue(out[image].reshape(shape[1], -1), image, slice(None), slice(None))
        return out

    def result_shape(self, shape: tuple[int, ...], features: int) -> tuple[int, ...]:
        """The output's shape for an input's."""
        return (shape[0], features, *self.window.place(shape[2:]).counts)

    def plan(self, shape: tuple[int, ...], features: int, packed: bool) -> _Plan:
        """How inputs of a shape are convolved. packed: whether there are weights by row."""
        result = self.result_shape(shape, features)
        weight = (features, shape[1] // self.groups, *self.window.kernel)
        if not prod(result) or not prod(shape):
            return _Plan(result, None)
        is_watched = self.threads.number > 1 and prod(result) * prod(weight[1:]) > ONE_THREAD
        return _Plan(result, self._way(shape, result, weight, packed), f"convolution {shape} {weight}" if is_watched else "")

    def _way(self, shape: tuple[int, ...], result: tuple[int, ...], weight: tuple[int, ...], packed: bool) -> Compute:
        """The fastest way from inputs of a shape to a result. weight: [M, C / groups, *kernel]."""
        window, place = self.window, self.window.place(shape[2:])
        if all(size == 1 for size in window.kernel) and not any(place.begins) and not any(place.ends):
            return _points(self, shape, result)
        if weight[1] == 1 and self.groups > 1 and len(window.kernel) <= 2:
            return self._depthwise(shape, result, place.begins)
        if self.groups == 1 and len(window.kernel) == 2 and _prefers_rows(weight, prod(place.counts), packed):
            return _rows(self, shape, result, place.begins)
        multiplications = prod(result) * prod(weight[1:])
        if multiplications < SMALL_PRODUCT and shape[0] * shape[1] * prod(window.kernel) * prod(place.counts) * 4 < COLUMN_BYTES // 8:
            return _few_windows(self, shape, result, place.begins)
        return _columns(self, shape, result, place.begins)

    def _depthwise(self, shape: tuple[int, ...], result: tuple[int, ...], begins: tuple[int, ...]) -> Compute:
        window, fixed = self.window, self.fixed
        flat = len(window.kernel) == 1
        if flat:  # as an image of one row
            window = SlidingWindow((1, *window.kernel), (1, *window.strides), (1, *window.dilations), (0,), (0,))
            shape, result, begins = (*shape[:2], 1, shape[2]), (*result[:2], 1, result[2]), (0, *begins)
            fixed = None if fixed is None else fixed[:, :, None]
        compute = depthwise(self.allocate, self.threads, window, begins, shape, result, fixed)

        def run(x: Array, weights: Weights, out: Array, epilogue: Epilogue) -> None:
            w = weights.dense
            if flat:
                compute(x[:, :, None], w[:, :, None], out[:, :, None], epilogue)
            else:
                compute(x, w, out, epilogue)

        return run


def _blocks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Blocks of at most `size`, and all of about the same: their starts and lengths."""
    length = -(-total // -(-total // max(min(size, total), 1)))
    for start in range(0, total, length):
        yield start, min(length, total - start)


def _block_bytes(how: Convolution, size: int, part: int, total: int) -> int:
    """Bytes of a block, given those for one core: work that isn't divided over our threads is multiplied by all of BLAS's together."""
    return size if part < total else size * how.threads.number


def _pieces(start: int, end: int, height: int, limit: int) -> Iterator[tuple[int, int, int]]:
    """The rows from start to before end of images of some height, in blocks of one image each: image, first row, number of rows."""
    while start < end:
        image, top = divmod(start, height)
        count = min(height - top, end - start)
        for first, length in _blocks(count, limit):
            yield image, top + first, length
        start += count


def _points(how: Convolution, shape: tuple[int, ...], result: tuple[int, ...]) -> Compute:
    """With a kernel of one element: a matrix product of each point's channels. -> out: [N, M, *counts]."""
    batch, channels = shape[:2]
    features, points = result[1], prod(result[2:])
    steps: Index | None = None
    if any(stride != 1 for stride in how.window.strides):
        steps = (..., *(slice(0, (n - 1) * stride + 1, stride) for n, stride in zip(result[2:], how.window.strides, strict=True)))
    if how.groups > 1:
        return _grouped_points(how, batch, channels // how.groups, features // how.groups, points, steps)
    if batch == 1 and features * channels * points < SMALL_PRODUCT:
        return _few_points(how, channels, features, points, steps)
    by_features = batch == 1 and features > points
    few = max(SMALLEST_RANGE // max(channels * (points if by_features else features), 1), 1)

    def compute(x: Array, weights: Weights, out: Array, epilogue: Epilogue) -> None:
        if steps is not None:
            x = copied(how.allocate, x[steps])
        w, xs, ys = weights.dense.reshape(features, channels), x.reshape(batch, channels, points), out.reshape(batch, features, points)

        def of_features(start: int, end: int) -> None:
            part = ys[0, start:end]
            np.matmul(w[start:end], xs[0], part)
            epilogue(part, 0, slice(start, end), slice(None))

        def of_points(start: int, end: int) -> None:
            size = _block_bytes(how, RESULT_BYTES, end - start, batch * points)
            block = max(size // (max(features, channels) * 4), FEW_COLUMNS)
            if batch == 1 and end - start <= block:
                chosen = slice(start, end)
                part = ys[0, :, chosen]
                np.matmul(w, xs[0, :, chosen], part)
                epilogue(part, 0, slice(None), chosen)
                return
            for image, first, count in _pieces(start, end, points, block):
                chosen = slice(first, first + count)
                part = ys[image, :, chosen]
                np.matmul(w, xs[image, :, chosen], part)
                epilogue(part, image, slice(None), chosen)

        if by_features:
            how.threads.split_products(features, few, of_features)
        else:
            how.threads.split_products(batch * points, max(few, FEW_COLUMNS), of_points)

    return compute


def _few_points(how: Convolution, channels: int, features: int, points: int, steps: Index | None) -> Compute:
    """The same of one image, by one product: what is small costs as many calls as it takes."""

    def compute(x: Array, weights: Weights, out: Array, epilogue: Epilogue) -> None:
        y = out.reshape(features, points)
        seen = x if steps is None else x[steps]
        np.matmul(weights.dense.reshape(features, channels), seen.reshape(channels, points), y)
        epilogue(y, 0, slice(None), slice(None))

    return compute


def _grouped_points(how: Convolution, batch: int, inner: int, outer: int, points: int, steps: Index | None) -> Compute:
    """The same in groups, of `inner` channels and `outer` features each."""
    groups = how.groups
    few = max(SMALLEST_RANGE // (batch * inner * outer * points), 1)

    def compute(x: Array, weights: Weights, out: Array, epilogue: Epilogue) -> None:
        if steps is not None:
            x = copied(how.allocate, x[steps])
        w = weights.dense.reshape(groups, outer, inner)
        xs, ys = x.reshape(batch, groups, inner, points), out.reshape(batch, groups, outer, points)

        def of_groups(start: int, end: int) -> None:
            for image in range(batch):
                part = ys[image, start:end]
                np.matmul(w[start:end], xs[image, start:end], part)
                epilogue(part.reshape(-1, points), image, slice(start * outer, end * outer), slice(None))

        how.threads.split_products(groups, few, of_groups)

    return compute


def _few_windows(how: Convolution, shape: tuple[int, ...], result: tuple[int, ...], begins: tuple[int, ...]) -> Compute:
    """By one product with all windows at once, gathered by one copy: what is small costs as many calls as it takes."""
    window, groups = how.window, how.groups
    (batch, channels, *sizes), features, counts = shape, result[1], result[2:]
    axes = tuple(zip(counts, window.strides, window.extents, begins, sizes, strict=True))
    padded = [(count - 1) * stride + extent for count, stride, extent, _, _ in axes]
    is_padded = any(begins) or any(wanted > size for wanted, size in zip(padded, sizes, strict=True))
    inside: Index = (
        ...,
        *(slice(begin, begin + min(size, wanted - begin)) for wanted, (_, _, _, begin, size) in zip(padded, axes, strict=True)),
    )
    kept: Index = (..., *(slice(0, min(size, wanted - begin)) for wanted, (_, _, _, begin, size) in zip(padded, axes, strict=True)))
    seen = (batch, channels, *window.kernel, *counts)
    taps, points = channels // groups * prod(window.kernel), prod(counts)

    def compute(x: Array, weights: Weights, out: Array, epilogue: Epilogue) -> None:
        source = x
        if is_padded:
            source = np.zeros((batch, channels, *padded), x.dtype)
            source[inside] = x[kept]
        spatial = source.strides[2:]
        steps = [step * dilation for step, dilation in zip(spatial, window.dilations, strict=True)]
        strides = [step * stride for step, stride in zip(spatial, window.strides, strict=True)]
        windows: Array = np.ndarray(seen, x.dtype, source, 0, (*source.strides[:2], *steps, *strides))
        w, ys = weights.dense.reshape(groups, features // groups, taps), out.reshape(batch, groups, features // groups, points)
        np.matmul(w, windows.reshape(batch, groups, taps, points), ys)
        epilogue(out.reshape(batch, features, points), slice(None), slice(None), slice(None))

    return compute


def _columns(how: Convolution, shape: tuple[int, ...], result: tuple[int, ...], begins: tuple[int, ...]) -> Compute:
    """By products of the weights with gathered windows, some of the first axis' windows at a time."""
    window, groups, allocate = how.window, how.groups, how.allocate
    (batch, channels, *sizes), features, (first, *rest) = shape, result[1], result[2:]
    taps, width, points = channels // groups * prod(window.kernel), prod(rest), prod(result[2:])
    rows = channels * prod(window.kernel)

    def compute(x: Array, weights: Weights, out: Array, epilogue: Epilogue) -> None:
        w, ys = weights.dense.reshape(groups, features // groups, taps), out.reshape(batch, groups, features // groups, points)
        ones = 0
        if weights.with_bias is not None:
            w, ones, epilogue = weights.with_bias[None], 1, epilogue.without_bias()

        def seen(space: Array, image: int, top: int, height: int) -> Array:
            """What windows of some rows see, and a row of ones for the bias. -> [groups, taps (+ 1), height · width], in `space`."""
            columns = space[: (rows + ones) * height * width].reshape(rows + ones, height * width)
            start = (begins[0] - top * window.strides[0], *begins[1:])
            at = positions(window.kernel, window.strides, window.dilations, start, tuple(sizes), (height, *rest))
            gather_windows(x[image], columns[:rows].reshape(channels, *window.kernel, height, *rest), at)
            columns[rows:] = 1
            return columns.reshape(groups, -1, height * width)

        def of_rows(start: int, end: int) -> None:
            size = _block_bytes(how, COLUMN_BYTES, end - start, batch * first)
            limit = max(size // (rows * width * x.itemsize), -(-FEW_COLUMNS // width))
            space = allocate(((rows + ones) * width * min(limit, end - start, first),), x.dtype)
            for image, top, height in _pieces(start, end, first, limit):
                chosen = slice(top * width, (top + height) * width)
                part = ys[image, :, :, chosen]
                np.matmul(w, seen(space, image, top, height), part)
                for group in range(groups):
                    outer = features // groups
                    epilogue(part[group], image, slice(group * outer, (group + 1) * outer), chosen)

        if groups == 1 and batch == 1 and features > points:
            (columns,) = seen(allocate(((rows + ones) * points,), x.dtype), 0, 0, first)

            def of_features(start: int, end: int) -> None:
                part = ys[0, 0, start:end]
                np.matmul(w[0, start:end], columns, part)
                epilogue(part, 0, slice(start, end), slice(None))

            how.threads.split_products(features, max(SMALLEST_RANGE // (taps * points), 1), of_features)
        else:
            how.threads.split_products(
                batch * first, max(SMALLEST_RANGE // (features * taps * width), -(-FEW_COLUMNS // width), 1), of_rows
            )

    return compute


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


def _rows(how: Convolution, shape: tuple[int, ...], result: tuple[int, ...], begins: tuple[int, ...]) -> Compute:
    """By a product per row of the kernel, which saves gathering each element once per row."""
    window, allocate = how.window, how.allocate
    (batch, channels), features, (height, width) = shape[:2], result[1], result[2:]
    points, taps = height * width, channels * window.kernel[1]

    def compute(x: Array, weights: Weights, out: Array, epilogue: Epilogue) -> None:
        by_row = _by_row(weights.dense) if weights.by_row is None else weights.by_row  # [height of the kernel, M, C · its width]
        ys = out.reshape(batch, features, points)

        def multiply(rows: _Rows, parts: Array, chosen: slice, total: Array, term: Array) -> None:
            for index, weight in enumerate(by_row):
                part, start = rows.part(index)
                seen = parts[part, :, start : start + total.shape[1]]
                if index == 0:
                    np.matmul(weight[chosen], seen, total)
                else:
                    np.add(total, np.matmul(weight[chosen], seen, term), out=total)

        def of_rows(start: int, end: int) -> None:
            size = _block_bytes(how, COLUMN_BYTES, end - start, batch * height)
            limit = max(size // (taps * width * x.itemsize), -(-FEW_COLUMNS // width))
            limit = min(limit, end - start, height)
            space = allocate((_Rows(window, limit, width).elements(channels),), x.dtype)
            terms = allocate((features * limit * width,), x.dtype)
            for image, top, count in _pieces(start, end, height, limit):
                rows = _Rows(window, count, width)
                parts = rows.gather(x[image], space, (begins[0] - top * window.strides[0], begins[1])).reshape(window.strides[0], taps, -1)
                chosen = slice(top * width, (top + count) * width)
                total = ys[image, :, chosen]
                multiply(rows, parts, slice(None), total, terms[: total.size].reshape(total.shape))
                epilogue(total, image, slice(None), chosen)

        if batch == 1 and features > points:
            rows = _Rows(window, height, width)
            space = allocate((rows.elements(channels),), x.dtype)
            parts = rows.gather(x[0], space, begins).reshape(window.strides[0], taps, -1)

            def of_features(start: int, end: int) -> None:
                total = ys[0, start:end]
                multiply(rows, parts, slice(start, end), total, allocate(total.shape, x.dtype))
                epilogue(total, 0, slice(start, end), slice(None))

            how.threads.split_products(features, max(SMALLEST_RANGE // (taps * window.kernel[0] * points), 1), of_features)
        else:
            smallest = SMALLEST_RANGE // (features * taps * window.kernel[0] * width)
            how.threads.split_products(batch * height, max(smallest, -(-FEW_COLUMNS // width), 1), of_rows)

    return compute


def add_bias(y: Array, bias: Array | None) -> Array:
    """Y + bias, in place. y: [N, M, ...]; bias: [M] or None -> y."""
    if bias is not None:
        np.add(y, bias.reshape(-1, *(1,) * (y.ndim - 2)), out=y)
    return y


def convolver(node: NodeContext, fixed: Array | None) -> Callable[[tuple[int, ...]], Convolution]:
    """What a node's attributes say of its convolution, given the kernel's shape. fixed: the weights where they never change."""
    groups, allocate, threads = node.attribute("group", 1), node.provider.allocate, threads_of(node.provider)
    return cache(lambda kernel: Convolution(sliding_window(node, kernel), groups, allocate, threads, fixed))


def convolution(node: NodeContext, activate: Activation | None, scaled: bool = False) -> Run:
    """A kernel for activation(factor · (w * x) + bias + addend), the last four absent for none.

    x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M]; addend: [N, M, *counts]; factor: [M] -> [N, M, *counts]
    scaled: bias and factor are computed in every run.
    """
    weights, biases = _prepared_weights(node, 1), None if scaled else widened_constant(node, 2)
    convolution_of = convolver(node, None if weights is None else weights.dense)
    if weights is not None and biases is not None and node.attribute("group", 1) == 1 and prod(weights.dense.shape[1:]) <= FEW_TAPS:
        rows = weights.dense.reshape(len(weights.dense), -1)
        weights = replace(weights, with_bias=np.concatenate((rows, biases[:, None]), 1))
    known = None if weights is None else (convolution_of(weights.dense.shape[2:]), weights)
    is_fixed = not scaled and not node.has_input(3) and (biases is not None or not node.has_input(2))
    fixed = Epilogue(None, None if biases is None else biases[:, None], None, activate) if is_fixed else None

    def run(x: Array, w: Array, bias: Array | None = None, addend: Array | None = None, factor: Array | None = None) -> Array:
        dtype = x.dtype
        if dtype in NARROW_FLOATS:
            x = x.astype(FLOAT32)
        how, used = (convolution_of(w.shape[2:]), Weights(np.ascontiguousarray(widen(w)))) if known is None else known
        epilogue, rest = fixed, None
        if epilogue is None:
            factors, terms = (None if each is None else as_dtype(each, x.dtype)[:, None] for each in (factor, bias))
            if addend is None:
                epilogue = Epilogue(factors, terms, None, activate)
            elif addend.shape == how.result_shape(x.shape, len(w)):
                epilogue = Epilogue(factors, terms, as_dtype(addend, x.dtype).reshape(*addend.shape[:2], -1), activate)
            else:  # one of them is repeated, so that the sum may have another shape
                epilogue, rest = Epilogue(factors, terms), as_dtype(addend, x.dtype)
        y = how(x, used, epilogue)
        if rest is not None:
            y = np.add(y, rest, out=...)
            if activate is not None:
                activate(y)
        return y if y.dtype == dtype else y.astype(dtype)

    return run


@kernels.register("Conv", versions=(1, None))
def conv(node: NodeContext) -> Run:
    """A convolution. x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M] -> [N, M, *counts]."""
    return convolution(node, None)


def _prepared_weights(node: NodeContext, index: int) -> Weights | None:
    """Constant weights in the type to compute in, packed by row where a large image would be convolved by row; None if not constant."""
    dense = widened_constant(node, index)
    if dense is None:
        return None
    if dense.ndim == 4 and node.attribute("group", 1) == 1 and dense.shape[2] > 1 and _prefers_rows(dense.shape, 1 << 20, True):
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
    allocate, threads = node.provider.allocate, threads_of(node.provider)

    def run(x: Array, w: Array, bias: Array | None = None) -> Array:
        wide = widen(x)
        window = sliding_window(node, w.shape[2:])
        rank = len(window.kernel)
        shape = _TransposedShape(
            window, tuple(output_padding or (0,) * rank), None if output_shape is None else tuple(output_shape[-rank:])
        )
        y = _convolve_transposed(allocate, threads, wide, widen(w) if weights is None else weights, shape, groups)
        if bias is not None:
            add_bias(y, widen(bias) if biases is None else biases)
        return as_dtype(y, x.dtype)

    return run


def _convolve_transposed(allocate: Allocate, threads: Threads, x: Array, w: Array, shape: _TransposedShape, groups: int) -> Array:
    """x: [N, C, *sizes]; w: [C, M / groups, *kernel] -> [N, M, *output sizes]."""
    batch, channels, *sizes = x.shape
    window = shape.window
    outputs, begins = shape.place(sizes)
    features = w.shape[1]
    y = allocate((batch, groups * features, *outputs), x.dtype)
    side_by_side = window.kernel == window.strides and set(window.dilations) == {1} and not any(begins)
    spread = tuple(size * stride for size, stride in zip(sizes, window.strides, strict=True))
    if side_by_side and x.size and spread == tuple(outputs):
        return _spread_windows(allocate, threads, x, w, groups, window.kernel, y)
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


def _spread_windows(allocate: Allocate, threads: Threads, x: Array, w: Array, groups: int, kernel: tuple[int, ...], y: Array) -> Array:
    """A transposed convolution whose windows lie side by side: each element of y is one product. y: [N, M, *sizes · kernel] -> y."""
    batch, channels, *sizes = x.shape
    features, first, rest = w.shape[1] * groups, sizes[0], prod(sizes[1:])
    weights = w.reshape(groups, channels // groups, -1).swapaxes(1, 2)
    row = features * prod(kernel) * rest  # of what is multiplied for a row of x
    limit = max(COLUMN_BYTES // max(row * x.itemsize, 1), 1)
    source = np.ascontiguousarray(x).reshape(batch, groups, channels // groups, first, rest)

    def of_rows(start: int, end: int) -> None:
        for image, top, height in _pieces(start, end, first, limit):
            inputs = source[image, :, :, top : top + height].reshape(groups, channels // groups, height * rest)
            products = np.matmul(weights, inputs, allocate((groups, features // groups * prod(kernel), height * rest), x.dtype))
            taps = products.reshape(features, *kernel, height, *sizes[1:])
            target = y[image, :, top * kernel[0] : (top + height) * kernel[0]]
            for tap in np.ndindex(*kernel):
                target[(slice(None), *(slice(at, None, size) for at, size in zip(tap, kernel, strict=True)))] = taps[(slice(None), *tap)]

    threads.split_products(batch * first, max(SMALLEST_RANGE // max(channels // groups * row, 1), 1), of_rows)
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
    allocate = node.provider.allocate
    constant, zero = node.constant(weight), node.constant(weight_zero)
    prepared: Array | None = None
    if constant is not None and (zero is not None or not node.has_input(weight_zero)):
        if zero is None or not zero.any():
            prepared = node.prepare(weight, "cpu.exact_integer_convolution", lambda w: _integer_weights(w, None, 255))
        else:
            prepared = _integer_weights(constant, zero, 255)
    convolution_of = convolver(node, prepared)

    def run(x: Array, x_zero: Array | None, w: Array, w_zero: Array | None) -> Array:
        weights = _integer_weights(w, w_zero, 255) if prepared is None else prepared
        wide = allocate(x.shape, weights.dtype)
        if x_zero is None:
            np.copyto(wide, x)
        else:
            np.subtract(x, x_zero.reshape(()).astype(weights.dtype), out=wide, dtype=weights.dtype)
        return convolution_of(w.shape[2:])(wide, Weights(weights))

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
