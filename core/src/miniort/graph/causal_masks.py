"""Conditions under which a query sees a key, read as what they say of positions: that key k is not behind query q + offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import producer, scalar
from miniort.graph.shape_propagation import ShapeTable
from miniort.graph.symbolic_sizes import Size
from miniort.model.constants import constant_array, is_constant

_ONE = Size.of(1)
_DEPTH = 12
_KEYS, _QUERIES = 1, 2
"""The axes of scores, counted from the last."""
_COMPARISONS = {"LessOrEqual": (0, 1, 0), "Less": (0, 1, -1), "GreaterOrEqual": (1, 0, 0), "Greater": (1, 0, -1)}
"""Which operand must be the smaller one, which the larger one, and by how much less it then may be."""


@dataclass(frozen=True)
class Ramp:
    """Whole numbers start, start + 1, … along one axis, counted from the last, and the same along all others."""

    axis: int
    start: Size


def conjuncts(condition: ir.Value, depth: int = _DEPTH) -> Iterator[ir.Value]:
    """The conditions that hold all together, those that always do left out."""
    node = producer(condition, "And")
    if node is not None and depth:
        for value in node.inputs:
            if value is not None:
                yield from conjuncts(value, depth - 1)
        return
    yield condition


def always_holds(condition: ir.Value, table: ShapeTable) -> bool:
    """Whether a condition is the constant True."""
    return is_constant(condition) and scalar(condition, table.weights) == 1


def causal_offset(condition: ir.Value | None, table: ShapeTable, negated: bool = False) -> Size | None:
    """The offset by which a condition [..., queries, keys] says key ≤ query + offset; None if it doesn't say that."""
    node = None if condition is None else producer(condition, *_COMPARISONS, "Not", "Slice", "Cast", "Unsqueeze", "Reshape", "Expand")
    if condition is None or node is None:
        return None if condition is None or negated else _triangle_offset(condition, table)
    if node.op_type == "Not":
        return causal_offset(node.inputs[0], table, not negated)
    if node.op_type not in _COMPARISONS:
        return None if negated else _triangle_offset(condition, table)
    below, above, less = _COMPARISONS[node.op_type]
    if negated:  # not (a ≤ b) is b < a
        below, above, less = above, below, -1 - less
    smaller, larger = ramp(node.inputs[below], table), ramp(node.inputs[above], table)
    if smaller is None or larger is None or (smaller.axis, larger.axis) != (_KEYS, _QUERIES):
        return None
    return larger.start - smaller.start + Size.of(less)


def ramp(value: ir.Value | None, table: ShapeTable, depth: int = _DEPTH) -> Ramp | None:
    """A value as whole numbers that grow by one along an axis; None if they don't."""
    node = producer(value, "Range", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Cast", "Add", "Sub")
    if value is None or node is None or depth < 0:
        return None
    match node.op_type:
        case "Range":
            start, step = table.integers(node.inputs[0]), table.integers(node.inputs[2])
            return Ramp(1, start.items[0]) if start is not None and step is not None and step.numbers == (1,) else None
        case "Cast" | "Expand":
            return ramp(node.inputs[0], table, depth - 1)
        case "Add" | "Sub":
            return _shifted(node, table, depth)
    inner = ramp(node.inputs[0], table, depth - 1)
    axes = [_long_axis(each, table) for each in (node.inputs[0], value)]
    return None if inner is None or axes[0] != inner.axis or axes[1] is None else Ramp(axes[1], inner.start)


def _shifted(node: ir.Node, table: ShapeTable, depth: int) -> Ramp | None:
    for index, x in enumerate(node.inputs):
        number, inner = table.integers(node.inputs[1 - index]), ramp(x, table, depth - 1)
        if number is None or inner is None or len(number.items) != 1 or (node.op_type == "Sub" and index == 1):
            continue
        own, whole = table.dims(x), table.dims(node.outputs[0])
        if own is not None and whole is not None and len(own) == len(whole):
            return Ramp(inner.axis, inner.start + number.items[0] if node.op_type == "Add" else inner.start - number.items[0])
    return None


def _long_axis(value: ir.Value | None, table: ShapeTable) -> int | None:
    """The one axis, counted from the last, whose size isn't 1."""
    dims = table.dims(value)
    long = None if dims is None else [len(dims) - axis for axis, size in enumerate(dims) if size != _ONE]
    return long[0] if long is not None and len(long) == 1 else None


def _triangle_offset(value: ir.Value, table: ShapeTable) -> Size | None:
    """The offset of a constant lower triangle [..., positions, positions], or a part of it that is cut out."""
    offset, current = Size(), value
    for _ in range(_DEPTH):
        if is_constant(current):
            array = constant_array(current, table.weights)
            if array is None or array.ndim < 2 or array.size != array.shape[-1] * array.shape[-2] or array.dtype.kind not in "buif":
                return None
            square = array.reshape(array.shape[-2:]) != 0
            if not np.array_equal(square, array.reshape(array.shape[-2:])):
                return None
            ahead = int(square[0].sum()) - 1
            return offset + Size.of(ahead) if np.array_equal(square, np.tri(square.shape[0], square.shape[1], ahead, dtype=bool)) else None
        node = producer(current, "Slice", "Cast")
        source = None if node is None else node.inputs[0]
        dims = table.dims(source)
        if node is None or source is None or dims is None:
            return None
        if node.op_type == "Slice":
            bounds = table.slice_bounds(node, len(dims))
            if bounds is None:
                return None
            for axis, (start, _) in bounds.items():
                if not start.is_natural:
                    return None
                offset = offset + start if axis == len(dims) - _QUERIES else offset - start if axis == len(dims) - _KEYS else offset
        current = source
    return None
