"""What a plan's values take of memory, step by step, for given sizes: told before anything runs.

A value lives from the step that computes it to the last step that reads it or a view of it. Large ones come from the provider's best-fit
pool; which of them take over whose memory is worked out as the pool does it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from miniort.errors import InputError
from miniort.graph.shape_propagation import Dims, ShapeTable, shape_tables
from miniort.graph.symbolic_sizes import Size
from miniort.model.weights import WeightStore
from miniort.pool import SMALLEST, WASTE
from miniort.runtime.plan import Plan
from miniort.types import dtype_from_onnx


@dataclass(frozen=True)
class Lifetime:
    """One value: computed in step `first`, read last in step `last`; a graph output lives on to the end.

    nbytes: None where its size isn't known. view_of: the value whose memory it shares, so that it takes none of its own; `in_place` if that
    one is dead then, and written over. reuses: the value whose memory it takes over from the pool.
    """

    name: str
    op: str
    first: int
    last: int
    nbytes: int | None
    view_of: str | None = None
    in_place: bool = False
    reuses: str | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """A plan's memory for given sizes; bytes.

    steps: the op of each step. curve: what is alive while each step runs, weights and inputs not counted. `pool` is what the pool takes
    from the system for all of it. `unknown` are values whose size can't be told; they're not in any figure.
    """

    sizes: Mapping[str, int]
    steps: tuple[str, ...]
    lifetimes: tuple[Lifetime, ...]
    curve: tuple[int, ...]
    pool: int
    weights: int
    unknown: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The most that is alive at once."""
        return max(self.curve, default=0)

    @property
    def peak_step(self) -> int:
        """The first step in which that is so."""
        return self.curve.index(self.peak) if self.curve else 0

    @property
    def total(self) -> int:
        """What all values would take if nothing were reused."""
        return sum(each.nbytes or 0 for each in self.lifetimes if each.view_of is None)

    def alive(self, step: int) -> list[Lifetime]:
        """The values that are alive while a step runs and have memory of their own, the largest first."""
        found = [each for each in self.lifetimes if each.first <= step <= each.last and each.view_of is None and each.nbytes]
        return sorted(found, key=lambda each: -(each.nbytes or 0))


def size_names(model: ir.Model) -> list[str]:
    """The sizes of the model's inputs that have a name and no number."""
    names: dict[str, None] = {}
    for value in model.graph.inputs:
        for size in value.shape or ():
            name = getattr(size, "value", size)
            if isinstance(name, str) and name.isidentifier():
                names[name] = None
    return list(names)


def memory_plan(model: ir.Model, plan: Plan, weights: WeightStore, sizes: Mapping[str, int]) -> MemoryPlan:
    """The memory of a plan. sizes: a number for each of the model's named sizes; InputError if one is missing, unknown or negative."""
    names = size_names(model)
    for name, size in sizes.items():
        if name not in names:
            raise InputError(f"the model has no size {name!r}; its sizes: {', '.join(names) or 'none'}")
        if size < 0:
            raise InputError(f"the size {name!r} must not be negative, found {size}")
    missing = [name for name in names if name not in sizes]
    if missing:
        raise InputError(f"these sizes of the model have no number: {', '.join(missing)}")
    table = next(table for graph, table in shape_tables(model, weights) if graph is model.graph)
    known = {output.name: output for node in model.graph for output in node.outputs if output.name}
    nbytes = {name: _nbytes(value, table, sizes) for name, value in known.items()}
    constants = {id(value): value.nbytes for value in plan.initial if hasattr(value, "nbytes")}
    lifetimes = _lifetimes(plan, nbytes)
    placed, pool = _placed(lifetimes)
    curve = [0] * len(plan.steps)
    for each in placed:
        for step in range(each.first, each.last + 1):
            curve[step] += each.nbytes or 0 if each.view_of is None else 0
    return MemoryPlan(
        sizes=dict(sizes),
        steps=tuple(step.info.op for step in plan.steps),
        lifetimes=tuple(placed),
        curve=tuple(curve),
        pool=pool,
        weights=sum(constants.values()),
        unknown=tuple(each.name for each in placed if each.nbytes is None and each.view_of is None),
    )


