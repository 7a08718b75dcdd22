"""Products with a matrix of weights. With a few rows it's read once, from front to back, so that they're as fast as memory is."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit, types

from miniort.types import Array
from miniort_numba.atomics import call_finish, floats_at, words_at
from miniort_numba.compiled.multiply_add import add_rows, dot_products
from miniort_numba.compiled.tiles import LANES, STRIP, add_strip, copy_strip, set_strip
from miniort_numba.compiled.transposition import turn_strip
from miniort_numba.options import PLAIN
from miniort_numba.team import LINE, PART, address_of, keep, share

COLUMNS = 16
"""Columns of a matrix stored column by column that a few rows are multiplied with, one after the other, while they're in the cache."""

DEPTH = 384
"""Rows of the matrix that are copied together for a strip of columns: 48 KB. With fewer, the result is read and written more often."""

TOGETHER = 8
"""Strips that are copied together, as memory is read faster from front to back: 384 KB, which the second cache holds."""

FEW_ROWS = 256
"""Rows up to which the matrix's reading shows: of twice as many strips, more lies side by side."""

ROWS_TOGETHER = 64
"""Rows that are multiplied with one strip after the other, and finished, while they're in the second cache."""

WORDS_PER_CHUNK = 1 << 16
"""Elements of the matrix that a chunk should have at least: 256 KB, which takes some 20 µs to read."""

STEPS_PER_CHUNK = 1 << 20
"""Multiplications of a product of many rows that a chunk should have at least: some 20 µs."""

FINISH = types.void(*[types.intp] * 5)
"""The type of what a product may end with, while its rows are in the second cache: ``finish(arguments, begin, end, start, width)``.

It's called for rows `begin` to `end` of `width` columns from `start` on, once these are whole, from any thread.
"""

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


@njit(**PLAIN)
def _copy_part(target: int, corner: int, row_step: int, column_step: int, depth: int, width: int) -> None:
    """Copy `width` columns of `depth` rows of a matrix, as tiles read them: [strips, depth, STRIP], with 0 behind the last column.

    target, corner: addresses of the copy and of the first element; steps: in elements.
    """
    whole, rest = width // STRIP, width % STRIP
    part = carray(floats_at(target), (whole + (1 if rest else 0), depth, STRIP))
    if rest:
        part[whole, :, rest:] = 0
    if column_step == 1:
        for k in range(depth):
            source = corner + 4 * k * row_step
            for strip in range(whole):
                copy_strip(target + 4 * (strip * depth + k) * STRIP, source + 4 * strip * STRIP)
            if rest:
                part[whole, k, :rest] = carray(floats_at(source + 4 * whole * STRIP), rest)
    else:
        for first in range(0, width, LANES):
            source, strip, place = corner + 4 * first * column_step, first // STRIP, first % STRIP
            done = 0
            if first + LANES <= width:
                done = turn_strip(target + 4 * (strip * depth * STRIP + place), STRIP, source, column_step, depth)
            for lane in range(min(LANES, width - first)):
                column = carray(floats_at(source + 4 * lane * column_step), depth)
                for k in range(done, depth):
                    part[strip, k, place + lane] = column[k]


