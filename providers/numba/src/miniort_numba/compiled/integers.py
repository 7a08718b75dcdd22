"""Numbers of 8 bits: to floats and from them, and products of their matrices, which float32 adds up exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from miniort.types import Array
from miniort_numba.atomics import bytes_at, floats_at, integers_at, signed_bytes_at, words_at
from miniort_numba.compiled.tiles import STRIP, add_strip
from miniort_numba.options import EACH, LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share

ELEMENTS_PER_CHUNK = 1 << 14
"""Elements that a chunk should have at least: some 5 µs of work."""

STEPS_PER_CHUNK = 1 << 20
"""Multiplications that a chunk should have at least: some 10 µs."""

CHUNKS_PER_THREAD = 3
"""More chunks than threads, so that one that's slower than the others takes fewer of them."""

DEPTH = 256
"""So many products of two differences of 8-bit numbers, of at most 255 each, stay below 2^24: up to there float32 has all whole numbers."""

TOGETHER = 8
"""Strips of the right matrix that are read together, as its rows lie far from each other."""

WIDTH = TOGETHER * STRIP + 16
"""Elements from row to row of what is read together: not a power of 2, or all rows would want the same lines of the cache."""

_NONE, _MOST = np.float32(0), np.float32(255)
_WORDS = 9


@intrinsic
def nearest_whole(typingctx: Any, x: Any) -> Any:
    """The nearest whole number, of two the even one, by LLVM's instruction: NumPy's is a call, and a loop with a call uses no vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.f32"), arguments)

    return types.float32(types.float32), generate


@njit(**EACH)
def subtract_zero(y: Array, x: Array, zero: np.float32) -> None:
    """y = x - zero. x: [n] of 8 bits; y: [n] float32."""
    for i in range(y.size):
        y[i] = np.float32(x[i]) - zero


@njit(**EACH)
def quantize_row(y: Array, x: Array, scale: np.float32, zero: np.float32) -> None:
    """y = min(255, round(x / scale) + zero), ties to even, which isn't negative. x: [n] float32; y: [n] uint8."""
    for i in range(y.size):
        v = nearest_whole(x[i] / scale) + zero
        y[i] = np.uint8(np.int32(v if v < _MOST else _MOST))


@njit(**EACH)
def to_integers(y: Array, x: Array) -> None:
    """y = x, whole numbers. x: [n] float32; y: [n] int32."""
    for i in range(y.size):
        y[i] = np.int32(x[i])


@njit(**EACH)
def add_to_integers(y: Array, x: Array) -> None:
    """y += x, whole numbers. x: [n] float32; y: [n] int32."""
    for i in range(y.size):
        y[i] += np.int32(x[i])


@njit(**PLAIN, fastmath={"contract", "reassoc", "nsz", "nnan"})
def bounds(x: Array) -> tuple[np.float32, np.float32]:
    """The smallest and the largest number of x and 0; which they are where there's NaN isn't said. x: [n]."""
    low, high = np.float32(0), np.float32(0)
    for i in range(x.size):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
    return low, high


@njit(**LOOP)
def count_nan(x: Array) -> int:
    """How many elements are NaN. x: [n]."""
    count = 0
    for i in range(x.size):
        count += 1 if x[i] != x[i] else 0
    return count


@njit(**EACH)
def round_row(y: Array, x: Array, scale: np.float32, zero: np.float32) -> None:
    """y = max(0, min(255, round(x / scale) + zero)) - zero, ties to even; NaN counts as less than 0. x, y: [n] float32."""
    for i in range(y.size):
        v = nearest_whole(x[i] / scale) + zero
        v = v if v > _NONE else _NONE
        y[i] = (v if v < _MOST else _MOST) - zero


@njit(**PLAIN)
def round_to_bytes(y: Array, x: Array) -> np.float32:
    """y = x / scale in 256 whole numbers, less the zero point, as DynamicQuantizeLinear has them; gives the scale. x, y: [n] float32."""
    low, high = bounds(x)
    scale = np.float32(1) if high == low else (high - low) / _MOST
    if count_nan(x):
        scale = np.float32(np.nan)
    zero = nearest_whole(-low / scale)
    zero = zero if zero > _NONE else _NONE
    round_row(y, x, scale, zero if zero < _MOST else _MOST)
    return scale


