"""Windows that slide over images, of convolutions and of pools, and how an image's channels are laid out for them.

All is two-dimensional; a row of elements is an image of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from miniort.kernels import NodeView
from miniort.types import Array

Pair = tuple[int, int]

SLACK = 16
"""Elements after a channel that is laid out, for vectors that reach beyond its end: the longest has so many."""


@dataclass(frozen=True)
class Window:
    """A window's shape and steps: a node's `kernel_shape`, `strides`, `dilations`, `pads`, `auto_pad` and `ceil_mode`."""

    kernel: Pair
    strides: Pair
    dilations: Pair
    begins: Pair
    ends: Pair
    auto_pad: str = "NOTSET"
    ceil: bool = False

    def place(self, sizes: Pair) -> tuple[Pair, Pair, Pair]:
        """How many windows there are on an image of that height and width, and the padding before it and after it.

        ValueError where a window is larger than the image with its padding.
        """
        axes = [self._place(axis, sizes[axis]) for axis in range(2)]
        counts, begins, ends = zip(*axes, strict=True)
        return counts, begins, ends

    def _place(self, axis: int, size: int) -> tuple[int, int, int]:
        stride, begin, end = self.strides[axis], self.begins[axis], self.ends[axis]
        extent = (self.kernel[axis] - 1) * self.dilations[axis] + 1
        if self.auto_pad == "VALID":
            begin = end = 0
        elif self.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            padding = max((-(-size // stride) - 1) * stride + extent - size, 0)
            begin = padding // 2 if self.auto_pad == "SAME_UPPER" else padding - padding // 2
            end = padding - begin
        rest = size + begin + end - extent
        count = (-(-rest // stride) if self.ceil else rest // stride) + 1
        if self.ceil and count > 0 and (count - 1) * stride >= size + begin:
            count -= 1  # it would start in the padding after the last element
        if count < 0:
            raise ValueError(f"a window of {extent} elements doesn't fit on {size} elements with padding {begin}, {end}")
        return count, begin, end


def window_of(node: NodeView, kernel: Sequence[int]) -> Window:
    """The window that a node's attributes describe. kernel: its shape, of one axis or of two."""
    rank = len(kernel)
    pads = tuple(node.attribute("pads", None) or (0,) * (2 * rank))

    def pair(given: Sequence[int], missing: int) -> Pair:
        height, width = given if rank == 2 else (missing, *given)
        return height, width

    return Window(
        pair(kernel, 1),
        pair(node.attribute("strides", None) or (1,) * rank, 1),
        pair(node.attribute("dilations", None) or (1,) * rank, 1),
        pair(pads[:rank], 0),
        pair(pads[rank:], 0),
        node.attribute("auto_pad", "NOTSET"),
        bool(node.attribute("ceil_mode", 0)),
    )


@dataclass(frozen=True, eq=False)
class Layout:
    """How a channel is laid out, so that what all windows see at one tap lies in rows without gaps, padding included.

    The padded channel's rows and columns are dealt out by the strides: of a stride of 2, even columns and odd ones make a plane each.

    counts: of the windows, down and across; is_plain: the channel may be read as it is; step: elements of a channel that's laid out.
    offsets: [taps], where in a channel the first window sees each of its taps.
    words: all of that as compiled functions read it, see `miniort_numba.compiled.planes`.
    """

    counts: Pair
    is_plain: bool
    step: int
    offsets: Array
    words: Array


def layout_of(window: Window, sizes: Pair) -> Layout:
    """The layout for images of one size. ValueError as for `Window.place`."""
    counts, begins, _ = window.place(sizes)
    (height, width), (step_down, step_right) = sizes, window.strides
    down = [k * window.dilations[0] for k in range(window.kernel[0])]
    right = [k * window.dilations[1] for k in range(window.kernel[1])]
    is_plain = (
        not any(begins)
        and window.strides == (1, 1)
        and counts[0] + max(down, default=0) <= height
        and counts[1] + max(right, default=0) <= width
    )
    if is_plain:
        planes: list[Pair] = [(0, 0)]
        rows, row = height, width
    else:
        planes = sorted({(i % step_down, j % step_right) for i, j in product(down, right)})
        rows, row = (count + max(each) // stride for count, each, stride in zip(counts, (down, right), window.strides, strict=True))
    offsets = [
        planes.index((i % step_down, j % step_right)) * rows * row + i // step_down * row + j // step_right for i, j in product(down, right)
    ]
    header = [*sizes, *counts, *window.strides, *begins, rows, row, len(planes), len(offsets)]
    words = np.array([*header, *(each for plane in planes for each in plane), *offsets], np.int64)
    step = rows * row if is_plain else len(planes) * rows * row + SLACK
    return Layout(counts, is_plain, step, np.array(offsets, np.int64), words)
