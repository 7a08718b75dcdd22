"""Pools of images: the largest or the mean of what each window sees, one channel at a time."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.planes import ACROSS, COLUMNS, DOWN, HEIGHT, PLANES, ROWS, WIDTH, fill_planes, offsets_of
from miniort_numba.compiled.vectors import largest_of_taps, sum_taps
from miniort_numba.options import LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share
from miniort_numba.windows import SLACK

ELEMENTS_PER_CHUNK = 1 << 14
"""Elements that a chunk should have at least: some 10 µs of work."""

_WORDS = 6
_LOWEST = np.float32(-np.inf)


@njit(**LOOP)
def divide_row(y: Array, x: Array, counts: Array) -> None:
    """y = x / counts. All: [n]."""
    for i in range(y.size):
        y[i] = x[i] / counts[i]


@njit(**LOOP)
def total(x: Array) -> np.float32:
    """The sum of x. x: [n]."""
    s = np.float32(0)
    for i in range(x.size):
        s += x[i]
    return s


@njit(**PLAIN)
def _pool(arguments: int, begin: int, end: int, by_mean: bool) -> None:
    """Channels `begin` to `end` of all images."""
    words = carray(words_at(arguments), _WORDS)
    layout = carray(words_at(words[2]), words[3])
    offsets = offsets_of(layout)
    down, across, row = layout[DOWN], layout[ACROSS], layout[COLUMNS]
    planes = np.empty(layout[PLANES] * layout[ROWS] * row + SLACK, np.float32)
    pooled = np.empty(down * row + SLACK, np.float32)
    ones = np.ones(offsets.size, np.float32)
    counts = carray(floats_at(words[4]), words[5])
    for channel in range(begin, end):
        fill_planes(
            planes.ctypes.data, words[0] + 4 * channel * layout[HEIGHT] * layout[WIDTH], layout, np.float32(0) if by_mean else _LOWEST
        )
        y = carray(floats_at(words[1] + 4 * channel * down * across), down * across)
        if by_mean:
            sum_taps(pooled, ones, offsets, planes, (down - 1) * row + across)
        else:
            largest_of_taps(pooled, ones, offsets, planes, (down - 1) * row + across)
        for r in range(down):
            target, source = y[r * across : (r + 1) * across], pooled[r * row : r * row + across]
            if by_mean:
                divide_row(target, source, counts[r * across : (r + 1) * across])
            else:
                target[:] = source
    keep(planes)


@cfunc(PART, cache=True, error_model="numpy")
def _largest(arguments: int, begin: int, end: int) -> None:
    _pool(arguments, begin, end, False)


@cfunc(PART, cache=True, error_model="numpy")
def _mean(arguments: int, begin: int, end: int) -> None:
    _pool(arguments, begin, end, True)


@cfunc(PART, cache=True, error_model="numpy")
def _whole_mean(arguments: int, begin: int, end: int) -> None:
    """The mean of each of the rows `begin` to `end`."""
    words = carray(words_at(arguments), 3)
    size = words[2]
    y = carray(floats_at(words[1]), end)
    for row in range(begin, end):
        y[row] = total(carray(floats_at(words[0] + 4 * row * size), size)) / np.float32(size)


LARGEST, MEAN, WHOLE_MEAN = address_of(_largest), address_of(_mean), address_of(_whole_mean)


@njit(**PLAIN)
def pool(board: int, helpers: int, part: int, layout: Array, x: Array, counts: Array, y: Array) -> None:
    """What each window sees as one number, NaN where it sees NaN. part: LARGEST or MEAN.

    layout: as in `miniort_numba.compiled.planes`; x: [n, height · width]; y: [n, windows]; counts: [windows], by how many each is divided,
    for MEAN.
    """
    channels, size = x.shape
    words = np.empty(_WORDS, np.int64)
    words[0], words[1], words[2], words[3] = x.ctypes.data, y.ctypes.data, layout.ctypes.data, layout.size
    words[4], words[5] = counts.ctypes.data, counts.size
    share(board, helpers, part, words.ctypes.data, channels, max(1, ELEMENTS_PER_CHUNK // max(1, size)))
    keep(words)


@njit(**PLAIN)
def mean_of_rows(board: int, helpers: int, part: int, x: Array, y: Array) -> None:
    """The mean of each row. part: WHOLE_MEAN; x: [n, m]; y: [n]."""
    rows, size = x.shape
    words = np.empty(3, np.int64)
    words[0], words[1], words[2] = x.ctypes.data, y.ctypes.data, size
    share(board, helpers, part, words.ctypes.data, rows, max(1, 2 * ELEMENTS_PER_CHUNK // max(1, size)))
    keep(words)
