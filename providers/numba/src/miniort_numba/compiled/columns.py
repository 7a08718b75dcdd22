"""Maxima and exponentials down the columns of a strip of scores, all columns of it at once, in vector registers.

Built from LLVM's vector types, as the tiles of products are, and for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from miniort_numba.compiled.exponential import HALF, LEAST, LN2_HIGH, LN2_LOW, LOG2_E, ONE, POLYNOMIAL
from miniort_numba.compiled.tiles import LANES

_INTEGER, _BITS = ir.IntType(64), ir.VectorType(ir.IntType(32), LANES)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_UNALIGNED = 4


def _spread(value: float | np.float32) -> Any:
    """A vector of one number."""
    return ir.Constant(_VECTOR, [float(value)] * LANES)


def _vectors_at(builder: Any, address: Any) -> list[Any]:
    """Pointers to the two vectors of a strip at an address."""
    first = builder.inttoptr(address, _VECTOR.as_pointer())
    return [builder.gep(first, [ir.Constant(_INTEGER, half)]) for half in range(2)]


def _load(builder: Any, pointers: Sequence[Any]) -> list[Any]:
    return [builder.load(pointer, align=_UNALIGNED) for pointer in pointers]


def _store(builder: Any, values: Sequence[Any], pointers: Sequence[Any]) -> None:
    for value, pointer in zip(values, pointers, strict=True):
        builder.store(value, pointer, align=_UNALIGNED)


def _down_the_rows(
    builder: Any, s: Any, step: Any, rows: Any, start: Sequence[Any], body: Callable[[list[Any], list[Any]], list[Any]]
) -> Any:
    """Carry two vectors down a strip: body(pointers to a row's vectors, what is carried) -> what is carried on. rows > 0."""
    before, loop, after = builder.block, builder.append_basic_block("rows"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    row, carried = builder.phi(_INTEGER), [builder.phi(_VECTOR) for _ in start]
    place = builder.add(s, builder.mul(builder.mul(row, step), ir.Constant(_INTEGER, 4)))
    following, result = builder.add(row, ir.Constant(_INTEGER, 1)), body(_vectors_at(builder, place), carried)
    for phi, first, value in zip((row, *carried), (ir.Constant(_INTEGER, 0), *start), (following, *result), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, rows), loop, after)
    builder.position_at_end(after)
    return result


@intrinsic
def raise_to_maxima(typingctx: Any, peaks: Any, s: Any, step: Any, rows: Any) -> Any:
    """peaks[j] = the largest of it and s[:, j]. Addresses of peaks [STRIP] and s [rows, STRIP], elements from row to row; rows > 0."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        peaks, s, step, rows = given

        def body(row: list[Any], carried: list[Any]) -> list[Any]:
            return [
                builder.select(builder.fcmp_ordered(">", x, peak), x, peak) for x, peak in zip(_load(builder, row), carried, strict=True)
            ]

        kept = _vectors_at(builder, peaks)
        _store(builder, _down_the_rows(builder, s, step, rows, _load(builder, kept), body), kept)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@intrinsic
def exponentials_of_columns(typingctx: Any, totals: Any, s: Any, step: Any, rows: Any, shifts: Any) -> Any:
    """s[:, j] = exp(s[:, j] - shifts[j]), added up into totals[j].

    Addresses of totals, shifts [STRIP] and s [rows, STRIP], elements from row to row; rows > 0. No s may be above its column's shift.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        totals, s, step, rows, shifts = given
        given_shifts = _load(builder, _vectors_at(builder, shifts))

        def body(row: list[Any], carried: list[Any]) -> list[Any]:
            moved = [builder.fsub(x, shift) for x, shift in zip(_load(builder, row), given_shifts, strict=True)]
            powers = [_exponential(builder, x) for x in moved]
            _store(builder, powers, row)
            return [builder.fadd(total, power) for total, power in zip(carried, powers, strict=True)]

        kept = _vectors_at(builder, totals)
        _store(builder, _down_the_rows(builder, s, step, rows, _load(builder, kept), body), kept)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


def _exponential(builder: Any, x: Any) -> Any:
    """exp(x) for each lane, none above 0, as `exponential` has it."""

    def function(name: str, count: int) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * count)
        return cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")

    multiply_add, floor = function("fmuladd", 3), function("floor", 1)

    def times_plus(a: Any, b: Any, c: Any) -> Any:
        return builder.call(multiply_add, [a, b, c])

    z = builder.select(builder.fcmp_ordered(">", x, _spread(LEAST)), x, _spread(LEAST))
    n = builder.call(floor, [times_plus(z, _spread(LOG2_E), _spread(HALF))])
    r = times_plus(n, _spread(-LN2_HIGH), z)
    r = times_plus(n, _spread(-LN2_LOW), r)
    p = _spread(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = times_plus(p, r, _spread(coefficient))
    y = builder.fadd(times_plus(builder.fmul(p, r), r, r), _spread(ONE))
    biased = builder.add(builder.fptosi(n, _BITS), ir.Constant(_BITS, [127] * LANES))
    power = builder.bitcast(builder.shl(biased, ir.Constant(_BITS, [23] * LANES)), _VECTOR)
    y = builder.fmul(y, power)
    y = builder.select(builder.fcmp_ordered("<", x, _spread(LEAST)), _spread(0), y)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, y)
