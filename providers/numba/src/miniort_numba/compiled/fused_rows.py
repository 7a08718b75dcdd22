"""Several small ops of a decoder's block in one pass over each row, as a node costs more than its work where there's one row."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.exponential import exponential
from miniort_numba.compiled.rows import ELEMENTS_PER_CHUNK, add_bias_and_gelu, normalize_layer_row, normalize_root_mean_square_row
from miniort_numba.options import EACH, LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share

_ONE = np.float32(1)


@njit(**LOOP)
def add_2(a: Array, b: Array, y: Array) -> None:
    """y = a + b. All [n]."""
    for i in range(y.size):
        y[i] = a[i] + b[i]


@njit(**LOOP)
def add_3(a: Array, b: Array, c: Array, y: Array) -> None:
    """y = a + b + c. All [n]."""
    for i in range(y.size):
        y[i] = a[i] + b[i] + c[i]


@njit(**LOOP)
def copy_row(x: Array, y: Array) -> None:
    """y = x. Both [n]; a loop, as NumPy's way takes longer than to copy a head does."""
    for i in range(y.size):
        y[i] = x[i]


@cfunc(PART, cache=True, error_model="numpy")
def _sum_rows(arguments: int, begin: int, end: int) -> None:
    """The sum of two rows and a bias, and its normalization: by mean and variance, or by its root mean square."""
    words = carray(words_at(arguments), 11)
    rows, size, by_mean = words[7], words[8], words[9]
    x, skip = carray(floats_at(words[0]), (rows, size)), carray(floats_at(words[1]), (rows, size))
    bias = carray(floats_at(words[2]), size if words[2] else 0)
    scale, shift = carray(floats_at(words[3]), size), carray(floats_at(words[4]), size if words[4] else 0)
    total, y = carray(floats_at(words[5]), (rows, size)), carray(floats_at(words[6]), (rows, size))
    epsilon = carray(floats_at(words[10]), 1)[0]
    for row in range(begin, end):
        if bias.shape[0]:
            add_3(x[row], bias, skip[row], total[row])
        else:
            add_2(x[row], skip[row], total[row])
        if by_mean:
            normalize_layer_row(total[row], scale, shift, epsilon, y[row])
        else:
            normalize_root_mean_square_row(total[row], scale, epsilon, y[row])


@cfunc(PART, cache=True, error_model="numpy")
def _biased_gelu_rows(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 5)
    rows, size = words[3], words[4]
    x, bias, y = carray(floats_at(words[0]), (rows, size)), carray(floats_at(words[1]), size), carray(floats_at(words[2]), (rows, size))
    for row in range(begin, end):
        if words[0] != words[2]:
            y[row] = x[row]
        add_bias_and_gelu(y[row], bias)


@njit(**EACH)
def gate(x: Array, up: Array, y: Array) -> None:
    """y = x · sigmoid(x) · up. All [n]."""
    for i in range(y.size):
        v = x[i]
        y[i] = v / (_ONE + exponential(-v)) * up[i]


@cfunc(PART, cache=True, error_model="numpy")
def _gated_rows(arguments: int, begin: int, end: int) -> None:
    words = carray(words_at(arguments), 4)
    rows, size = words[2], words[3]
    x, y = carray(floats_at(words[0]), (rows, 2 * size)), carray(floats_at(words[1]), (rows, size))
    for row in range(begin, end):
        gate(x[row, :size], x[row, size:], y[row])


@njit(**LOOP)
def turn_halves(x: Array, cosines: Array, sines: Array, y: Array) -> None:
    """Turn pairs of numbers that lie half of the width apart. x, y: [width]; cosines, sines: [width / 2]."""
    half = cosines.size
    low, high, turned_low, turned_high = x[:half], x[half : 2 * half], y[:half], y[half : 2 * half]
    for i in range(half):
        a, b = low[i], high[i]
        turned_low[i] = a * cosines[i] - b * sines[i]
        turned_high[i] = b * cosines[i] + a * sines[i]


@njit(**LOOP)
def turn_neighbours(x: Array, cosines: Array, sines: Array, y: Array) -> None:
    """Turn pairs of numbers that lie side by side. x, y: [width]; cosines, sines: [width / 2]."""
    for i in range(cosines.size):
        a, b = x[2 * i], x[2 * i + 1]
        y[2 * i] = a * cosines[i] - b * sines[i]
        y[2 * i + 1] = b * cosines[i] + a * sines[i]


@njit(**PLAIN)
def place_heads(words: Array, row: int, x: Array, begin: int, end: int) -> None:
    """Write heads `begin` to `end` of a token to where their parts' heads lie, turned or not. x: [(end - begin) · dim]; words: as below."""
    batch, time, dim, angles, side_by_side, parts, own_angles = words[5], words[6], words[7], words[8], words[9], words[11], words[12]
    rows_of_angles = batch * time if own_angles else time
    cosines = carray(floats_at(words[2]), (rows_of_angles if angles else 0, angles))
    sines = carray(floats_at(words[3]), (rows_of_angles if angles else 0, angles))
    table = carray(words_at(words[13]), (parts, 2))
    b, n = row // time, row % time
    turn = row if own_angles else n
    first = 0
    for part in range(parts):
        heads, turned = table[part, 0], table[part, 1]
        y = carray(floats_at(words[4] + 4 * first * dim * batch * time), (batch, heads, time, dim))
        for head in range(max(begin - first, 0), min(end - first, heads)):
            place = (first + head - begin) * dim
            own, target = x[place : place + dim], y[b, head, n]
            if turned:
                if side_by_side:
                    turn_neighbours(own, cosines[turn], sines[turn], target)
                else:
                    turn_halves(own, cosines[turn], sines[turn], target)
                target[2 * angles :] = own[2 * angles :]
            else:
                copy_row(own, target)
        first += heads


