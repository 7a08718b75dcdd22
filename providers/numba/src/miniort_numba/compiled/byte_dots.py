"""Products of matrices of 8 bits by the instruction that multiplies four pairs of bytes and adds them up in 32 bits (AVX-512 VNNI).

It takes the left numbers without a sign and the right ones with one; terms that are added to rows and columns afterwards make any types and
zero points of it. To be imported only where `tiles.HAS_BYTE_DOTS` says that the processor has the instruction, or it doesn't compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from miniort.types import Array
from miniort_numba.atomics import integers_at, words_at
from miniort_numba.options import EACH, PLAIN
from miniort_numba.team import PART, address_of, keep, share

FOUR = 4
"""Rows of the right matrix that are multiplied together."""

LANES = 16
"""Columns of a vector: of each it holds FOUR bytes, or one sum."""

WIDTH = 4 * LANES
"""Columns of a panel."""

ROWS = 4
"""Rows of the left matrix that a panel is multiplied with at a time: with four vectors for each, the sums stay in registers."""

STEPS_PER_CHUNK = 1 << 22
"""Multiplications that a chunk should have at least: some 10 µs."""

CHUNKS_PER_THREAD = 3
"""More chunks than threads, so that one that's slower than the others takes fewer of them."""

_Y, _A, _PANELS, _ROWS, _INNER, _COLUMNS, _ROW_TERMS, _COLUMN_TERMS, _WORDS = range(9)

_BYTE, _LONG, _INTEGER = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_LONG, LANES)


def pack(b: Array) -> tuple[Array, Array]:
    """A matrix as products take it, filled up with zeros, and the sum of each column.

    b: [K, N] int8 -> [⌈N / WIDTH⌉, ⌈K / FOUR⌉, WIDTH, FOUR] int8, [N] int64.
    """
    inner, columns = b.shape
    whole = np.zeros((-(-inner // FOUR) * FOUR, -(-columns // WIDTH) * WIDTH), np.int8)
    whole[:inner, :columns] = b
    panels = whole.reshape(len(whole) // FOUR, FOUR, whole.shape[1] // WIDTH, WIDTH).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(panels), b.sum(axis=0, dtype=np.int64)


def _tile(rows: int) -> Any:
    """The function for so many rows."""

    @intrinsic
    def multiply_tile(typingctx: Any, y: Any, a: Any, a_step: Any, b: Any, count: Any) -> Any:
        """y[rows, WIDTH] = a[rows, FOUR · count] · b, by their addresses. a_step: bytes from row to row of a; count > 0."""

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            y_at, a_at, a_step, b_at, count = given
            y_at = builder.inttoptr(y_at, _VECTOR.as_pointer())
            b_at = builder.inttoptr(b_at, _VECTOR.as_pointer())
            multiply = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), "llvm.x86.avx512.vpdpbusd.512"
            )
            vectors = range(WIDTH // LANES)
            starts = [builder.add(a_at, builder.mul(a_step, ir.Constant(_INTEGER, row))) for row in range(rows)]
            undefined, first_lane = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_VECTOR, None)
            before, loop, after = builder.block, builder.append_basic_block("sum"), builder.append_basic_block("summed")
            builder.branch(loop)

            builder.position_at_end(loop)
            k = builder.phi(_INTEGER)
            k.add_incoming(ir.Constant(_INTEGER, 0), before)
            sums = [builder.phi(_VECTOR) for _ in range(rows * len(vectors))]
            place = builder.mul(k, ir.Constant(_INTEGER, len(vectors)))
            right = [builder.load(builder.gep(b_at, [builder.add(place, ir.Constant(_INTEGER, index))]), align=1) for index in vectors]
            added = []
            for row, start in enumerate(starts):
                four = builder.load(builder.gep(builder.inttoptr(start, _LONG.as_pointer()), [k]), align=1)
                one = builder.insert_element(undefined, four, ir.Constant(_LONG, 0))
                left = builder.shuffle_vector(one, undefined, first_lane)
                added += [builder.call(multiply, [sums[row * len(vectors) + index], left, right[index]]) for index in vectors]
            following = builder.add(k, ir.Constant(_INTEGER, 1))
            k.add_incoming(following, loop)
            for value, next_value in zip(sums, added, strict=True):
                value.add_incoming(ir.Constant(_VECTOR, None), before)
                value.add_incoming(next_value, loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

            builder.position_at_end(after)
            for index, value in enumerate(added):
                builder.store(value, builder.gep(y_at, [ir.Constant(_INTEGER, index)]), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return multiply_tile


_multiply_rows, _multiply_row = _tile(ROWS), _tile(1)


@njit(**EACH)
def _write_row(y: Array, sums: Array, column_terms: Array, row_term: np.int32) -> None:
    """y = sums + column_terms + row_term. All: [n] int32."""
    for j in range(y.size):
        y[j] = sums[j] + column_terms[j] + row_term


@cfunc(PART, cache=True, error_model="numpy")
def _products(arguments: int, begin: int, end: int) -> None:
    """Panels `begin` to `end` of the right matrix."""
    words = carray(words_at(arguments), _WORDS)
    rows, inner, columns = words[_ROWS], words[_INNER], words[_COLUMNS]
    y = carray(integers_at(words[_Y]), (rows, columns))
    row_terms, column_terms = carray(integers_at(words[_ROW_TERMS]), rows), carray(integers_at(words[_COLUMN_TERMS]), columns)
    sums = np.zeros((ROWS, WIDTH), np.int32)
    for panel in range(begin, end):
        first, last = panel * WIDTH, min((panel + 1) * WIDTH, columns)
        right, r = words[_PANELS] + panel * inner * WIDTH, 0
        while r < rows:
            left, together = words[_A] + r * inner, ROWS if r + ROWS <= rows else 1
            if together == ROWS:
                _multiply_rows(sums.ctypes.data, left, inner, right, inner // FOUR)
            else:
                _multiply_row(sums.ctypes.data, left, inner, right, inner // FOUR)
            for index in range(together):
                _write_row(y[r + index, first:last], sums[index], column_terms[first:last], row_terms[r + index])
            r += together
    keep(sums)


PRODUCTS = address_of(_products)


@njit(**PLAIN)
def multiply(board: int, helpers: int, part: int, a: Array, panels: Array, column_terms: Array, row_terms: Array, y: Array) -> None:
    """y = a · b + column_terms + row_terms. part: PRODUCTS.

    a: [M, K] uint8, K a multiple of FOUR and above 0; panels: of b, see `pack`; column_terms: [N]; row_terms: [M]; y: [M, N], int32.
    """
    rows, columns = y.shape
    words = np.empty(_WORDS, np.int64)
    words[_Y], words[_A], words[_PANELS] = y.ctypes.data, a.ctypes.data, panels.ctypes.data
    words[_ROWS], words[_INNER], words[_COLUMNS] = rows, a.shape[1], columns
    words[_ROW_TERMS], words[_COLUMN_TERMS] = row_terms.ctypes.data, column_terms.ctypes.data
    count = panels.shape[0]
    pieces = max(1, min((helpers + 1) * CHUNKS_PER_THREAD, rows * panels.size // STEPS_PER_CHUNK)) if helpers else 1
    share(board, helpers, part, words.ctypes.data, count, max(1, -(-count // pieces)))
    keep(words)
