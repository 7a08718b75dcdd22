"""A factor and a term for each channel: one pass over memory."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.options import EACH, PLAIN
from miniort_numba.team import PART, address_of, keep, share

ELEMENTS_PER_CHUNK = 1 << 14
"""Elements that a chunk should have at least: some 10 µs of work."""

_WORDS = 6


@njit(**EACH)
def scale_row(y: Array, x: Array, factor: np.float32, term: np.float32) -> None:
    """y = factor · x + term. x, y: [n]."""
    for i in range(y.size):
        y[i] = x[i] * factor + term


@cfunc(PART, cache=True, error_model="numpy")
def _scale(arguments: int, begin: int, end: int) -> None:
    """Channels `begin` to `end` of all images."""
    words = carray(words_at(arguments), _WORDS)
    size, channels = words[4], words[5]
    factors, terms = carray(floats_at(words[2]), channels), carray(floats_at(words[3]), channels)
    for row in range(begin, end):
        x, y = carray(floats_at(words[1] + 4 * row * size), size), carray(floats_at(words[0] + 4 * row * size), size)
        scale_row(y, x, factors[row % channels], terms[row % channels])


SCALE = address_of(_scale)


@njit(**PLAIN)
def scale_channels(board: int, helpers: int, part: int, x: Array, factors: Array, terms: Array, y: Array) -> None:
    """y = factors · x + terms. part: SCALE; x, y: [N · C, m]; factors, terms: [C]."""
    rows, size = x.shape
    words = np.empty(_WORDS, np.int64)
    words[0], words[1], words[2], words[3] = y.ctypes.data, x.ctypes.data, factors.ctypes.data, terms.ctypes.data
    words[4], words[5] = size, factors.size
    share(board, helpers, part, words.ctypes.data, rows, max(1, ELEMENTS_PER_CHUNK // max(1, size)))
    keep(words)
