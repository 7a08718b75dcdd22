"""Products with a matrix of weights. With a few rows it's read once, from front to back, so that they're as fast as memory is."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.multiply_add import add_rows, dot_products
from miniort_numba.compiled.tiles import LANES, STRIP, add_strip, copy_strip, set_strip
from miniort_numba.compiled.transposition import turn_strip
from miniort_numba.options import PLAIN
from miniort_numba.team import PART, address_of, keep, share

COLUMNS = 16
"""Columns of a matrix stored column by column that a few rows are multiplied with, one after the other, while they're in the cache."""

DEPTH = 384
"""Rows of the matrix that are copied together for a strip of columns: 48 KB. With fewer, the result is read and written more often."""

TOGETHER = 8
"""Strips that are copied together, as memory is read faster from front to back: 384 KB, which the second cache holds."""

WORDS_PER_CHUNK = 1 << 16
"""Elements of the matrix that a chunk should have at least: 256 KB, which takes some 20 µs to read."""

STEPS_PER_CHUNK = 1 << 20
"""Multiplications of a product of many rows that a chunk should have at least: some 20 µs."""

CHUNKS_PER_THREAD = 3
"""More chunks than threads, so that one that's slower than the others takes fewer of them."""


@cfunc(PART, cache=True, error_model="numpy")
def _row_by_rows(arguments: int, begin: int, end: int) -> None:
    """One row times a matrix stored row by row: rows `begin` to `end` of it give an addend of all columns."""
    words = carray(words_at(arguments), 6)
    inner, columns, chunk = words[3], words[4], words[5]
    a = carray(floats_at(words[1]), inner)
    b = carray(floats_at(words[2]), (inner, columns))
    y = carray(floats_at(words[0]), ((inner + chunk - 1) // chunk, columns))[begin // chunk]
    y[:] = 0
    add_rows(y, a, b, begin, end)


@cfunc(PART, cache=True, error_model="numpy")
def _rows_by_dots(arguments: int, begin: int, end: int) -> None:
    """A few rows times a matrix stored column by column: columns `begin` to `end` of the result, a few at a time."""
    words = carray(words_at(arguments), 6)
    rows, inner, columns = words[5], words[3], words[4]
    y = carray(floats_at(words[0]), (rows, columns))
    a = carray(floats_at(words[1]), (rows, inner))
    b = carray(floats_at(words[2]), (columns, inner))
    together = end - begin if rows == 1 else COLUMNS
    for start in range(begin, end, together):
        for row in range(rows):
            dot_products(y[row], a[row], b, start, min(start + together, end))


@cfunc(PART, cache=True, error_model="numpy")
def _rows_by_strips(arguments: int, begin: int, end: int) -> None:
    """Many rows times a matrix in either order: strips `begin` to `end` of the result.

    Their part of the matrix is copied, to lie as tiles read it.
    """
    words = carray(words_at(arguments), 8)
    rows, inner, columns, row_step, column_step = words[5], words[3], words[4], words[6], words[7]
    y = carray(floats_at(words[0]), (rows, columns))
    part = np.empty((TOGETHER, DEPTH, STRIP), np.float32)
    edge = np.empty((rows, STRIP), np.float32) if end * STRIP > columns else np.empty((0, STRIP), np.float32)
    edge[:] = 0
    if inner == 0:
        for r in range(rows):
            y[r, begin * STRIP : min(end * STRIP, columns)] = 0
    deep = -(-inner // max(1, -(-inner // DEPTH)))  # parts of one depth, not a small one at the end
    for first in range(0, inner, max(1, deep)):
        depth = min(deep, inner - first)
        left = words[1] + 4 * first
        for group in range(begin, end, TOGETHER):
            strips = min(TOGETHER, end - group)
            start = group * STRIP
            corner = words[2] + 4 * (first * row_step + start * column_step)
            whole = min(strips, (columns - start) // STRIP)
            if column_step == 1:
                for k in range(depth):
                    source, target = corner + 4 * k * row_step, part.ctypes.data + 4 * k * STRIP
                    for strip in range(whole):
                        copy_strip(target + 4 * strip * DEPTH * STRIP, source + 4 * strip * STRIP)
                if whole < strips:
                    rest = columns - start - whole * STRIP
                    for k in range(depth):
                        part[whole, k, :rest] = carray(floats_at(corner + 4 * (k * row_step + whole * STRIP)), rest)
            else:
                for first_column in range(0, min(strips * STRIP, columns - start), LANES):
                    width = min(LANES, columns - start - first_column)
                    source = corner + 4 * first_column * column_step
                    strip, j = first_column // STRIP, first_column % STRIP
                    done = 0
                    if width == LANES:
                        target = part[strip].ctypes.data + 4 * j
                        done = turn_strip(target, STRIP, source, column_step, depth)
                    for lane in range(width):
                        column = carray(floats_at(source + 4 * lane * column_step), depth)
                        for k in range(done, depth):
                            part[strip, k, j + lane] = column[k]
            for strip in range(strips):
                packed = part.ctypes.data + 4 * strip * DEPTH * STRIP
                width = columns - start - strip * STRIP
                if width >= STRIP and first == 0:
                    set_strip(words[0] + 4 * (start + strip * STRIP), columns, left, inner, packed, STRIP, rows, depth)
                elif width >= STRIP:
                    add_strip(words[0] + 4 * (start + strip * STRIP), columns, left, inner, packed, STRIP, rows, depth)
                else:
                    part[strip, :depth, width:] = 0
                    add_strip(edge.ctypes.data, STRIP, left, inner, packed, STRIP, rows, depth)
    if edge.shape[0]:
        start = columns // STRIP * STRIP
        for r in range(rows):
            y[r, start:] = edge[r, : columns - start]
    keep(part)
    keep(edge)


BY_ROWS, BY_DOTS, BY_STRIPS = address_of(_row_by_rows), address_of(_rows_by_dots), address_of(_rows_by_strips)


@njit(**PLAIN)
def _chunk(size: int, other: int, helpers: int, unit: int) -> int:
    """Units of `size` for one chunk, each of `other` elements: a multiple of `unit`."""
    threads = helpers + 1
    count = max(1, min(threads * CHUNKS_PER_THREAD, size * other // WORDS_PER_CHUNK)) if helpers else 1
    if count > threads:
        count = count // threads * threads  # or some thread would do the last one while others wait
    return max(unit, -(-size // count // unit) * unit)


@njit(**PLAIN)
def multiply_row(board: int, helpers: int, by_rows: int, a: Array, b: Array, y: Array) -> None:
    """y = a · b. a: [K], b: [K, N], stored row by row; y: [N]. by_rows: BY_ROWS, which compiled code can't keep as a constant."""
    inner, columns = b.shape
    chunk = _chunk(inner, columns, helpers, 8)
    count = (inner + chunk - 1) // chunk
    addends = np.empty((count, columns), np.float32)
    words = np.empty(6, np.int64)
    words[0], words[1], words[2] = addends.ctypes.data, a.ctypes.data, b.ctypes.data
    words[3], words[4], words[5] = inner, columns, chunk
    if count == 1:
        words[0] = y.ctypes.data
        share(board, helpers, by_rows, words.ctypes.data, inner, inner)
        keep(words)
        return
    share(board, helpers, by_rows, words.ctypes.data, inner, chunk)
    keep(words)
    for j in range(columns):
        y[j] = addends[0, j]
    for part in range(1, count):
        for j in range(columns):
            y[j] += addends[part, j]


@njit(**PLAIN)
def multiply_rows_by_dots(board: int, helpers: int, by_dots: int, a: Array, b: Array, y: Array) -> None:
    """y = a · bᵀ for a few rows. a: [R, K], b: [N, K]; y: [R, N]. by_dots: BY_DOTS."""
    columns, inner = b.shape
    words = np.empty(6, np.int64)
    words[0], words[1], words[2] = y.ctypes.data, a.ctypes.data, b.ctypes.data
    words[3], words[4], words[5] = inner, columns, a.shape[0]
    share(board, helpers, by_dots, words.ctypes.data, columns, _chunk(columns, inner, helpers, 4))
    keep(words)


@njit(**PLAIN)
def multiply_many_rows(board: int, helpers: int, by_strips: int, a: Array, b: Array, y: Array) -> None:
    """y = a · b. a: [R, K], b: [K, N], stored in either order; y: [R, N]. by_strips: BY_STRIPS."""
    inner, columns = b.shape
    words = np.empty(8, np.int64)
    words[0], words[1], words[2] = y.ctypes.data, a.ctypes.data, b.ctypes.data
    words[3], words[4], words[5] = inner, columns, a.shape[0]
    words[6], words[7] = b.strides[0] // 4, b.strides[1] // 4
    strips = (columns + STRIP - 1) // STRIP
    pieces = max(1, min((helpers + 1) * 2, strips * STRIP * inner * a.shape[0] // STEPS_PER_CHUNK)) if helpers else 1
    share(board, helpers, by_strips, words.ctypes.data, strips, max(1, -(-strips // pieces)))
    keep(words)
