"""How far two results of one computation lie apart, and the first node of a graph where two runs of it part ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, TypeAlias

import numpy as np

from miniort.errors import InputError
from miniort.runtime.observers import NodeInfo
from miniort.types import DType, type_string

ROUNDING: Mapping[str, tuple[float, float]] = {
    "float64": (1e-7, 1e-9),
    "float32": (1e-3, 1e-5),
    "float16": (2e-2, 2e-2),
    "bfloat16": (1e-1, 1e-1),
}
"""What another order of additions may do: relative and absolute tolerance by element type. Types that aren't here must be equal."""

GROUP_BYTES = 1 << 30
"""Values of the baseline that are kept at a time while two runs are compared; a graph with more is run several times."""

ValueKey: TypeAlias = tuple[str, int]
"""A value's name, and how often it was computed before in the same run: a loop's body computes its values in each trip."""


@dataclass(frozen=True)
class Tolerance:
    """A value passes where |found - wanted| <= absolute + relative · |wanted|, for each element. None: by element type, see ROUNDING."""

    relative: float | None = None
    absolute: float | None = None

    def of(self, dtype: DType) -> tuple[float, float]:
        """Relative and absolute tolerance for an element type; both 0 for those that aren't rounded."""
        if dtype.kind not in "fVc":
            return 0.0, 0.0
        relative, absolute = ROUNDING.get(dtype.name, (0.0, 0.0))
        return relative if self.relative is None else self.relative, absolute if self.absolute is None else self.absolute


@dataclass(frozen=True)
class Difference:
    """Of one value in two runs.

    absolute: the largest |found - wanted|. relative: the largest of that over |wanted|, or over the mean |wanted| where that's larger, for
    an element near zero. Both are infinite where the values can't be compared at all, and `note` says why. place: the index of the largest.
    """

    absolute: float
    relative: float
    passed: bool
    place: tuple[int, ...] = ()
    note: str = ""


def difference(found: Any, wanted: Any, tolerance: Tolerance | None = None) -> Difference:
    """How far `found` is from `wanted`: arrays, or lists of them. NaN equals NaN, and an infinity equals itself."""
    tolerance = tolerance or Tolerance()
    if isinstance(found, list) or isinstance(wanted, list):
        return _difference_of_lists(found, wanted, tolerance)
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        return Difference(inf, inf, False, note=f"its shape is {list(found.shape)}, not {list(wanted.shape)}")
    if found.dtype != wanted.dtype and "OSU" not in (found.dtype.kind, wanted.dtype.kind):
        return Difference(inf, inf, False, note=f"it is {type_string(found.dtype)}, not {type_string(wanted.dtype)}")
    if found.dtype.kind not in "biufVc":
        same = bool(np.array_equal(found.astype(str), wanted.astype(str)))
        return Difference(0.0, 0.0, True) if same else Difference(inf, inf, False, note="it is another text")
    if found.size == 0:
        return Difference(0.0, 0.0, True)
    relative, absolute = tolerance.of(wanted.dtype)
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    x, y = found.astype(wide), wanted.astype(wide)
    with np.errstate(all="ignore"):
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(x - y))
        apart = np.where(np.isnan(apart), inf, apart)
        size = np.abs(y)
        finite = np.isfinite(size)
        scale = np.maximum(size, size[finite].mean() if finite.any() else 0)
        ratio = np.where(apart == 0, 0, apart / scale)
        passed = bool((apart <= absolute + relative * np.where(finite, size, 0)).all())
    place = tuple(int(index) for index in np.unravel_index(int(apart.argmax()), apart.shape))
    return Difference(float(apart.max()), float(np.where(np.isnan(ratio), inf, ratio).max()), passed, place)


def _difference_of_lists(found: Any, wanted: Any, tolerance: Tolerance) -> Difference:
    if not isinstance(found, list) or not isinstance(wanted, list) or len(found) != len(wanted):
        return Difference(inf, inf, False, note="it is a sequence of another length")
    parts = [difference(*pair, tolerance) for pair in zip(found, wanted, strict=True)]
    worst = max(parts, key=lambda part: (not part.passed, part.absolute), default=Difference(0.0, 0.0, True))
    return Difference(worst.absolute, worst.relative, all(part.passed for part in parts), worst.place, worst.note)


@dataclass(frozen=True)
class Statistics:
    """What an array's elements are like. Numbers are None where no element is finite, or it isn't of numbers."""

    shape: tuple[int, ...]
    dtype: str
    least: float | None
    mean: float | None
    greatest: float | None
    nans: int
    infinities: int


def statistics(value: Any) -> Statistics:
    """Statistics of an array."""
    array = np.asarray(value)
    if array.dtype.kind not in "biufV":
        return Statistics(array.shape, type_string(array.dtype), None, None, None, 0, 0)
    wide = array.astype(np.float64)
    numbers = wide[np.isfinite(wide)]
    least, mean, greatest = (float(numbers.min()), float(numbers.mean()), float(numbers.max())) if numbers.size else (None, None, None)
    return Statistics(array.shape, type_string(array.dtype), least, mean, greatest, int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))


@dataclass(frozen=True)
class ComputedNode:
    """A node that was just run. `inputs()` and `outputs()` fetch its values to the host, None for what is absent or no array."""

    info: NodeInfo
    inputs: Callable[[], Sequence[Any]]
    outputs: Callable[[], Sequence[Any]]


Visit: TypeAlias = Callable[[ComputedNode], bool]
"""Called after each node of a run; True ends the run."""


