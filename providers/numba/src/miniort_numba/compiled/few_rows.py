"""Products of a few rows, such as those of a short prompt or of a batch, with a matrix of weights, which is read once and not copied.

In either order of storage a matrix is read as it lies. With more rows than `MOST_ROWS` it pays to copy parts of it, as `products` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.multiply_add import add_row, dot_products
from miniort_numba.compiled.tiles import LANES, vector_multiply_add
from miniort_numba.options import LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share

MOST_ROWS = 24
"""Rows up to which that's faster than to copy the matrix in parts."""

DEEP = 16 if LANES == 16 else 8
"""Rows of the matrix that are multiplied together: a vector of each fits into the registers, and sums are read and written that often."""

SUMS = 8192
"""Elements of the sums that are kept together, 32 KB: they stay in the first cache while the matrix passes by."""

PIECES_PER_THREAD = 2

_FLOAT, _INTEGER, _WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_UNALIGNED = 4


@intrinsic
def _add_deep(typingctx: Any, y: Any, y_step: Any, a: Any, a_step: Any, b: Any, b_step: Any, rows: Any, columns: Any) -> Any:
    """y[rows, columns] += a[rows, DEEP] · b[DEEP, columns], by their addresses, steps in elements. columns: a multiple of LANES, above 0.

    The DEEP rows that follow those of b are asked for from memory in passing.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        y, y_step, a, a_step, b, b_step, rows, columns = given
        y, a, b = (builder.inttoptr(each, _FLOAT.as_pointer()) for each in (y, a, b))
        byte = ir.IntType(8).as_pointer()
        multiply_add = vector_multiply_add(builder)
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD]), "llvm.prefetch.p0"
        )
        undefined, first_lane = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.VectorType(_WORD, LANES), None)

        def constant(value: int) -> Any:
            return ir.Constant(_INTEGER, value)

        def vector_at(base: Any, offset: Any) -> Any:
            return builder.bitcast(builder.gep(base, [offset]), _VECTOR.as_pointer())

        b_rows = [builder.gep(b, [builder.mul(constant(k), b_step)]) for k in range(DEEP)]
        before, column_loop, row_loop, column_end, after = builder.block, *(builder.append_basic_block() for _ in range(4))
        builder.branch(column_loop)

        builder.position_at_end(column_loop)
        j = builder.phi(_INTEGER)
        j.add_incoming(constant(0), before)
        vectors = [builder.load(vector_at(row, j), align=_UNALIGNED) for row in b_rows]
        ahead = builder.add(j, builder.mul(constant(DEEP), b_step))
        for row in b_rows:
            place = builder.bitcast(builder.gep(row, [ahead]), byte)
            builder.call(prefetch, [place, ir.Constant(_WORD, 0), ir.Constant(_WORD, 3), ir.Constant(_WORD, 1)])
        builder.branch(row_loop)

        builder.position_at_end(row_loop)
        r = builder.phi(_INTEGER)
        r.add_incoming(constant(0), column_loop)
        target = vector_at(y, builder.add(builder.mul(r, y_step), j))
        a_row = builder.gep(a, [builder.mul(r, a_step)])
        sums = [builder.load(target, align=_UNALIGNED), None]  # two, as a sum has to wait for the one before
        for k, vector in enumerate(vectors):
            one = builder.insert_element(undefined, builder.load(builder.gep(a_row, [constant(k)])), ir.Constant(_WORD, 0))
            factor = builder.shuffle_vector(one, undefined, first_lane)
            own = sums[k % 2]
            sums[k % 2] = builder.fmul(factor, vector) if own is None else builder.call(multiply_add, [factor, vector, own])
        builder.store(builder.fadd(*sums), target, align=_UNALIGNED)
        next_row = builder.add(r, constant(1))
        r.add_incoming(next_row, row_loop)
        builder.cbranch(builder.icmp_signed("<", next_row, rows), row_loop, column_end)

        builder.position_at_end(column_end)
        next_column = builder.add(j, constant(LANES))
        j.add_incoming(next_column, column_end)
        builder.cbranch(builder.icmp_signed("<", next_column, columns), column_loop, after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8), generate


@cfunc(PART, cache=True, error_model="numpy")
def _few_by_rows(arguments: int, begin: int, end: int) -> None:
    """A few rows times a matrix stored row by row: units `begin` to `end` of the result, of LANES columns each."""
    words = carray(words_at(arguments), 6)
    rows, inner, columns = words[5], words[3], words[4]
    block = max(4, SUMS // rows // LANES) * LANES
    step = block + LANES  # not a multiple of a page's size, or all rows would want the same place in the cache
    sums = np.empty((rows, step), np.float32)
    a = carray(floats_at(words[1]), (rows, inner))
    b = carray(floats_at(words[2]), (inner, columns))
    y = carray(floats_at(words[0]), (rows, columns))
    for first in range(begin * LANES, min(end * LANES, columns), block):
        width = min(block, end * LANES - first, columns - first)
        whole = width // LANES * LANES
        sums[:, :width] = 0
        deep = inner // DEEP * DEEP
        if whole:
            for k in range(0, deep, DEEP):
                _add_deep(sums.ctypes.data, step, words[1] + 4 * k, inner, words[2] + 4 * (k * columns + first), columns, rows, whole)
        for r in range(rows):
            own = sums[r]
            for k in range(deep, inner):
                add_row(own[:width], a[r, k], b[k, first : first + width])
            if whole < width:
                for k in range(deep):
                    add_row(own[whole:width], a[r, k], b[k, first + whole : first + width])
            y[r, first : first + width] = own[:width]
    keep(sums)


@njit(**LOOP)
def dot_tile(y: Array, a: Array, b: Array, r: int, j: int) -> None:
    """y[r : r+4, j : j+4] = a[r : r+4] · b[j : j+4]ᵀ. y: [R, N], a: [R, K], b: [N, K]."""
    a0, a1, a2, a3, b0, b1, b2, b3 = a[r], a[r + 1], a[r + 2], a[r + 3], b[j], b[j + 1], b[j + 2], b[j + 3]
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = np.float32(0)
    for k in range(a0.size):
        u, v, w, x = b0[k], b1[k], b2[k], b3[k]
        s00 += a0[k] * u
        s01 += a0[k] * v
        s02 += a0[k] * w
        s03 += a0[k] * x
        s10 += a1[k] * u
        s11 += a1[k] * v
        s12 += a1[k] * w
        s13 += a1[k] * x
        s20 += a2[k] * u
        s21 += a2[k] * v
        s22 += a2[k] * w
        s23 += a2[k] * x
        s30 += a3[k] * u
        s31 += a3[k] * v
        s32 += a3[k] * w
        s33 += a3[k] * x
    y[r, j], y[r, j + 1], y[r, j + 2], y[r, j + 3] = s00, s01, s02, s03
    y[r + 1, j], y[r + 1, j + 1], y[r + 1, j + 2], y[r + 1, j + 3] = s10, s11, s12, s13
    y[r + 2, j], y[r + 2, j + 1], y[r + 2, j + 2], y[r + 2, j + 3] = s20, s21, s22, s23
    y[r + 3, j], y[r + 3, j + 1], y[r + 3, j + 2], y[r + 3, j + 3] = s30, s31, s32, s33


@cfunc(PART, cache=True, error_model="numpy")
def _few_by_dots(arguments: int, begin: int, end: int) -> None:
    """A few rows times a matrix stored column by column: columns `begin` to `end` of the result, four at a time."""
    words = carray(words_at(arguments), 6)
    rows, inner, columns = words[5], words[3], words[4]
    y = carray(floats_at(words[0]), (rows, columns))
    a = carray(floats_at(words[1]), (rows, inner))
    b = carray(floats_at(words[2]), (columns, inner))
    for j in range(begin, end, 4):
        last = min(j + 4, end)
        r = 0
        if last - j == 4:
            while r + 4 <= rows:
                dot_tile(y, a, b, r, j)
                r += 4
        while r < rows:
            dot_products(y[r], a[r], b, j, last)
            r += 1


FEW_BY_ROWS, FEW_BY_DOTS = address_of(_few_by_rows), address_of(_few_by_dots)


@njit(**PLAIN)
def _multiply(board: int, helpers: int, part: int, a: Array, b: int, y: Array, units: int, unit: int) -> None:
    rows, columns = y.shape
    words = np.empty(6, np.int64)
    words[0], words[1], words[2] = y.ctypes.data, a.ctypes.data, b
    words[3], words[4], words[5] = a.shape[1], columns, rows
    pieces = (helpers + 1) * PIECES_PER_THREAD if helpers else 1
    share(board, helpers, part, words.ctypes.data, units, max(unit, -(-units // pieces // unit) * unit))
    keep(words)


@njit(**PLAIN)
def multiply_few_rows(board: int, helpers: int, by_rows: int, a: Array, b: Array, y: Array) -> None:
    """y = a · b for 2 to MOST_ROWS rows. a: [R, K], b: [K, N], stored row by row; y: [R, N]. by_rows: FEW_BY_ROWS."""
    _multiply(board, helpers, by_rows, a, b.ctypes.data, y, (y.shape[1] + LANES - 1) // LANES, 1)


@njit(**PLAIN)
def multiply_few_rows_by_dots(board: int, helpers: int, by_dots: int, a: Array, b: Array, y: Array) -> None:
    """y = a · bᵀ for 2 to MOST_ROWS rows. a: [R, K], b: [N, K]; y: [R, N]. by_dots: FEW_BY_DOTS."""
    _multiply(board, helpers, by_dots, a, b.ctypes.data, y, y.shape[1], 4)
