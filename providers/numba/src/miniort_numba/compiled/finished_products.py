"""Products with what follows them done while some rows are in the second cache: it then costs no reading of the result from memory."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.fused_rows import gate, heads_words, place_heads
from miniort_numba.compiled.multiply_add import add_row
from miniort_numba.compiled.products import FINISH, multiply_many_rows, multiply_row
from miniort_numba.compiled.rows import add_bias_and_gelu
from miniort_numba.options import PLAIN
from miniort_numba.team import address_of, keep


@cfunc(FINISH, cache=True, error_model="numpy")
def _gelu(arguments: int, begin: int, end: int, start: int, width: int) -> None:
    words = carray(words_at(arguments), 3)
    bias = carray(floats_at(words[1] + 4 * start), width)
    for row in range(begin, end):
        add_bias_and_gelu(carray(floats_at(words[0] + 4 * (row * words[2] + start)), width), bias)


@cfunc(FINISH, cache=True, error_model="numpy")
def _heads(arguments: int, begin: int, end: int, start: int, width: int) -> None:
    """`width` and `start` are multiples of a head's size."""
    words = carray(words_at(arguments), 14)
    dim = words[7]
    for row in range(begin, end):
        own = carray(floats_at(words[0] + 4 * (row * words[10] + start)), width)
        if words[1]:
            add_row(own, np.float32(1), carray(floats_at(words[1] + 4 * start), width))
        place_heads(words, row, own, start // dim, (start + width) // dim)


@cfunc(FINISH, cache=True, error_model="numpy")
def _gate(arguments: int, begin: int, end: int, start: int, width: int) -> None:
    """`start` and `width` are those of the first half; of a whole row `width` may be more."""
    words = carray(words_at(arguments), 3)
    size = words[2]
    width = min(width, size - start)
    for row in range(begin, end):
        x = words[0] + 4 * (2 * row * size + start)
        y = carray(floats_at(words[1] + 4 * (row * size + start)), width)
        gate(carray(floats_at(x), width), carray(floats_at(x + 4 * size), width), y)


GELU, HEADS, GATE = address_of(_gelu), address_of(_heads), address_of(_gate)


@njit(**PLAIN)
def _multiply(
    board: int, helpers: int, by_rows: int, by_strips: int, a: Array, b: Array, unit: int, bands: int, finish: int, words: Array, y: Array
) -> None:
    """y = a · b for one row or many, then `finish`, told `words`; the others as for `multiply_many_rows`."""
    if a.shape[0] == 1:
        multiply_row(board, helpers, by_rows, a[0], b, finish, words.ctypes.data, y[0])
    else:
        multiply_many_rows(board, helpers, by_strips, a, b, unit, bands, finish, words.ctypes.data, y)
    keep(words)


@njit(**PLAIN)
def multiply_and_gelu(
    board: int, helpers: int, by_rows: int, by_strips: int, finish: int, a: Array, b: Array, bias: Array, y: Array
) -> None:
    """y = Gelu(a · b + bias), the approximation by tanh, for one row or many. by_rows, by_strips: see `products`; finish: GELU.

    a: [R, K]; b: [K, N], stored row by row if R is 1; bias: [N]; y: [R, N].
    """
    words = np.empty(3, np.int64)
    words[0], words[1], words[2] = y.ctypes.data, bias.ctypes.data, y.shape[1]
    _multiply(board, helpers, by_rows, by_strips, a, b, 1, 1, finish, words, y)


@njit(**PLAIN)
def multiply_and_gate(
    board: int, helpers: int, by_rows: int, by_strips: int, finish: int, a: Array, b: Array, product: Array, y: Array
) -> None:
    """y = Swish(first half of a · b) · second half, for one row or many. by_rows, by_strips: see `products`; finish: GATE.

    a: [R, K]; b: [K, 2n], stored row by row if R is 1, n a multiple of STRIP; product: [R, 2n], for sums; y: [R, n].
    """
    words = np.empty(3, np.int64)
    words[0], words[1], words[2] = product.ctypes.data, y.ctypes.data, y.shape[1]
    _multiply(board, helpers, by_rows, by_strips, a, b, 1, 2, finish, words, product)


@njit(**PLAIN)
def multiply_and_split_heads(
    board: int,
    helpers: int,
    by_rows: int,
    by_strips: int,
    finish: int,
    a: Array,
    b: Array,
    unit: int,
    product: Array,
    bias: Array,
    cosines: Array,
    sines: Array,
    table: Array,
    dim: int,
    side_by_side: bool,
    y: Array,
) -> None:
    """`fused_rows.split_heads` of a · b, for one row or many. by_rows, by_strips: see `products`; finish: HEADS.

    a: [B · N, K]; b: [K, heads of all parts · dim], stored row by row if there's one row; product: [B, N, heads of all parts · dim], for
    sums; unit: strips that hold whole heads. The others are those of `split_heads`.
    """
    words = heads_words(product, bias, cosines, sines, table, dim, side_by_side, y)
    rows = product.reshape(a.shape[0], b.shape[1])
    _multiply(board, helpers, by_rows, by_strips, a, b, unit, 1, finish, words, rows)
