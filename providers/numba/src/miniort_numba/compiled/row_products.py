"""Products of a few rows with keys or values of one head, whose rows are short: sums stay in vector registers, for LANES keys at a time.

Built from LLVM's vector types, as `tiles` is, and for the same reason.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from miniort.types import Array
from miniort_numba.compiled.multiply_add import add_rows, dot_products
from miniort_numba.compiled.tiles import LANES, vector_multiply_add
from miniort_numba.options import PLAIN

_FLOAT, _INTEGER = ir.FloatType(), ir.IntType(64)
_VECTOR, _PLACES = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.IntType(32), LANES)
_UNALIGNED = 4

WIDTH = 4 * LANES
"""Columns that are summed up together, each vector of them in two registers by turns, as a sum has to wait for the one before."""


def _load(builder: Any, base: Any, offset: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(base, [offset]), _VECTOR.as_pointer()), align=_UNALIGNED)


def _store(builder: Any, value: Any, base: Any, offset: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(base, [offset]), _VECTOR.as_pointer()), align=_UNALIGNED)


def _sums_of_lanes(builder: Any, vectors: list[Any]) -> Any:
    """One vector whose lane i is the sum of all lanes of vector i, of LANES vectors: each round halves how many there are."""
    step = 1
    while len(vectors) > 1:
        first = ir.Constant(_PLACES, [i if not i & step else LANES + i - step for i in range(LANES)])
        second = ir.Constant(_PLACES, [i + step if not i & step else LANES + i for i in range(LANES)])
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, first), builder.shuffle_vector(a, b, second))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        step *= 2
    return vectors[0]


@intrinsic
def _dot_lanes(typingctx: Any, y: Any, a: Any, b: Any, inner: Any) -> Any:
    """y[LANES] = b[LANES, inner] · a[inner], by their addresses. inner: a multiple of LANES, above 0."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        y, a, b = (builder.inttoptr(each, _FLOAT.as_pointer()) for each in given[:3])
        inner, zero = given[3], ir.Constant(_VECTOR, None)
        multiply_add = vector_multiply_add(builder)
        rows = [builder.gep(b, [builder.mul(ir.Constant(_INTEGER, row), inner)]) for row in range(LANES)]
        before, loop, after = builder.block, builder.append_basic_block("sum"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INTEGER)
        k.add_incoming(ir.Constant(_INTEGER, 0), before)
        sums = [builder.phi(_VECTOR) for _ in rows]
        factor = _load(builder, a, k)
        added = [builder.call(multiply_add, [factor, _load(builder, row, k), value]) for row, value in zip(rows, sums, strict=True)]
        following = builder.add(k, ir.Constant(_INTEGER, LANES))
        k.add_incoming(following, loop)
        for value, next_value in zip(sums, added, strict=True):
            value.add_incoming(zero, before)
            value.add_incoming(next_value, loop)
        builder.cbranch(builder.icmp_signed("<", following, inner), loop, after)
        builder.position_at_end(after)
        _store(builder, _sums_of_lanes(builder, added), y, ir.Constant(_INTEGER, 0))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@intrinsic
def _add_pairs(typingctx: Any, y: Any, a: Any, b: Any, step: Any, count: Any) -> Any:
    """y[WIDTH] += a[2 · count] · b[2 · count, WIDTH], by their addresses; step: from row to row of b. count > 0."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        y, a, b = (builder.inttoptr(each, _FLOAT.as_pointer()) for each in given[:3])
        step, count = given[3:]
        multiply_add = vector_multiply_add(builder)
        undefined, first_lane, zero = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_PLACES, None), ir.Constant(_VECTOR, None)
        columns = range(0, WIDTH, LANES)
        start = [_load(builder, y, ir.Constant(_INTEGER, column)) for column in columns] + [zero for _ in columns]
        before, loop, after = builder.block, builder.append_basic_block("sum"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INTEGER)
        k.add_incoming(ir.Constant(_INTEGER, 0), before)
        sums = [builder.phi(_VECTOR) for _ in start]
        added = []
        for half in range(2):
            row = builder.add(builder.mul(k, ir.Constant(_INTEGER, 2)), ir.Constant(_INTEGER, half))
            one = builder.insert_element(undefined, builder.load(builder.gep(a, [row])), ir.Constant(ir.IntType(32), 0))
            factor = builder.shuffle_vector(one, undefined, first_lane)
            base = builder.gep(b, [builder.mul(row, step)])
            for index, column in enumerate(columns):
                value = _load(builder, base, ir.Constant(_INTEGER, column))
                added.append(builder.call(multiply_add, [factor, value, sums[half * len(columns) + index]]))
        following = builder.add(k, ir.Constant(_INTEGER, 1))
        k.add_incoming(following, loop)
        for value, first, next_value in zip(sums, start, added, strict=True):
            value.add_incoming(first, before)
            value.add_incoming(next_value, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)
        for index, column in enumerate(columns):
            _store(builder, builder.fadd(added[index], added[len(columns) + index]), y, ir.Constant(_INTEGER, column))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


@njit(**PLAIN)
def multiply_keys(y: Array, a: Array, b: Array) -> None:
    """y = b · a. y: [T], a: [D], b: [T, D], without gaps."""
    count, inner = b.shape
    whole = count // LANES * LANES if inner and inner % LANES == 0 else 0
    for t in range(0, whole, LANES):
        _dot_lanes(y.ctypes.data + 4 * t, a.ctypes.data, b.ctypes.data + 4 * t * inner, inner)
    if whole < count:
        dot_products(y, a, b, whole, count)


@njit(**PLAIN)
def add_values(y: Array, a: Array, b: Array) -> None:
    """y += a · b. y: [E], a: [T], b: [T, E], without gaps."""
    count, width = b.shape
    whole, pairs = width // WIDTH * WIDTH, count // 2
    if pairs:
        for column in range(0, whole, WIDTH):
            _add_pairs(y.ctypes.data + 4 * column, a.ctypes.data, b.ctypes.data + 4 * column, width, pairs)
    if count % 2 and whole:
        for j in range(whole):
            y[j] += a[count - 1] * b[count - 1, j]
    if whole < width:
        add_rows(y[whole:], a, b[:, whole:], 0, count)