@cfunc(PART, cache=True, error_model="numpy")
def _rows_by_strips(arguments: int, begin: int, end: int) -> None:
    """Many rows times a matrix in either order: units of strips of the result, all of them at once for a few rows at a time.

    Their part of the matrix is copied, to lie as tiles read it.
    """
    words = carray(words_at(arguments), 12)
    rows, inner, columns, row_step, column_step, unit, bands = words[5], words[3], words[4], words[6], words[7], words[8], words[9]
    band = columns // bands
    begin, end = begin * unit, min(end * unit, (band + STRIP - 1) // STRIP)
    strips, start = end - begin, begin * STRIP
    width = min(strips * STRIP, band - start)
    whole = width // STRIP
    deep = -(-inner // -(-inner // DEPTH))  # parts of one depth, not a small one at the end
    memory = np.empty(bands * strips * deep * STRIP + LINE // 4, np.float32)
    part = -(-memory.ctypes.data // LINE) * LINE  # a vector that lies in two lines of the cache takes two reads
    edge = np.empty((rows if whole < strips else 0, STRIP), np.float32)  # columns that don't fill a strip
    for first in range(0, inner, deep):
        depth = min(deep, inner - first)
        for index in range(bands):
            corner = words[2] + 4 * (first * row_step + (index * band + start) * column_step)
            _copy_part(part + 4 * index * strips * depth * STRIP, corner, row_step, column_step, depth, width)
        for row in range(0, rows, ROWS_TOGETHER):
            count = min(ROWS_TOGETHER, rows - row)
            left = words[1] + 4 * (row * inner + first)
            for strip in range(bands * strips):
                packed = part + 4 * strip * depth * STRIP
                index, place = strip // strips, strip % strips
                target, step = words[0] + 4 * (row * columns + index * band + start + place * STRIP), columns
                if place == whole:
                    target, step = edge.ctypes.data + 4 * row * STRIP, STRIP
                if first == 0:
                    set_strip(target, step, left, inner, packed, STRIP, count, depth)
                else:
                    add_strip(target, step, left, inner, packed, STRIP, count, depth)
            if first + depth == inner:
                if whole < strips:
                    rest = width - whole * STRIP
                    for r in range(row, row + count):
                        y = carray(floats_at(words[0] + 4 * (r * columns + start + whole * STRIP)), rest)
                        y[:] = edge[r, :rest]
                if words[10]:
                    call_finish(words[10], words[11], row, row + count, start, width)
    keep(memory)
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
def multiply_row(board: int, helpers: int, by_rows: int, a: Array, b: Array, finish: int, arguments: int, y: Array) -> None:
    """y = a · b, then `finish`, see FINISH; 0: nothing. by_rows: BY_ROWS, which compiled code can't keep as a constant.

    a: [K], b: [K, N], stored row by row; y: [N].
    """
    inner, columns = b.shape
    chunk = _chunk(inner, columns, helpers, 8)
    count = (inner + chunk - 1) // chunk
    addends = np.empty((count, columns), np.float32)
    words = np.empty(6, np.int64)
    words[0], words[1], words[2] = addends.ctypes.data, a.ctypes.data, b.ctypes.data
    words[3], words[4], words[5] = inner, columns, chunk
    if count == 1:
        words[0] = y.ctypes.data
    share(board, helpers, by_rows, words.ctypes.data, inner, chunk)
    keep(words)
    if count > 1:
        for j in range(columns):
            y[j] = addends[0, j]
        for part in range(1, count):
            for j in range(columns):
                y[j] += addends[part, j]
    if finish:
        call_finish(finish, arguments, 0, 1, 0, columns)


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
def _units_of_chunk(units: int, unit: int, rows: int, inner: int, threads: int) -> int:
    """How many units of `unit` strips of a product a chunk should have, so that all threads end at about the same time."""
    if units * unit * STRIP * rows * inner < 2 * STEPS_PER_CHUNK:
        return max(1, units)
    narrowest, widest = (1, TOGETHER) if rows > FEW_ROWS else (TOGETHER, 2 * TOGETHER)
    best, least = 1, units + 1
    for chunk in range(max(1, widest // unit), max(1, narrowest // unit) - 1, -1):
        longest = -(-units // (chunk * threads)) * chunk
        if longest < least:
            best, least = chunk, longest
    return best


@njit(**PLAIN)
def multiply_many_rows(
    board: int, helpers: int, by_strips: int, a: Array, b: Array, unit: int, bands: int, finish: int, arguments: int, y: Array
) -> None:
    """y = a · b, then `finish`, see FINISH; 0: nothing. by_strips: BY_STRIPS; unit: how many strips `finish` wants together.

    bands: 2 where it wants columns of the first half with those of the second, which are whole strips then; it's told where they are in
    the first. Else 1.
    a: [R, K], b: [K, N], stored in either order; y: [R, N].
    """
    inner, columns = b.shape
    rows = a.shape[0]
    if inner == 0:
        y[:] = 0
        if finish:
            call_finish(finish, arguments, 0, rows, 0, columns)
        return
    words = np.empty(12, np.int64)
    words[0], words[1], words[2] = y.ctypes.data, a.ctypes.data, b.ctypes.data
    words[3], words[4], words[5] = inner, columns, rows
    words[6], words[7] = b.strides[0] // 4, b.strides[1] // 4
    words[8], words[9], words[10], words[11] = unit, bands, finish, arguments
    units = (columns // bands + unit * STRIP - 1) // (unit * STRIP)
    share(board, helpers, by_strips, words.ctypes.data, units, _units_of_chunk(units, bands * unit, rows, inner, helpers + 1))
    keep(words)
