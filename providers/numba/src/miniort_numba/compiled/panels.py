"""Products with a matrix that was packed once: panels of WIDTH columns, each read from front to back, with sums in vector registers.

For matrices that few rows are multiplied with again and again, as a recurrent layer does in each step. Packed, of float32 or of 8 bits,
they stay in a core's second cache if they fit there, and nothing is copied for a product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from miniort.types import Array
from miniort_numba.compiled.integers import subtract_zero
from miniort_numba.compiled.row_products import WIDTH, add_values
from miniort_numba.compiled.tiles import LANES, STRIP, add_strip, vector_multiply_add
from miniort_numba.options import EACH, LOOP, PLAIN

ROW_BY_ROW, BYTES_ROW_BY_ROW = 3, 4
"""So many rows are multiplied one after the other; more of them by tiles, for which 8 bits have to be made floats first."""

_FLOAT, _INTEGER = ir.FloatType(), ir.IntType(64)
_VECTOR, _PLACES = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)


def pack(matrix: Array) -> Array:
    """A matrix in panels. [K, P · WIDTH] -> [P, K, WIDTH]."""
    inner, columns = matrix.shape
    return np.ascontiguousarray(matrix.reshape(inner, columns // WIDTH, WIDTH).swapaxes(0, 1))


@njit(**PLAIN)
def add_panels(y: Array, a: Array, panels: Array, begin: int, end: int) -> None:
    """y += a · matrix, of the columns in panels `begin` to `end`. y: [R, P · WIDTH], a: [R, K], panels: [P, K, WIDTH], float32."""
    rows, inner = a.shape
    for panel in range(begin, end):
        first = panel * WIDTH
        if rows <= ROW_BY_ROW:
            for r in range(rows):
                add_values(y[r, first : first + WIDTH], a[r], panels[panel])
        elif inner:
            for column in range(0, WIDTH, STRIP):
                target, source = y.ctypes.data + 4 * (first + column), panels[panel].ctypes.data + 4 * column
                add_strip(target, y.shape[1], a.ctypes.data, inner, source, WIDTH, rows, inner)


@intrinsic
def _multiply_bytes(typingctx: Any, y: Any, a: Any, b: Any, pairs: Any) -> Any:
    """y[WIDTH] = a[2 · pairs] · b[2 · pairs, WIDTH], by their addresses; b: int8. pairs > 0."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        y, a = (builder.inttoptr(each, _FLOAT.as_pointer()) for each in given[:2])
        b, pairs = builder.inttoptr(given[2], ir.IntType(8).as_pointer()), given[3]
        multiply_add = vector_multiply_add(builder)
        undefined, first_lane, zero = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_PLACES, None), ir.Constant(_VECTOR, None)
        columns = range(0, WIDTH, LANES)
        before, loop, after = builder.block, builder.append_basic_block("sum"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INTEGER)
        k.add_incoming(ir.Constant(_INTEGER, 0), before)
        sums = [builder.phi(_VECTOR) for _ in range(2 * len(columns))]
        added = []
        for half in range(2):
            row = builder.add(builder.mul(k, ir.Constant(_INTEGER, 2)), ir.Constant(_INTEGER, half))
            one = builder.insert_element(undefined, builder.load(builder.gep(a, [row])), ir.Constant(ir.IntType(32), 0))
            factor = builder.shuffle_vector(one, undefined, first_lane)
            base = builder.gep(b, [builder.mul(row, ir.Constant(_INTEGER, WIDTH))])
            for index, column in enumerate(columns):
                at = builder.bitcast(builder.gep(base, [ir.Constant(_INTEGER, column)]), _BYTES.as_pointer())
                value = builder.sitofp(builder.sext(builder.load(at, align=1), _PLACES), _VECTOR)
                added.append(builder.call(multiply_add, [factor, value, sums[half * len(columns) + index]]))
        following = builder.add(k, ir.Constant(_INTEGER, 1))
        k.add_incoming(following, loop)
        for value, next_value in zip(sums, added, strict=True):
            value.add_incoming(zero, before)
            value.add_incoming(next_value, loop)
        builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)
        builder.position_at_end(after)
        for index, column in enumerate(columns):
            at = builder.bitcast(builder.gep(y, [ir.Constant(_INTEGER, column)]), _VECTOR.as_pointer())
            builder.store(builder.fadd(added[index], added[len(columns) + index]), at, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@njit(**EACH)
def _add_byte_row(y: Array, factor: np.float32, b: Array) -> None:
    """y += factor · b. y: [n] float32; b: [n] of 8 bits."""
    for j in range(y.size):
        y[j] += factor * np.float32(b[j])


@njit(**EACH)
def _add_scaled(y: Array, sums: Array, factor: np.float32, scale: Array, total: np.float32, zero: Array) -> None:
    """y += factor · scale · (sums - total · zero). All of float32: y, sums, scale, zero: [n]."""
    for j in range(y.size):
        y[j] += factor * scale[j] * (sums[j] - total * zero[j])


@njit(**LOOP)
def _total(x: Array) -> np.float32:
    """The sum of all elements. x: [n] float32."""
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    return total


@njit(**PLAIN)
def add_byte_panels(y: Array, a: Array, factor: np.float32, panels: Array, scale: Array, zero: Array, begin: int, end: int) -> None:
    """y += factor · a · ((panels - zero) · scale), of the columns in panels `begin` to `end`.

    y: [R, P · WIDTH] float32; a: [R, K] float32, whole numbers up to 255, so that sums are exact up to K = 512; panels: [P, K, WIDTH] int8;
    scale, zero: [P · WIDTH] float32.
    """
    rows, inner = a.shape
    pairs = inner // 2
    few = rows <= BYTES_ROW_BY_ROW
    sums = np.zeros((rows, WIDTH), np.float32)
    wide = np.empty((0 if few else inner, WIDTH), np.float32)
    for panel in range(begin, end):
        first = panel * WIDTH
        if few:
            for r in range(rows):
                if pairs:
                    _multiply_bytes(sums[r].ctypes.data, a[r].ctypes.data, panels[panel].ctypes.data, pairs)
                else:
                    sums[r] = 0
                if inner % 2:
                    _add_byte_row(sums[r], a[r, inner - 1], panels[panel, inner - 1])
        else:
            sums[:] = 0
            subtract_zero(wide.reshape(-1), panels[panel].reshape(-1), np.float32(0))
            if inner:
                for column in range(0, WIDTH, STRIP):
                    target, source = sums.ctypes.data + 4 * column, wide.ctypes.data + 4 * column
                    add_strip(target, WIDTH, a.ctypes.data, inner, source, WIDTH, rows, inner)
        for r in range(rows):
            columns = slice(first, first + WIDTH)
            _add_scaled(y[r, columns], sums[r], factor, scale[columns], _total(a[r]), zero[columns])
