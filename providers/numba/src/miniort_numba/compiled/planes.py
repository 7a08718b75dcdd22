"""A channel of an image, laid out for windows as `miniort_numba.windows.Layout` says.

Its words: height and width of the image, of the windows' places, of the strides; padding above and to the left; rows and columns of
a plane; how many planes and taps there are; for each plane its first row and column in the padded image; for each tap where its first
window's element lies.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.tiles import LANES
from miniort_numba.compiled.vectors import widen_every_second, widen_lanes
from miniort_numba.options import PLAIN
from miniort_numba.team import PART, address_of, keep, share

(HEIGHT, WIDTH, DOWN, ACROSS, STEP_DOWN, STEP_RIGHT, ABOVE, LEFT, ROWS, COLUMNS, PLANES, TAPS, HEADER) = range(13)

ELEMENTS_PER_CHUNK = 1 << 14
"""Elements that a chunk should have at least: some 10 µs of work."""


@njit(**PLAIN)
def offsets_of(layout: Array) -> Array:
    """Where each tap's first element lies. -> [taps], a view."""
    start = HEADER + 2 * layout[PLANES]
    return layout[start : start + layout[TAPS]]


@njit(**PLAIN)
def fill_row(target: int, size: int, source: int, width: int, begin: int, step: int, value: np.float32) -> None:
    """target[q] = source[begin + q · step] for q below `size`, `value` where there's no such element.

    By addresses. source: [width]; begin may be negative; fewer than SLACK more elements of the target are written.
    """
    before = min(size, max(0, -(begin // step)))
    for q in range(0, before, LANES):
        widen_lanes(target + 4 * q, source, 0, value)
    first = begin + before * step
    if step == 1:
        for q in range(0, size - before, LANES):
            widen_lanes(target + 4 * (before + q), source + 4 * (first + q), min(LANES, width - first - q), value)
    elif step == 2:
        for q in range(0, size - before, LANES):
            start = first + 2 * q
            widen_every_second(target + 4 * (before + q), source + 4 * start, min(2 * LANES, width - start), value)
    else:
        row, seen = carray(floats_at(target), size), carray(floats_at(source), width)
        for q in range(before, size):
            at = begin + q * step
            row[q] = seen[at] if at < width else value


@njit(**PLAIN)
def fill_planes(target: int, channel: int, layout: Array, value: np.float32) -> None:
    """Lay out one channel, `value` being its padding.

    By addresses. channel: [height, width]; target: [planes · rows · columns], and SLACK more that may be written.
    """
    height, width = layout[HEIGHT], layout[WIDTH]
    rows, columns = layout[ROWS], layout[COLUMNS]
    for plane in range(layout[PLANES]):
        first_row, first_column = layout[HEADER + 2 * plane] - layout[ABOVE], layout[HEADER + 2 * plane + 1] - layout[LEFT]
        for r in range(rows):
            y = first_row + r * layout[STEP_DOWN]
            seen = width if 0 <= y < height else 0
            fill_row(target, columns, channel + 4 * y * width, seen, first_column, layout[STEP_RIGHT], value)
            target += 4 * columns


@cfunc(PART, cache=True, error_model="numpy")
def _lay_out(arguments: int, begin: int, end: int) -> None:
    """Lay out channels `begin` to `end`."""
    words = carray(words_at(arguments), 5)
    layout, size = carray(words_at(words[2]), words[3]), words[4]
    for channel in range(begin, end):
        fill_planes(words[0] + 4 * channel * size, words[1] + 4 * channel * layout[HEIGHT] * layout[WIDTH], layout, np.float32(0))


LAY_OUT = address_of(_lay_out)


@njit(**PLAIN)
def lay_out(board: int, helpers: int, part: int, layout: Array, x: Array, planes: Array) -> None:
    """Lay out all channels, with zeros as padding. part: LAY_OUT; x: n channels; planes: [n, planes · rows · columns + SLACK]."""
    channels, size = planes.shape
    words = np.empty(5, np.int64)
    words[0], words[1], words[2], words[3], words[4] = planes.ctypes.data, x.ctypes.data, layout.ctypes.data, layout.size, size
    share(board, helpers, part, words.ctypes.data, channels, max(1, ELEMENTS_PER_CHUNK // max(1, size)))
    keep(words)
