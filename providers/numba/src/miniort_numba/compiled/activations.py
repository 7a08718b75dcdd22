"""Activations, each of one row or range while it's in the cache, chosen by number."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.exponential import exponential, hyperbolic_tangent
from miniort_numba.options import EACH, PLAIN
from miniort_numba.team import PART, address_of, keep, share

NOTHING, RELU, CLIP, LEAKY_RELU, SIGMOID, SWISH, HARD_SIGMOID, HARD_SWISH = range(8)
"""NaN stays NaN in all of them."""

KINDS = {
    "": NOTHING,
    "Relu": RELU,
    "Clip": CLIP,
    "LeakyRelu": LEAKY_RELU,
    "Sigmoid": SIGMOID,
    "Swish": SWISH,
    "HardSigmoid": HARD_SIGMOID,
    "HardSwish": HARD_SWISH,
}
"""The numbers by the names of the ops."""

ELEMENTS_PER_CHUNK = 1 << 14
"""Elements that a chunk should have at least: some 10 µs of work."""

BLOCK = 1 << 12
"""Elements that are copied before they're activated: 16 KB, which the first cache holds."""

_ZERO, _HALF, _ONE, _SIXTH = np.float32(0), np.float32(0.5), np.float32(1), np.float32(1 / 6)


@njit(**EACH)
def relu(x: Array) -> None:
    """max(x, 0). x: [n]."""
    for i in range(x.size):
        x[i] = _ZERO if x[i] < _ZERO else x[i]


@njit(**EACH)
def clip(x: Array, low: np.float32, high: np.float32) -> None:
    """min(high, max(x, low)). x: [n]."""
    for i in range(x.size):
        v = low if x[i] < low else x[i]
        x[i] = high if v > high else v


@njit(**EACH)
def leaky_relu(x: Array, alpha: np.float32) -> None:
    """x where it isn't negative, else alpha · x (Maas et al. 2013). x: [n]."""
    for i in range(x.size):
        x[i] = alpha * x[i] if x[i] < _ZERO else x[i]


@njit(**EACH)
def sigmoid(x: Array) -> None:
    """1 / (1 + exp(-x)). x: [n]."""
    for i in range(x.size):
        x[i] = _ONE / (_ONE + exponential(-x[i]))


@njit(**EACH)
def tanh(x: Array) -> None:
    """The hyperbolic tangent. x: [n]."""
    for i in range(x.size):
        x[i] = hyperbolic_tangent(x[i])


@njit(**EACH)
def swish(x: Array, alpha: np.float32) -> None:
    """x · sigmoid(alpha · x) (Ramachandran et al. 2017, arXiv:1710.05941). x: [n]."""
    for i in range(x.size):
        x[i] = x[i] / (_ONE + exponential(-alpha * x[i]))


@njit(**EACH)
def hard_sigmoid(x: Array, alpha: np.float32, beta: np.float32) -> None:
    """max(0, min(1, alpha · x + beta)). x: [n]."""
    for i in range(x.size):
        v = alpha * x[i] + beta
        v = _ZERO if v < _ZERO else v
        x[i] = _ONE if v > _ONE else v


@njit(**EACH)
def hard_swish(x: Array) -> None:
    """x · max(0, min(1, x/6 + 1/2)) (Howard et al. 2019, arXiv:1905.02244). x: [n]."""
    for i in range(x.size):
        v = x[i] * _SIXTH + _HALF
        v = _ZERO if v < _ZERO else v
        x[i] = x[i] * (_ONE if v > _ONE else v)


@njit(**PLAIN)
def activate_row(kind: int, x: Array, first: np.float32, second: np.float32) -> None:
    """x becomes the activation of itself. first, second: its parameters, in the order in which its op has them. x: [n].

    One array, as a loop that reads another which may be the same uses no vectors where it's the same.
    """
    if kind == RELU:
        relu(x)
    elif kind == CLIP:
        clip(x, first, second)
    elif kind == LEAKY_RELU:
        leaky_relu(x, first)
    elif kind == SIGMOID:
        sigmoid(x)
    elif kind == SWISH:
        swish(x, first)
    elif kind == HARD_SIGMOID:
        hard_sigmoid(x, first, second)
    elif kind == HARD_SWISH:
        hard_swish(x)


@cfunc(PART, cache=True, error_model="numpy")
def _activate(arguments: int, begin: int, end: int) -> None:
    """Elements `begin` to `end`, which are copied first where they're to be written elsewhere."""
    words = carray(words_at(arguments), 5)
    x, y = carray(floats_at(words[0]), words[1]), carray(floats_at(words[2]), words[1])
    parameters = carray(floats_at(words[3]), 2)
    for start in range(begin, end, BLOCK):
        stop = min(end, start + BLOCK)
        row = y[start:stop]
        if words[0] != words[2]:
            row[:] = x[start:stop]
        activate_row(words[4], row, parameters[0], parameters[1])


ACTIVATE = address_of(_activate)


@njit(**PLAIN)
def activate(board: int, helpers: int, part: int, kind: int, x: Array, parameters: Array, y: Array) -> None:
    """y = the activation of x, which may be y. part: ACTIVATE; x, y: [n]; parameters: [2]."""
    words = np.empty(5, np.int64)
    words[0], words[1], words[2], words[3], words[4] = x.ctypes.data, x.size, y.ctypes.data, parameters.ctypes.data, kind
    share(board, helpers, part, words.ctypes.data, x.size, ELEMENTS_PER_CHUNK)
    keep(words)