@cfunc(PART, cache=True, error_model="numpy")
def _range(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 4)
    x = carray(floats_at(words[0]), end)[begin:]
    found = carray(floats_at(words[1] + 12 * (begin // words[2])), 3)
    found[0], found[1] = bounds(x)
    found[2] = count_nan(x)


@cfunc(PART, cache=True, error_model="numpy")
def _quantize(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 3)
    parameters = carray(floats_at(words[2]), 2)
    quantize_row(carray(bytes_at(words[1]), end)[begin:], carray(floats_at(words[0]), end)[begin:], parameters[0], parameters[1])


@cfunc(PART, cache=True, error_model="numpy")
def _widen(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 4)
    y, zero = carray(floats_at(words[1]), end)[begin:], carray(floats_at(words[2]), 1)[0]
    if words[3]:
        subtract_zero(y, carray(signed_bytes_at(words[0]), end)[begin:], zero)
    else:
        subtract_zero(y, carray(bytes_at(words[0]), end)[begin:], zero)


@cfunc(PART, cache=True, error_model="numpy")
def _narrow(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 2)
    to_integers(carray(integers_at(words[1]), end)[begin:], carray(floats_at(words[0]), end)[begin:])


@cfunc(PART, cache=True, error_model="numpy")
def _products(arguments: int, begin: int, end: int) -> None:
    """Strips `begin` to `end` of the result."""
    words = carray(words_at(arguments), _WORDS)
    rows, inner, columns = words[3], words[4], words[5]
    y, zero = carray(integers_at(words[0]), (rows, columns)), carray(floats_at(words[6]), 1)[0]
    part = np.zeros((DEPTH, WIDTH), np.float32)
    sums = np.empty((rows, STRIP), np.float32)
    first, last = begin * STRIP, min(end * STRIP, columns)
    for r in range(rows):
        y[r, first:last] = 0
    for k in range(0, inner, DEPTH):
        depth = min(DEPTH, inner - k)
        for start in range(first, last, TOGETHER * STRIP):
            stop = min(last, start + TOGETHER * STRIP)
            for i in range(depth):
                row = words[2] + (k + i) * columns
                if words[7]:
                    subtract_zero(part[i, : stop - start], carray(signed_bytes_at(row), columns)[start:stop], zero)
                else:
                    subtract_zero(part[i, : stop - start], carray(bytes_at(row), columns)[start:stop], zero)
            for left in range(start, stop, STRIP):
                right = min(stop, left + STRIP)
                sums[:] = 0
                add_strip(sums.ctypes.data, STRIP, words[1] + 4 * k, inner, part.ctypes.data + 4 * (left - start), WIDTH, rows, depth)
                for r in range(rows):
                    add_to_integers(y[r, left:right], sums[r, : right - left])
    keep(part)
    keep(sums)


RANGE, QUANTIZE, WIDEN, NARROW, PRODUCTS = (address_of(each) for each in (_range, _quantize, _widen, _narrow, _products))


@njit(**PLAIN)
def find_range(board: int, helpers: int, part: int, x: Array) -> tuple[np.float32, np.float32]:
    """The smallest and the largest number of x and 0, NaN twice if there's NaN. part: RANGE; x: [n]."""
    count = (x.size + ELEMENTS_PER_CHUNK - 1) // ELEMENTS_PER_CHUNK
    words, found = np.empty(4, np.int64), np.zeros((count, 3), np.float32)
    words[0], words[1], words[2] = x.ctypes.data, found.ctypes.data, ELEMENTS_PER_CHUNK
    share(board, helpers, part, words.ctypes.data, x.size, ELEMENTS_PER_CHUNK)
    keep(words)
    low, high = np.float32(0), np.float32(0)
    for i in range(count):
        if found[i, 2]:
            return np.float32(np.nan), np.float32(np.nan)
        low, high = min(low, found[i, 0]), max(high, found[i, 1])
    return low, high


@njit(**PLAIN)
def quantize(board: int, helpers: int, part: int, x: Array, parameters: Array, y: Array) -> None:
    """y = round(x / scale) + zero point. part: QUANTIZE; x: [n] float32; parameters: those two, float32; y: [n] uint8."""
    words = np.empty(3, np.int64)
    words[0], words[1], words[2] = x.ctypes.data, y.ctypes.data, parameters.ctypes.data
    share(board, helpers, part, words.ctypes.data, x.size, ELEMENTS_PER_CHUNK)
    keep(words)


@njit(**PLAIN)
def widen(board: int, helpers: int, part: int, x: Array, signed: bool, zero: Array, y: Array) -> None:
    """y = x - zero. part: WIDEN; x: [n] uint8, or int8 seen as such if it's signed; zero: [1] float32; y: [n] float32."""
    words = np.empty(4, np.int64)
    words[0], words[1], words[2], words[3] = x.ctypes.data, y.ctypes.data, zero.ctypes.data, 1 if signed else 0
    share(board, helpers, part, words.ctypes.data, x.size, ELEMENTS_PER_CHUNK)
    keep(words)


@njit(**PLAIN)
def narrow(board: int, helpers: int, part: int, x: Array, y: Array) -> None:
    """y = x. part: NARROW; x: [n] float32, whole numbers; y: [n] int32."""
    words = np.empty(2, np.int64)
    words[0], words[1] = x.ctypes.data, y.ctypes.data
    share(board, helpers, part, words.ctypes.data, x.size, ELEMENTS_PER_CHUNK)
    keep(words)


@njit(**PLAIN)
def multiply(board: int, helpers: int, part: int, a: Array, b: Array, signed: bool, zero: Array, y: Array) -> None:
    """y = a · (b - zero). part: PRODUCTS.

    a: [M, K] float32, differences of 8-bit numbers; b: [K, N] uint8, or int8 seen as such if it's signed; zero: [1] float32;
    y: [M, N] int32.
    """
    rows, inner = a.shape
    columns = b.shape[1]
    words = np.empty(_WORDS, np.int64)
    words[0], words[1], words[2], words[6] = y.ctypes.data, a.ctypes.data, b.ctypes.data, zero.ctypes.data
    words[3], words[4], words[5], words[7] = rows, inner, columns, 1 if signed else 0
    strips = (columns + STRIP - 1) // STRIP
    pieces = max(1, min((helpers + 1) * CHUNKS_PER_THREAD, rows * inner * columns // STEPS_PER_CHUNK)) if helpers else 1
    share(board, helpers, part, words.ctypes.data, strips, -(-strips // pieces))
    keep(words)
