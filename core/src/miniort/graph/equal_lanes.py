"""Which elements along the last axes of a value are provably equal, such as the two halves of a table that was joined with itself."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import int_attribute
from miniort.graph.shape_propagation import ShapeTable
from miniort.model.constants import constant_array
from miniort.types import Array

_UNARY = frozenset({"Identity", "Cos", "Sin", "Cast", "Neg", "Exp", "Sqrt", "Reciprocal"})
_BINARY = frozenset({"Mul", "Div", "Add", "Sub", "Pow"})
_ROWS = 64
"""Rows of a constant that are looked at before all of them are."""
_DEPTH = 16


def equal_lanes(value: ir.Value | None, axes: int, table: ShapeTable, depth: int = _DEPTH) -> Array | None:
    """A number for each element along the last `axes` axes, of their shape: equal numbers stand for elements that are always equal.

    None if the sizes of these axes aren't known.
    """
    sizes = _last_sizes(value, axes, table)
    if value is None or sizes is None:
        return None
    found = _constant(value, sizes, table)
    node = value.producer()
    if found is None and node is not None and node.domain == "" and depth >= 0:
        found = _computed(node, value, axes, sizes, table, depth - 1)
    return np.arange(prod(sizes, start=1)).reshape(sizes) if found is None else np.broadcast_to(found, sizes)


def _last_sizes(value: ir.Value | None, axes: int, table: ShapeTable) -> tuple[int, ...] | None:
    dims = table.dims(value)
    if dims is None or not 0 <= axes <= len(dims):
        return None
    numbers = [size.number for size in dims[len(dims) - axes :]]
    return None if None in numbers else tuple(number for number in numbers if number is not None)


def _constant(value: ir.Value, sizes: tuple[int, ...], table: ShapeTable) -> Array | None:
    array = constant_array(value, table.weights)
    if array is None or array.dtype.kind not in "fiuV" or not array.size:
        return None
    columns = array.reshape(-1, prod(sizes, start=1))
    _, first, kinds = np.unique(np.asarray(columns[:_ROWS], np.float64), axis=1, return_index=True, return_inverse=True)
    kinds = kinds.reshape(-1)
    if len(columns) > _ROWS and not np.array_equal(columns, columns[:, first[kinds]]):
        return None
    return np.asarray(kinds.reshape(sizes))


def _computed(node: ir.Node, value: ir.Value, axes: int, sizes: tuple[int, ...], table: ShapeTable, depth: int) -> Array | None:
    source = node.inputs[0] if node.inputs else None
    given, rank = table.dims(source), len(table.dims(value) or ())
    if given is None:
        return None
    op = node.op_type
    if op in _UNARY:
        return equal_lanes(source, axes, table, depth)
    if op in _BINARY:
        return _both(node, axes, sizes, table, depth)
    if op == "Concat":
        return _concatenated(node, axes, rank, table, depth)
    if op == "Gather":
        return _gathered(node, axes, len(given), table, depth)
    if op in ("Reshape", "Unsqueeze", "Squeeze"):
        return _reshaped(source, sizes, table, depth)
    if op in ("Expand", "Tile"):
        inner = equal_lanes(source, min(axes, len(given)), table, depth)
        return inner if inner is not None and (op == "Expand" or inner.shape == sizes) else None
    if op == "Slice":
        bounds = table.slice_bounds(node, len(given))
        return equal_lanes(source, axes, table, depth) if bounds is not None and max(bounds) < len(given) - axes else None
    if op == "Transpose":
        perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
        return equal_lanes(source, axes, table, depth) if perm[rank - axes :] == list(range(rank - axes, rank)) and perm else None
    return equal_lanes(node.inputs[1], 1, table, depth) if op == "MatMul" and axes == 1 else None


def _both(node: ir.Node, axes: int, sizes: tuple[int, ...], table: ShapeTable, depth: int) -> Array | None:
    """Elements are equal where those of both operands are."""
    parts = []
    for x in node.inputs:
        part = equal_lanes(x, min(axes, len(table.dims(x) or ())), table, depth)
        if part is None:
            return None
        parts.append(np.broadcast_to(part, sizes))
    both: Array = parts[0] * (int(parts[1].max(initial=0)) + 1) + parts[1]
    return both


def _concatenated(node: ir.Node, axes: int, rank: int, table: ShapeTable, depth: int) -> Array | None:
    axis = int_attribute(node, "axis", 1) % rank - (rank - axes)
    if axis < 0:
        return None  # rows of several values behind each other: equal in one isn't equal in another
    offsets: dict[ir.Value | None, int] = {}
    parts, above = [], 0
    for x in node.inputs:
        part = equal_lanes(x, axes, table, depth)
        if part is None:
            return None
        if x not in offsets:
            offsets[x] = above
            above += int(part.max(initial=0)) + 1
        parts.append(part + offsets[x])
    return np.concatenate(parts, axis)


def _gathered(node: ir.Node, axes: int, rank: int, table: ShapeTable, depth: int) -> Array | None:
    axis = int_attribute(node, "axis", 0) % rank
    if axis < rank - axes:
        return equal_lanes(node.inputs[0], axes, table, depth)  # whole rows
    index = constant_array(node.inputs[1], table.weights)
    inner = None if index is None or axis < rank - 1 or index.ndim != 1 or axes != 1 else equal_lanes(node.inputs[0], 1, table, depth)
    return None if inner is None or index is None else inner[index]


def _reshaped(source: ir.Value | None, sizes: tuple[int, ...], table: ShapeTable, depth: int) -> Array | None:
    dims = table.dims(source) or ()
    for axes in range(len(dims) + 1):
        inner = _last_sizes(source, axes, table)
        if inner is not None and prod(inner, start=1) == prod(sizes, start=1):
            found = equal_lanes(source, axes, table, depth)
            return None if found is None else found.reshape(sizes)
    return None
