"""Windows that slide over images, of convolutions and of pools, and how an image's channels are laid out for them.

All is two-dimensional; a row of elements is an image of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from miniort.kernels import NodeView
from miniort.types import Array
from miniort.windows import SlidingWindow, sliding_window

Pair = tuple[int, int]

SLACK = 16
"""Elements after a channel that is laid out, for vectors that reach beyond its end: the longest has so many."""


def window_of(node: NodeView, kernel: Sequence[int]) -> SlidingWindow:
    """The window that a node's attributes describe, of two axes. kernel: its shape, of one axis or of two."""
    window = sliding_window(node, kernel)
    if len(kernel) == 2:
        return window
    return replace(
        window,
        kernel=(1, *window.kernel),
        strides=(1, *window.strides),
        dilations=(1, *window.dilations),
        begins=(0, *window.begins),
        ends=(0, *window.ends),
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


def layout_of(window: SlidingWindow, sizes: Pair) -> Layout:
    """The layout for images of one size. ValueError as for `SlidingWindow.place`."""
    placed = window.place(sizes)
    counts, begins = (placed.counts[0], placed.counts[1]), placed.begins
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