class Tracer(Protocol):
    """Something that runs a graph and shows each node's values."""

    def trace(self, feeds: Mapping[str, Any], visit: Visit) -> None:
        """Run once, with a call of `visit` after every node, in the order in which they are run."""


@dataclass(frozen=True)
class Operand:
    """An input of the node where two runs part. `difference` from the same value of the baseline, None where that has no such value."""

    name: str
    value: Any
    difference: Difference | None


@dataclass(frozen=True, eq=False)
class Divergence:
    """The first node whose output differs: the output, by how much, both values, the node's inputs, and how many values agreed before."""

    node: NodeInfo
    output: str
    difference: Difference
    found: Any
    wanted: Any
    inputs: tuple[Operand, ...]
    agreed: int


@dataclass(frozen=True, eq=False)
class Search:
    """What a search gave: the divergence, None if there is none, and how many values the two runs have in common by name."""

    divergence: Divergence | None
    compared: int


@dataclass
class _Keys:
    """Counts how often each name was computed in a run."""

    seen: Counter[str] = field(default_factory=Counter)

    def of(self, info: NodeInfo) -> list[ValueKey | None]:
        keys: list[ValueKey | None] = []
        for name in info.writes:
            keys.append((name, self.seen[name]) if name else None)
            self.seen[name] += 1
        return keys


def first_difference(
    subject: Tracer,
    baseline: Tracer,
    feeds: Mapping[str, Any],
    tolerance: Tolerance | None = None,
    *,
    same_graph: bool = True,
    group_bytes: int = GROUP_BYTES,
) -> Search:
    """The first node of the subject's run whose output differs from the value of that name in the baseline's run.

    Values are compared by name, so where the two graphs were optimised differently, only those that both still have. same_graph: whether
    one name must mean one thing in both; if not, values of other shapes are passed over, for a pass may have made them so. Of the baseline
    at most about `group_bytes` are kept at a time.
    InputError if the two have no value in common.
    """
    tolerance = tolerance or Tolerance()
    start, compared = 0, 0
    while True:
        kept, end = _record(baseline, feeds, start, group_bytes)
        divergence, count = _compare(subject, feeds, kept, tolerance, same_graph)
        compared += count
        if divergence is not None:
            inputs = _with_differences(divergence.inputs, divergence.node, baseline, feeds, tolerance)
            found = Divergence(
                divergence.node, divergence.output, divergence.difference, divergence.found, divergence.wanted, inputs, compared - 1
            )
            return Search(found, compared)
        if end is None:
            break
        start = end
    if compared == 0:
        raise InputError("the two runs have no value of the same name, so there is nothing to compare node by node; use one level for both")
    return Search(None, compared)


def _record(baseline: Tracer, feeds: Mapping[str, Any], start: int, limit: int) -> tuple[dict[ValueKey, Any], int | None]:
    """The values of the nodes from number `start` on, until they are more than `limit` bytes; the next node's number, None at the end."""
    kept: dict[ValueKey, Any] = {}
    keys, number, nbytes = _Keys(), -1, 0
    end: int | None = None

    def visit(node: ComputedNode) -> bool:
        nonlocal number, nbytes, end
        number += 1
        names = keys.of(node.info)
        if number < start:
            return False
        if nbytes > limit:
            end = number
            return True
        for key, value in zip(names, node.outputs(), strict=False):
            if key is not None and value is not None:
                kept[key] = value
                nbytes += getattr(value, "nbytes", 0)
        return False

    baseline.trace(feeds, visit)
    return kept, end


def _compare(
    subject: Tracer, feeds: Mapping[str, Any], wanted: Mapping[ValueKey, Any], tolerance: Tolerance, same_graph: bool
) -> tuple[Divergence | None, int]:
    keys, compared = _Keys(), 0
    divergence: Divergence | None = None

    def visit(node: ComputedNode) -> bool:
        nonlocal compared, divergence
        names = keys.of(node.info)
        if not any(key in wanted for key in names):
            return False
        for key, value in zip(names, node.outputs(), strict=False):
            if key is None or key not in wanted or value is None:
                continue
            if not same_graph and np.shape(value) != np.shape(wanted[key]):
                continue
            compared += 1
            apart = difference(value, wanted[key], tolerance)
            if not apart.passed:
                operands = tuple(Operand(name, each, None) for name, each in zip(node.info.reads, node.inputs(), strict=False) if name)
                divergence = Divergence(node.info, key[0], apart, value, wanted[key], operands, 0)
                return True
        return compared == len(wanted)

    subject.trace(feeds, visit)
    return divergence, compared


def _with_differences(
    operands: Sequence[Operand], node: NodeInfo, baseline: Tracer, feeds: Mapping[str, Any], tolerance: Tolerance
) -> tuple[Operand, ...]:
    """The operands with their differences from the baseline's values, for which it's run once more."""
    values = _latest(baseline, feeds, {operand.name for operand in operands}, frozenset(node.writes))
    return tuple(
        Operand(each.name, each.value, difference(each.value, values[each.name], tolerance) if each.name in values else None)
        for each in operands
    )


def _latest(baseline: Tracer, feeds: Mapping[str, Any], names: Collection[str], until: Collection[str]) -> dict[str, Any]:
    """The values of these names when the baseline computes `until`."""
    values: dict[str, Any] = {name: feeds[name] for name in names if name in feeds}

    def visit(node: ComputedNode) -> bool:
        if any(name in names for name in node.info.writes):
            written = zip(node.info.writes, node.outputs(), strict=False)
            values.update({name: value for name, value in written if name in names and value is not None})
        return any(name in until for name in node.info.writes if name)

    baseline.trace(feeds, visit)
    return values