def _lifetimes(plan: Plan, nbytes: Mapping[str, int | None]) -> list[Lifetime]:
    """The values in the order in which they're computed. A value lives as long as the last view of it."""
    end = len(plan.steps) - 1
    made: dict[int, tuple[int, str, str]] = {}
    last: dict[int, int] = {}
    for index, step in enumerate(plan.steps):
        for slot, name in zip(step.outputs, step.info.writes, strict=False):
            made[slot] = index, name, step.info.op
        for slot in (*step.inputs, *step.outputs):
            last[slot] = index
    for slot in plan.outputs:
        last[slot] = end
    names = {slot: name for slot, (_, name, _) in made.items()}
    over = {slot: fit for slot, dying in plan.written_over.items() if (fit := _fit(slot, dying, names, nbytes)) is not None}
    shared = {**plan.views, **over}
    for slot in sorted(shared, reverse=True):  # a view has a later slot than what it's a view of
        if slot in last:
            viewed = shared[slot]
            last[viewed] = max(last.get(viewed, 0), last[slot])
    given = {slot for slot, value in enumerate(plan.initial) if value is not None} | set(plan.inputs)
    found = []
    for slot, (first, name, op) in made.items():
        base: int | None = shared.get(slot)
        while base is not None and base in shared:
            base = shared[base]
        owner = None if base is None else "an input or a weight" if base in given or base not in made else made[base][1]
        found.append(Lifetime(name, op, first, last[slot], nbytes.get(name), owner, slot in over))
    return found


def _fit(slot: int, dying: Sequence[int], names: Mapping[int, str], nbytes: Mapping[str, int | None]) -> int | None:
    """The first of some dying values that a value is written over: it must be large, and of the same size."""
    size = nbytes.get(names.get(slot, ""))
    if size is None or size < SMALLEST:
        return None
    return next((each for each in dying if nbytes.get(names.get(each, "")) == size), None)


def _placed(lifetimes: Sequence[Lifetime]) -> tuple[list[Lifetime], int]:
    """The values with whose memory they take over, and the bytes that the pool takes from the system."""
    free: list[tuple[int, int, str]] = []
    leaving: dict[int, list[tuple[int, str]]] = {}
    placed: list[Lifetime] = []
    reserved = clock = 0
    for number, each in enumerate(lifetimes):
        while clock < each.first:  # what died before this step has gone back
            for size, name in leaving.pop(clock, ()):
                insort(free, (size, number, name))
            clock += 1
        if each.view_of is not None or each.nbytes is None or each.nbytes < SMALLEST:
            placed.append(each)
            continue
        size = each.nbytes
        index = bisect_left(free, (size,))
        reuses = None
        if index < len(free) and free[index][0] <= size * WASTE:
            size, _, reuses = free.pop(index)
        else:
            reserved += size
        leaving.setdefault(each.last, []).append((size, each.name))
        placed.append(replace(each, reuses=reuses))
    return placed, reserved


def _nbytes(value: ir.Value, table: ShapeTable, sizes: Mapping[str, int]) -> int | None:
    dims: Dims | None = table.dims(value)
    if dims is None or value.dtype is None or value.dtype == ir.DataType.STRING:
        return None
    numbers = [_number(size, sizes) for size in dims]
    known = [number for number in numbers if number is not None]
    return prod(known) * dtype_from_onnx(int(value.dtype)).itemsize if len(known) == len(numbers) else None


def _number(size: Size, sizes: Mapping[str, int]) -> int | None:
    """The number that a polynomial of sizes is; None if it has a size that nobody named."""
    total = 0
    for names, factor in size.terms:
        factors = [_named(name, sizes) for name in names]
        known = [each for each in factors if each is not None]
        if len(known) < len(factors):
            return None
        total += factor * prod(known)
    return total


def _named(name: str, sizes: Mapping[str, int]) -> int | None:
    """A size by its name, which exporters also write as a sum: `past_sequence_length + 1`."""
    if name in sizes:
        return sizes[name]
    parts = [part.strip() for part in name.split("+")]
    numbers = [int(part) if part.isdecimal() else sizes.get(part) for part in parts]
    known = [each for each in numbers if each is not None]
    return sum(known) if len(known) == len(parts) else None
