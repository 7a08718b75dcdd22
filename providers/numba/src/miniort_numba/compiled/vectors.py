"""Vector instructions that loops over arrays don't compile to: a part of a vector, and what a window sees at each of its taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from miniort.types import Array
from miniort_numba.compiled.tiles import LANES, vector_multiply_add
from miniort_numba.options import PLAIN

_FLOAT, _WORD = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_COUNTS = ir.VectorType(ir.IntType(32), LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_UNALIGNED = 4

TOGETHER = 4
"""Vectors that are summed up side by side, so that none waits for the one before."""


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _VECTOR.as_pointer())


def _first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the first `count` lanes."""
    undefined = ir.Constant(_COUNTS, ir.Undefined)
    number = builder.insert_element(undefined, builder.trunc(count, ir.IntType(32)), ir.Constant(_WORD, 0))
    everywhere = builder.shuffle_vector(number, undefined, ir.Constant(_COUNTS, None))
    return builder.icmp_signed("<", ir.Constant(_COUNTS, list(range(LANES))), everywhere)


def _masked_load(builder: Any, source: Any, mask: Any, others: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR.as_pointer(), ir.IntType(32), _MASK, _VECTOR])
    load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return builder.call(load, [source, ir.Constant(ir.IntType(32), _UNALIGNED), mask, others])


def _masked_store(builder: Any, value: Any, target: Any, mask: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), ir.IntType(32), _MASK])
    store = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
    builder.call(store, [value, target, ir.Constant(ir.IntType(32), _UNALIGNED), mask])


def _spread(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, number, ir.Constant(_WORD, 0)), undefined, ir.Constant(_COUNTS, None))


@intrinsic
def copy_lanes(typingctx: Any, target: Any, source: Any) -> Any:
    """Copy LANES floats from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        target, source = (_pointer(builder, each) for each in given)
        builder.store(builder.load(source, align=_UNALIGNED), target, align=_UNALIGNED)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def copy_some_lanes(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` floats, at most LANES, from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        target, source = (_pointer(builder, each) for each in given[:2])
        mask = _first_lanes(builder, given[2])
        _masked_store(builder, _masked_load(builder, source, mask, ir.Constant(_VECTOR, None)), target, mask)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def add_some_lanes(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Add `count` floats, at most LANES, at one address to those at another, of which LANES are written."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        target, source = (_pointer(builder, each) for each in given[:2])
        seen = _masked_load(builder, source, _first_lanes(builder, given[2]), ir.Constant(_VECTOR, None))
        builder.store(builder.fadd(builder.load(target, align=_UNALIGNED), seen), target, align=_UNALIGNED)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def widen_lanes(typingctx: Any, target: Any, source: Any, count: Any, others: Any) -> Any:
    """Copy `count` floats, at most LANES, and write `others` into the lanes after them. No more is read; a count below 1 is 0."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        target, source = (_pointer(builder, each) for each in given[:2])
        value = _masked_load(builder, source, _first_lanes(builder, given[2]), _spread(builder, given[3]))
        builder.store(value, target, align=_UNALIGNED)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.float32), generate