@cfunc(PART, cache=True, error_model="numpy")
def _split_rows(arguments: int, begin: int, end: int) -> None:
    """Rows `begin` to `end` of all tokens: each part's heads, with their bias and turned, to where that part's heads lie."""
    words = carray(words_at(arguments), 14)
    width, heads = words[10], words[10] // words[7]
    x = carray(floats_at(words[0]), (words[5] * words[6], width))
    bias = carray(floats_at(words[1]), width if words[1] else 0)
    row_sum = np.empty(width if bias.shape[0] else 0, np.float32)
    for row in range(begin, end):
        if bias.shape[0]:
            add_2(x[row], bias, row_sum)
            place_heads(words, row, row_sum, 0, heads)
        else:
            place_heads(words, row, x[row], 0, heads)


SUM_ROWS, BIASED_GELU_ROWS, GATED_ROWS, SPLIT_ROWS = (
    address_of(_sum_rows),
    address_of(_biased_gelu_rows),
    address_of(_gated_rows),
    address_of(_split_rows),
)


@njit(**PLAIN)
def normalize_sum(
    board: int,
    helpers: int,
    part: int,
    x: Array,
    skip: Array,
    bias: Array,
    scale: Array,
    shift: Array,
    by_mean: bool,
    epsilon: float,
    total: Array,
    y: Array,
) -> None:
    """total = x + bias + skip; y: total normalized, times scale, plus shift. part: SUM_ROWS.

    x, skip, total, y: [R, n]; scale: [n]; bias, shift: [n] or [0]. by_mean: by mean and variance, else by the root of the mean square.
    """
    rows, size = x.shape
    words, factor = np.empty(11, np.int64), np.empty(1, np.float32)
    factor[0] = epsilon
    words[0], words[1], words[3], words[5], words[6] = x.ctypes.data, skip.ctypes.data, scale.ctypes.data, total.ctypes.data, y.ctypes.data
    words[2] = bias.ctypes.data if bias.shape[0] else 0
    words[4] = shift.ctypes.data if shift.shape[0] else 0
    words[7], words[8], words[9], words[10] = rows, size, 1 if by_mean else 0, factor.ctypes.data
    share(board, helpers, part, words.ctypes.data, rows, max(1, ELEMENTS_PER_CHUNK // max(1, size)))
    keep(words)
    keep(factor)


@njit(**PLAIN)
def biased_gelu(board: int, helpers: int, part: int, x: Array, bias: Array, y: Array) -> None:
    """y = Gelu(x + bias), the approximation by tanh. part: BIASED_GELU_ROWS; x, y: [R, n], which may be one array; bias: [n]."""
    rows, size = x.shape
    words = np.empty(5, np.int64)
    words[0], words[1], words[2], words[3], words[4] = x.ctypes.data, bias.ctypes.data, y.ctypes.data, rows, size
    share(board, helpers, part, words.ctypes.data, rows, max(1, ELEMENTS_PER_CHUNK // max(1, size)))
    keep(words)


@njit(**PLAIN)
def gate_rows(board: int, helpers: int, part: int, x: Array, y: Array) -> None:
    """y = Swish(first half of x) · second half. part: GATED_ROWS; x: [R, 2n]; y: [R, n]."""
    rows, size = y.shape
    words = np.empty(4, np.int64)
    words[0], words[1], words[2], words[3] = x.ctypes.data, y.ctypes.data, rows, size
    share(board, helpers, part, words.ctypes.data, rows, max(1, ELEMENTS_PER_CHUNK // max(1, size)))
    keep(words)


@njit(**PLAIN)
def heads_words(x: Array, bias: Array, cosines: Array, sines: Array, table: Array, dim: int, side_by_side: bool, y: Array) -> Array:
    """What `place_heads` is told; the arguments are those of `split_heads`."""
    batch, time, width = x.shape
    words = np.empty(14, np.int64)
    words[0], words[2], words[3], words[4] = x.ctypes.data, cosines.ctypes.data, sines.ctypes.data, y.ctypes.data
    words[1] = bias.ctypes.data if bias.shape[0] else 0
    words[5], words[6], words[7], words[8], words[9] = batch, time, dim, cosines.shape[2], 1 if side_by_side else 0
    words[10], words[11], words[12], words[13] = width, table.shape[0], 1 if cosines.shape[0] > 1 else 0, table.ctypes.data
    return words


@njit(**PLAIN)
def split_heads(
    board: int,
    helpers: int,
    part: int,
    x: Array,
    bias: Array,
    cosines: Array,
    sines: Array,
    table: Array,
    dim: int,
    side_by_side: bool,
    y: Array,
) -> None:
    """Write each part's heads into y, one part behind the other, [B, heads, N, dim] each. part: SPLIT_ROWS.

    x: [B, N, heads of all parts · dim]; bias: as x's last axis or [0]; cosines, sines: [B or 1, N, angles], without angles where nothing's
    turned; table: [parts, 2], the heads of each part and whether they're turned; y: flat, as many as x.
    """
    words = heads_words(x, bias, cosines, sines, table, dim, side_by_side, y)
    batch, time, width = x.shape
    share(board, helpers, part, words.ctypes.data, batch * time, max(1, ELEMENTS_PER_CHUNK // max(1, width)))
    keep(words)
