"""y += a · b for a small tile of y that stays in vector registers while the sum runs over all of a's columns.

Numba can't tell that rows of y and of b don't overlap, and so uses no vector instructions where several rows of y are written. These
functions are therefore built from LLVM's vector types.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from miniort_numba.options import PLAIN

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Elements of a vector."""

HAS_BYTE_DOTS = bool(binding.get_host_cpu_features().get("avx512vnni"))
"""Whether the processor multiplies and adds up bytes in one instruction, for `byte_dots`."""

ROWS = 8 if LANES == 16 else 4
"""Rows of the largest tile: with two vectors for each row, all of it fits into the registers."""

STRIP = 2 * LANES
"""Columns of a tile."""

_FLOAT = ir.FloatType()
_INTEGER = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_UNALIGNED = 4


def vector_multiply_add(builder: Any) -> Any:
    """LLVM's function that gives a · b + c of three vectors, for code that `builder` builds."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32")


def _tile(rows: int, fresh: bool = False, turned: bool = False) -> Any:
    """The function for tiles of so many rows. fresh: y's old contents don't count. turned: a is given as its transpose, [inner, rows]."""

    @intrinsic
    def add_tile(typingctx: Any, y: Any, y_step: Any, a: Any, a_step: Any, b: Any, b_step: Any, inner: Any) -> Any:
        """y += a · b. Addresses of y [rows, STRIP], a [rows, inner] and b [inner, STRIP], with the elements from row to row; inner > 0."""

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            y_at, y_step, a_at, a_step, b_at, b_step, inner = given
            y_at, a_at, b_at = (builder.inttoptr(each, _FLOAT.as_pointer()) for each in (y_at, a_at, b_at))
            multiply_add = vector_multiply_add(builder)

            def constant(value: int) -> Any:
                return ir.Constant(_INTEGER, value)

            def vector_at(base: Any, offset: Any) -> Any:
                return builder.bitcast(builder.gep(base, [offset]), _VECTOR.as_pointer())

            def load(base: Any, offset: Any) -> Any:
                return builder.load(vector_at(base, offset), align=_UNALIGNED)

            places = [builder.add(builder.mul(constant(row), y_step), constant(half * LANES)) for row in range(rows) for half in range(2)]
            a_rows = [builder.gep(a_at, [constant(row) if turned else builder.mul(constant(row), a_step)]) for row in range(rows)]
            start = [ir.Constant(_VECTOR, None) if fresh else load(y_at, place) for place in places]
            before, loop, after = builder.block, builder.append_basic_block("sum"), builder.append_basic_block("summed")
            builder.branch(loop)

            builder.position_at_end(loop)
            k = builder.phi(_INTEGER)
            k.add_incoming(constant(0), before)
            sums = [builder.phi(_VECTOR) for _ in places]
            for value, first in zip(sums, start, strict=True):
                value.add_incoming(first, before)
            undefined, first_lane = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
            row_of_b = builder.mul(k, b_step)
            columns = [load(b_at, builder.add(row_of_b, constant(half * LANES))) for half in range(2)]
            column_of_a = builder.mul(k, a_step) if turned else k
            added = []
            for row in range(rows):
                one = builder.insert_element(undefined, builder.load(builder.gep(a_rows[row], [column_of_a])), constant(0))
                spread = builder.shuffle_vector(one, undefined, first_lane)
                added += [builder.call(multiply_add, [spread, columns[half], sums[2 * row + half]]) for half in range(2)]
            following = builder.add(k, constant(1))
            k.add_incoming(following, loop)
            for value, next_value in zip(sums, added, strict=True):
                value.add_incoming(next_value, loop)
            builder.cbranch(builder.icmp_signed("<", following, inner), loop, after)

            builder.position_at_end(after)
            for place, value in zip(places, added, strict=True):
                builder.store(value, vector_at(y_at, place), align=_UNALIGNED)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return add_tile


@intrinsic
def copy_strip(typingctx: Any, target: Any, source: Any) -> Any:
    """Copy STRIP floats from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        target, source = (builder.inttoptr(each, _VECTOR.as_pointer()) for each in given)
        for half in range(2):
            place = [ir.Constant(_INTEGER, half)]
            builder.store(builder.load(builder.gep(source, place), align=_UNALIGNED), builder.gep(target, place), align=_UNALIGNED)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


_add_rows, _add_4_rows, _add_1_row = (_tile(rows) for rows in (ROWS, 4, 1))
_set_rows, _set_4_rows, _set_1_row = (_tile(rows, fresh=True) for rows in (ROWS, 4, 1))
_add_turned_rows, _add_4_turned_rows, _add_1_turned_row = (_tile(rows, turned=True) for rows in (ROWS, 4, 1))


@njit(**PLAIN)
def add_strip(y: int, y_step: int, a: int, a_step: int, b: int, b_step: int, rows: int, inner: int) -> None:
    """y[rows, STRIP] += a[rows, inner] · b[inner, STRIP], all by their addresses, steps in elements. inner > 0."""
    r = 0
    while r + ROWS <= rows:
        _add_rows(y + 4 * r * y_step, y_step, a + 4 * r * a_step, a_step, b, b_step, inner)
        r += ROWS
    while r + 4 <= rows:
        _add_4_rows(y + 4 * r * y_step, y_step, a + 4 * r * a_step, a_step, b, b_step, inner)
        r += 4
    while r < rows:
        _add_1_row(y + 4 * r * y_step, y_step, a + 4 * r * a_step, a_step, b, b_step, inner)
        r += 1


@njit(**PLAIN)
def set_strip(y: int, y_step: int, a: int, a_step: int, b: int, b_step: int, rows: int, inner: int) -> None:
    """y[rows, STRIP] = a[rows, inner] · b[inner, STRIP], as `add_strip`."""
    r = 0
    while r + ROWS <= rows:
        _set_rows(y + 4 * r * y_step, y_step, a + 4 * r * a_step, a_step, b, b_step, inner)
        r += ROWS
    while r + 4 <= rows:
        _set_4_rows(y + 4 * r * y_step, y_step, a + 4 * r * a_step, a_step, b, b_step, inner)
        r += 4
    while r < rows:
        _set_1_row(y + 4 * r * y_step, y_step, a + 4 * r * a_step, a_step, b, b_step, inner)
        r += 1


@njit(**PLAIN)
def add_turned_strip(y: int, y_step: int, a: int, a_step: int, b: int, b_step: int, rows: int, inner: int) -> None:
    """y[rows, STRIP] += a[inner, rows]ᵀ · b[inner, STRIP], as `add_strip`."""
    r = 0
    while r + ROWS <= rows:
        _add_turned_rows(y + 4 * r * y_step, y_step, a + 4 * r, a_step, b, b_step, inner)
        r += ROWS
    while r + 4 <= rows:
        _add_4_turned_rows(y + 4 * r * y_step, y_step, a + 4 * r, a_step, b, b_step, inner)
        r += 4
    while r < rows:
        _add_1_turned_row(y + 4 * r * y_step, y_step, a + 4 * r, a_step, b, b_step, inner)
        r += 1
