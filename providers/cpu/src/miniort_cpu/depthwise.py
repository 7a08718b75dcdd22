"""Convolution with one channel to a group, as small matrix products.

The kernel's columns are gathered, side by side in every row: what an output row sees is then one run of memory, and so is what a strip of
some rows sees. A strip is the product of a band matrix, which holds the kernel once for each of the strip's rows, with that run:

    out[t, columns] = band[t, span · kernel's width] · gathered[span · kernel's width, columns]

The band is mostly zeros where a strip is high, and a product is too small where it's low: two rows are best for most images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from miniort.types import Array
from miniort.windows import SlidingWindow
from miniort_cpu.buffers import Allocate
from miniort_cpu.epilogue import Epilogue
from miniort_cpu.threads import Threads
from miniort_cpu.windows import overlap

BLOCK_BYTES = 1 << 20
"""Bytes of gathered elements that are multiplied at a time."""

SMALLEST_RANGE = 12_000_000
"""Multiplications that are worth waking a thread for."""

Compute: TypeAlias = Callable[[Array, Array, Array, Epilogue], None]
"""f(x [N, C, height, width], w [C · factor, 1, *kernel], out [N, C · factor, *counts], epilogue)"""


def strip_height(rows: int, columns: int) -> int:
    """Rows of a strip: few of them if they're long, and if possible so many that no row is computed in vain."""
    if rows <= 3:
        return max(rows, 1)
    wanted = (2, 3, 4, 5) if columns >= 32 else (4, 5, 6, 7, 8, 3)
    return next((height for height in wanted if rows % height == 0), wanted[0])


@dataclass(frozen=True)
class Strips:
    """Every `step`-th output row from `first` on, in `number` strips of `height` rows.

    A strip sees `span` gathered rows, and the next begins `advance` further. Gathered row q is row first + step · (q + above) of the padded
    image. above, below: rows that the only strip would see too, but that are padding.
    """

    first: int
    step: int
    rows: int
    height: int
    stride: int
    dilation: int
    kernel: int
    above: int = 0
    below: int = 0

    @property
    def number(self) -> int:
        return -(-self.rows // self.height)

    @property
    def span(self) -> int:
        return (self.height - 1) * self.stride + (self.kernel - 1) * self.dilation + 1 - self.above - self.below

    @property
    def advance(self) -> int:
        return self.height * self.stride

    @property
    def depth(self) -> int:
        """Gathered rows in all."""
        return (self.number - 1) * self.advance + self.span

    def without_padding(self, begin: int, size: int) -> Strips:
        """The same, but that a single strip doesn't see rows outside of an image of `size` rows with `begin` rows of padding before."""
        if self.number > 1:
            return self
        first, last, _ = overlap(self.first - begin, self.step, size, self.span)
        return replace(self, above=first, below=self.span - last) if last > first else self

    def band(self, w: Array, channels: int) -> Array:
        """w: [C · factor, 1, height, width] -> [C, 1, factor · strip's height, span · width]."""
        height, width = w.shape[2:]
        rows = self.above + self.span + self.below
        band = np.zeros((channels, len(w) // channels, self.height, rows, width), w.dtype)
        for row in range(self.height):
            start = row * self.stride
            band[:, :, row, start : start + (height - 1) * self.dilation + 1 : self.dilation] = w.reshape(channels, -1, height, width)
        return band[:, :, :, self.above : self.above + self.span].reshape(channels, 1, -1, self.span * width)


def strips_of(window: SlidingWindow, counts: tuple[int, ...]) -> Iterator[Strips]:
    """What covers all output rows. Where the kernel is dilated, rows that lie a dilation apart see neighbouring rows of the same image."""
    (kernel, _), (stride, _), (dilation, _) = window.kernel, window.strides, window.dilations
    step = dilation if stride == 1 else 1
    for first in range(min(step, counts[0])):
        rows = len(range(first, counts[0], step))
        yield Strips(first, step, rows, strip_height(rows, counts[1]), stride, dilation // step, kernel)


def depthwise(
    allocate: Allocate,
    threads: Threads,
    window: SlidingWindow,
    begins: tuple[int, ...],
    shape: tuple[int, ...],
    result: tuple[int, ...],
    fixed: Array | None,
) -> Compute:
    """The convolution of inputs of a shape, [N, C, height, width], to one, [N, C · factor, *counts]. fixed: weights that never change."""
    batch, channels, *sizes = shape
    (rows, columns), factor, width = result[2:], result[1] // channels, window.kernel[1]
    strips = tuple(each.without_padding(begins[0], sizes[0]) for each in strips_of(window, result[2:]))
    known = None if fixed is None else [each.band(fixed, channels) for each in strips]
    taps = [overlap(tap * window.dilations[1] - begins[1], window.strides[1], sizes[1], columns) for tap in range(width)]
    seen_rows = [overlap(each.first + each.step * each.above - begins[0], each.step, sizes[0], each.depth) for each in strips]
    depth = max(each.depth for each in strips)
    elements = depth * width * columns  # of a channel

    def compute(x: Array, w: Array, out: Array, epilogue: Epilogue) -> None:
        bands = [each.band(w, channels) for each in strips] if known is None else known
        block = max(BLOCK_BYTES // (elements * x.itemsize), 1)

        def part(start: int, end: int) -> None:
            space = allocate((min(block, end - start), depth, width, columns), x.dtype)
            if len(strips) == 1:
                space.fill(0)  # padding stays zero, as all images and channels fill the same places
            for first in range(start, end, block):
                last = min(first + block, end)
                for image in range(batch):
                    for each, band, (top, bottom, seen) in zip(strips, bands, seen_rows, strict=True):
                        gathered = space[: last - first]
                        if len(strips) > 1:
                            gathered.fill(0)
                        source = x[image, first:last, seen]
                        for tap, (left, right, columns_seen) in enumerate(taps):
                            gathered[:, top:bottom, tap, left:right] = source[:, :, columns_seen]
                        multiply(each, band[first:last], gathered, out[image, first * factor : last * factor])
                    features = slice(first * factor, last * factor)
                    epilogue(out[image, features].reshape(-1, rows * columns), image, features, slice(None))

        threads.split(channels, max(SMALLEST_RANGE // (elements * factor * batch), 1), part)

    def multiply(each: Strips, band: Array, gathered: Array, out: Array) -> None:
        """out: [C · factor, *counts]; its rows of these strips are filled."""
        channel, row, _, column = gathered.strides
        shape = (len(gathered), each.number, each.span * width, columns)
        runs: Array = np.ndarray(shape, out.dtype, gathered, 0, (channel, each.advance * row, row // width, column))
        if factor == 1 and each.step == 1 and each.number * each.height == rows:
            np.matmul(band, runs, out.reshape(len(gathered), each.number, each.height, columns))
            return
        strips = np.matmul(band, runs).reshape(len(gathered), each.number, factor, each.height, columns)
        for feature in range(factor):
            made = strips[:, :, feature].reshape(len(gathered), -1, columns)
            out[feature::factor, each.first :: each.step] = made[:, : each.rows]

    return compute
