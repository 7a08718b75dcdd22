"""Normalization and activations: one pass over each row while it's in the cache."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.exponential import exponential
from miniort_numba.options import EACH, LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share

ELEMENTS_PER_CHUNK = 1 << 14
"""Elements that a chunk should have at least: some 10 µs of work."""

BLOCK = 1 << 12
"""Elements that are copied and then changed in place: 16 KB, which the first cache holds."""

_SQRT_2_OVER_PI, _CUBIC = np.float32(0.7978845608028654), np.float32(0.044715)
_ONE, _MINUS_TWO = np.float32(1), np.float32(-2)


@njit(**LOOP)
def normalize_layer_row(x: Array, scale: Array, bias: Array, epsilon: float, y: Array) -> None:
    """y = (x - mean) / √(variance + epsilon) · scale + bias. x, scale, y: [n]; bias: [n] or [0]."""
    size = x.shape[0]
    total = np.float32(0)
    for i in range(size):
        total += x[i]
    mean = np.float32(total / size)
    squares = np.float32(0)
    for i in range(size):
        deviation = x[i] - mean
        squares += deviation * deviation
    inverse = np.float32(1 / np.sqrt(squares / size + epsilon))
    if bias.shape[0]:
        for i in range(size):
            y[i] = (x[i] - mean) * inverse * scale[i] + bias[i]
    else:
        for i in range(size):
            y[i] = (x[i] - mean) * inverse * scale[i]


@njit(**LOOP)
def normalize_root_mean_square_row(x: Array, scale: Array, epsilon: float, y: Array) -> None:
    """y = x / √(mean of x² + epsilon) · scale. x, scale, y: [n]."""
    size = x.shape[0]
    squares = np.float32(0)
    for i in range(size):
        squares += x[i] * x[i]
    inverse = np.float32(1 / np.sqrt(squares / size + epsilon))
    for i in range(size):
        y[i] = x[i] * inverse * scale[i]


@cfunc(PART, cache=True, error_model="numpy")
def _layer_rows(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 7)
    rows, size = words[4], words[5]
    x, y = carray(floats_at(words[0]), (rows, size)), carray(floats_at(words[3]), (rows, size))
    scale, bias = carray(floats_at(words[1]), size), carray(floats_at(words[2]), size if words[2] else 0)
    epsilon = carray(floats_at(words[6]), 1)[0]
    for row in range(begin, end):
        normalize_layer_row(x[row], scale, bias, epsilon, y[row])


@cfunc(PART, cache=True, error_model="numpy")
def _root_mean_square_rows(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 7)
    rows, size = words[4], words[5]
    x, y = carray(floats_at(words[0]), (rows, size)), carray(floats_at(words[3]), (rows, size))
    scale = carray(floats_at(words[1]), size)
    epsilon = carray(floats_at(words[6]), 1)[0]
    for row in range(begin, end):
        normalize_root_mean_square_row(x[row], scale, epsilon, y[row])


@njit(**EACH)
def gelu(x: Array) -> None:
    """x becomes x/2 · (1 + tanh(u)) = x / (1 + exp(-2 · u)), u = √(2/π) · (x + 0.044715 x³). x: [n]."""
    for i in range(x.size):
        v = x[i]
        x[i] = v / (_ONE + exponential(_MINUS_TWO * _SQRT_2_OVER_PI * (v + _CUBIC * v * v * v)))


@njit(**EACH)
def add_bias_and_gelu(x: Array, bias: Array) -> None:
    """x becomes `gelu` of x + bias. x, bias: [n]."""
    for i in range(x.size):
        v = x[i] + bias[i]
        x[i] = v / (_ONE + exponential(_MINUS_TWO * _SQRT_2_OVER_PI * (v + _CUBIC * v * v * v)))


@njit(**EACH)
def swish(x: Array, alpha: np.float32) -> None:
    """x becomes x · sigmoid(alpha · x) = x / (1 + exp(-alpha · x)). x: [n]."""
    for i in range(x.size):
        v = x[i]
        x[i] = v / (_ONE + exponential(-alpha * v))


@njit(**PLAIN)
def copied_part(words: Array, start: int, stop: int) -> Array:
    """The elements `start` to `stop` of y, which x's are copied to if y isn't x itself: formulas of one array compile to vectors."""
    y: Array = carray(floats_at(words[1]), words[2])[start:stop]
    if words[0] != words[1]:
        y[:] = carray(floats_at(words[0]), words[2])[start:stop]
    return y


@cfunc(PART, cache=True, error_model="numpy")
def _gelu(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 4)
    for start in range(begin, end, BLOCK):
        gelu(copied_part(words, start, min(start + BLOCK, end)))


@cfunc(PART, cache=True, error_model="numpy")
def _swish(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 4)
    alpha = carray(floats_at(words[3]), 1)[0]
    for start in range(begin, end, BLOCK):
        swish(copied_part(words, start, min(start + BLOCK, end)), alpha)


LAYER_ROWS, ROOT_MEAN_SQUARE_ROWS = address_of(_layer_rows), address_of(_root_mean_square_rows)
GELU, SWISH = address_of(_gelu), address_of(_swish)


@njit(**PLAIN)
def normalize_rows(board: int, helpers: int, part: int, x: Array, scale: Array, bias: Array, epsilon: float, y: Array) -> None:
    """`part`, LAYER_ROWS or ROOT_MEAN_SQUARE_ROWS, for all rows. x, y: [R, n]; scale: [n]; bias: [n] or [0]."""
    rows, size = x.shape
    words, factor = np.empty(7, np.int64), np.empty(1, np.float32)
    factor[0] = epsilon
    words[0], words[1], words[3] = x.ctypes.data, scale.ctypes.data, y.ctypes.data
    words[2] = bias.ctypes.data if bias.shape[0] else 0
    words[4], words[5], words[6] = rows, size, factor.ctypes.data
    share(board, helpers, part, words.ctypes.data, rows, max(1, ELEMENTS_PER_CHUNK // max(1, size)))
    keep(words)
    keep(factor)


@njit(**PLAIN)
def activate(board: int, helpers: int, part: int, x: Array, alpha: float, y: Array) -> None:
    """`part`, GELU or SWISH, for all elements. x, y: [n]."""
    words, factor = np.empty(4, np.int64), np.empty(1, np.float32)
    factor[0] = alpha
    words[0], words[1], words[2], words[3] = x.ctypes.data, y.ctypes.data, x.shape[0], factor.ctypes.data
    share(board, helpers, part, words.ctypes.data, x.shape[0], ELEMENTS_PER_CHUNK)
    keep(words)
    keep(factor)