@intrinsic
def widen_every_second(typingctx: Any, target: Any, source: Any, count: Any, others: Any) -> Any:
    """As `widen_lanes`, for the floats 0, 2, 4 … of a source that has `count` floats, which may be more than are read."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        target, source, fill = _pointer(builder, given[0]), _pointer(builder, given[1]), _spread(builder, given[3])
        halves = []
        for half in range(2):
            rest = builder.sub(given[2], ir.Constant(_WORD, half * LANES))
            place = builder.gep(source, [ir.Constant(_WORD, half)])
            halves.append(_masked_load(builder, place, _first_lanes(builder, rest), fill))
        even = ir.Constant(_COUNTS, [2 * lane for lane in range(LANES)])
        builder.store(builder.shuffle_vector(*halves, even), target, align=_UNALIGNED)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.float32), generate


Combine = Callable[[Any, Any, Any, Any], Any]
"""combine(builder, so far, seen, factor): the next value of a vector."""


def _add_multiple(builder: Any, total: Any, seen: Any, factor: Any) -> Any:
    return builder.call(vector_multiply_add(builder), [factor, seen, total])


def _larger(builder: Any, largest: Any, seen: Any, factor: Any) -> Any:
    """The larger one, NaN if either is."""
    takes = builder.or_(builder.fcmp_ordered(">", seen, largest), builder.fcmp_unordered("uno", seen, seen))
    return builder.select(takes, seen, largest)


def _over_taps(combine: Combine, start: float, vectors: int) -> Any:
    """The function for so many vectors of windows that lie side by side."""

    @intrinsic
    def over_taps(typingctx: Any, y: Any, w: Any, offsets: Any, x: Any, taps: Any) -> Any:
        """y = what windows see, combined. Addresses of y [vectors · LANES], w [taps], offsets [taps] in elements, and x; taps > 0."""

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            y_at, w_at, x_at = (builder.inttoptr(given[index], _FLOAT.as_pointer()) for index in (0, 1, 3))
            offsets_at = builder.inttoptr(given[2], _WORD.as_pointer())

            def constant(value: int) -> Any:
                return ir.Constant(_WORD, value)

            def vector_at(base: Any, offset: Any) -> Any:
                return builder.bitcast(builder.gep(base, [offset]), _VECTOR.as_pointer())

            before, loop, after = builder.block, builder.append_basic_block("tap"), builder.append_basic_block("seen")
            builder.branch(loop)
            builder.position_at_end(loop)
            tap = builder.phi(_WORD)
            tap.add_incoming(constant(0), before)
            values = [builder.phi(_VECTOR) for _ in range(vectors)]
            for value in values:
                value.add_incoming(ir.Constant(_VECTOR, [start] * LANES), before)
            factor = _spread(builder, builder.load(builder.gep(w_at, [tap])))
            base = builder.gep(x_at, [builder.load(builder.gep(offsets_at, [tap]))])
            following = [
                combine(builder, value, builder.load(vector_at(base, constant(index * LANES)), align=_UNALIGNED), factor)
                for index, value in enumerate(values)
            ]
            next_tap = builder.add(tap, constant(1))
            tap.add_incoming(next_tap, loop)
            for value, next_value in zip(values, following, strict=True):
                value.add_incoming(next_value, loop)
            builder.cbranch(builder.icmp_signed("<", next_tap, given[4]), loop, after)
            builder.position_at_end(after)
            for index, value in enumerate(following):
                builder.store(value, vector_at(y_at, constant(index * LANES)), align=_UNALIGNED)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return over_taps


_sum_4, _sum_1 = _over_taps(_add_multiple, 0.0, TOGETHER), _over_taps(_add_multiple, 0.0, 1)
_largest_4, _largest_1 = _over_taps(_larger, float("-inf"), TOGETHER), _over_taps(_larger, float("-inf"), 1)


@njit(**PLAIN)
def sum_taps(y: Array, w: Array, offsets: Array, x: Array, count: int) -> None:
    """y[i] = Σ w[t] · x[offsets[t] + i] for i in 0 … count, rounded up to LANES. y: as many; w, offsets: [taps], one or more."""
    i = 0
    while i + (TOGETHER - 1) * LANES < count:
        _sum_4(y.ctypes.data + 4 * i, w.ctypes.data, offsets.ctypes.data, x.ctypes.data + 4 * i, offsets.size)
        i += TOGETHER * LANES
    while i < count:
        _sum_1(y.ctypes.data + 4 * i, w.ctypes.data, offsets.ctypes.data, x.ctypes.data + 4 * i, offsets.size)
        i += LANES


@njit(**PLAIN)
def largest_of_taps(y: Array, w: Array, offsets: Array, x: Array, count: int) -> None:
    """y[i] = the largest x[offsets[t] + i], NaN if there's one, for i as in `sum_taps`. w: [taps], whatever."""
    i = 0
    while i + (TOGETHER - 1) * LANES < count:
        _largest_4(y.ctypes.data + 4 * i, w.ctypes.data, offsets.ctypes.data, x.ctypes.data + 4 * i, offsets.size)
        i += TOGETHER * LANES
    while i < count:
        _largest_1(y.ctypes.data + 4 * i, w.ctypes.data, offsets.ctypes.data, x.ctypes.data + 4 * i, offsets.size)
        i += LANES
