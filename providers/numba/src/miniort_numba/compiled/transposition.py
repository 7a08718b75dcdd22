"""Turning a matrix around, a square block at a time, in vector registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from miniort_numba.compiled.tiles import LANES
from miniort_numba.options import PLAIN

_FLOAT, _INTEGER = ir.FloatType(), ir.IntType(64)
_VECTOR, _PLACES = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.IntType(32), LANES)
_UNALIGNED = 4


@intrinsic
def _turn_block(typingctx: Any, y: Any, y_step: Any, x: Any, x_step: Any) -> Any:
    """y[LANES, LANES] = xᵀ, by their addresses, with the elements from row to row."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        y_at, y_step, x_at, x_step = given

        def row(base: Any, step: Any, index: int) -> Any:
            start = builder.gep(builder.inttoptr(base, _FLOAT.as_pointer()), [builder.mul(step, ir.Constant(_INTEGER, index))])
            return builder.bitcast(start, _VECTOR.as_pointer())

        rows = [builder.load(row(x_at, x_step, index), align=_UNALIGNED) for index in range(LANES)]
        step = 1
        while step < LANES:  # swaps the two blocks of step × step off the diagonal of each block of twice the size
            upper = ir.Constant(_PLACES, [i if not i & step else LANES + i - step for i in range(LANES)])
            lower = ir.Constant(_PLACES, [i + step if not i & step else LANES + i for i in range(LANES)])
            for index in range(LANES):
                if not index & step:
                    first, second = rows[index], rows[index + step]
                    rows[index], rows[index + step] = (builder.shuffle_vector(first, second, each) for each in (upper, lower))
            step *= 2
        for index, value in enumerate(rows):
            builder.store(value, row(y_at, y_step, index), align=_UNALIGNED)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@njit(**PLAIN)
def turn_strip(y: int, y_step: int, x: int, x_step: int, columns: int) -> int:
    """y[columns, LANES] = x[LANES, columns]ᵀ, by addresses, with steps in elements, as far as whole blocks reach; gives how far."""
    whole = columns // LANES * LANES
    for k in range(0, whole, LANES):
        _turn_block(y + 4 * k * y_step, y_step, x + 4 * k, x_step)
    return whole
