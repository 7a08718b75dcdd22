"""Products with matrices in panels, of float32 or of 8 bits, shared by the crew: one matrix, or one for each direction of a layer."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, signed_bytes_at, words_at
from miniort_numba.compiled.panels import add_byte_panels, add_panels
from miniort_numba.compiled.row_products import WIDTH
from miniort_numba.options import PLAIN
from miniort_numba.team import PART, address_of, keep, share

PANELS, COUNT, INNER, SCALE, ZERO = range(5)
"""The words of D matrices of one size: the addresses of [D, COUNT, INNER, WIDTH] elements, and, if they're of 8 bits, of scales and zero
points, [D, COUNT · WIDTH] float32; else 0."""

MATRIX_WORDS = 5

_Y, _A, _ROWS, _FACTOR, _FIRST, _MATRIX = range(6)

STEPS_PER_CHUNK = 1 << 20
"""Multiplications that a chunk should have at least: some 10 µs."""

FEW_ROWS = 16
"""So many rows take as long as the reading of the matrix."""

CHUNKS_PER_THREAD = 3
"""More chunks than threads, so that one that's slower than the others takes fewer of them."""


@cfunc(PART, cache=True, error_model="numpy")
def _add_products(arguments: int, begin: int, end: int) -> None:
    """Panels `begin` to `end`, counted from the first one and on through all matrices."""
    words = carray(words_at(arguments), _MATRIX + MATRIX_WORDS)
    matrix = words[_MATRIX:]
    rows, count, inner = words[_ROWS], matrix[COUNT], matrix[INNER]
    a, columns = carray(floats_at(words[_A]), (rows, inner)), count * WIDTH
    start, last = words[_FIRST] + begin, words[_FIRST] + end
    while start < last:
        way = start // count
        stop = min(last, (way + 1) * count)
        first = start - way * count
        y = carray(floats_at(words[_Y] + 4 * (way - words[_FIRST] // count) * rows * columns), (rows, columns))
        if matrix[SCALE]:
            scale = carray(floats_at(matrix[SCALE] + 4 * way * columns), columns)
            zero = carray(floats_at(matrix[ZERO] + 4 * way * columns), columns)
            panels = carray(signed_bytes_at(matrix[PANELS] + way * inner * columns), (count, inner, WIDTH))
            factor = carray(floats_at(words[_FACTOR]), 1)[0]
            add_byte_panels(y, a, factor, panels, scale, zero, first, stop - way * count)
        else:
            whole = carray(floats_at(matrix[PANELS] + 4 * way * inner * columns), (count, inner, WIDTH))
            add_panels(y, a, whole, first, stop - way * count)
        start = stop


ADD_PRODUCTS = address_of(_add_products)


@njit(**PLAIN)
def add_products(board: int, helpers: int, part: int, y: int, a: Array, factor: np.float32, matrix: Array, first: int, count: int) -> None:
    """y += factor · a · matrix, in the columns of `count` panels from panel `first` on; they may go on through the next matrices.

    part: ADD_PRODUCTS; y: the address of [matrices, R, COUNT · WIDTH] float32, of the first matrix that's used on; a: [R, INNER] float32;
    factor: of a matrix of 8 bits, where a's numbers are whole, see `add_byte_panels`; matrix: [MATRIX_WORDS].
    """
    words, numbers = np.empty(_MATRIX + MATRIX_WORDS, np.int64), np.empty(1, np.float32)
    numbers[0] = factor
    words[_Y], words[_A], words[_ROWS], words[_FACTOR], words[_FIRST] = y, a.ctypes.data, a.shape[0], numbers.ctypes.data, first
    words[_MATRIX:] = matrix
    work = count * WIDTH * matrix[INNER] * max(FEW_ROWS, a.shape[0])
    pieces = max(1, min((helpers + 1) * CHUNKS_PER_THREAD, work // STEPS_PER_CHUNK)) if helpers else 1
    share(board, helpers, part, words.ctypes.data, count, max(1, -(-count // pieces)))
    keep(words)
    keep(numbers)
