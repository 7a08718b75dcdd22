"""Whether two models are the same, down to names, types and constants: what is written must be what is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from miniort.model.constants import initial_array, shape_of
from miniort.model.loading import attribute_graphs, attribute_value
from miniort.model.weights import WeightStore
from miniort.types import Array

_COMPARED = 1 << 16
"""Bytes of constants up to which they're compared; to read large ones would take longer than all else."""


def same_model(first: ir.Model, second: ir.Model, weights: tuple[WeightStore, WeightStore]) -> bool:
    """Whether nothing tells the two apart that a session looks at; contents of large constants aren't compared. weights: their stores."""
    if dict(first.opset_imports) != dict(second.opset_imports) or first.ir_version != second.ir_version:
        return False
    if first.functions or second.functions:
        return False
    return _Comparison(weights).graphs(first.graph, second.graph)


class _Comparison:
    def __init__(self, weights: tuple[WeightStore, WeightStore]) -> None:
        self._weights = weights
        self._pairs: dict[ir.Value, ir.Value] = {}
        self._seconds: set[ir.Value] = set()

    def graphs(self, first: ir.Graph, second: ir.Graph) -> bool:
        return (
            self._values(first.inputs, second.inputs)
            and self._values(list(first.initializers.values()), list(second.initializers.values()))
            and len(first) == len(second)
            and all(map(self._nodes, first, second))
            and self._values(first.outputs, second.outputs)
        )

    def _values(self, first: Sequence[ir.Value | None], second: Sequence[ir.Value | None]) -> bool:
        return len(first) == len(second) and all(map(self._value, first, second))

    def _value(self, first: ir.Value | None, second: ir.Value | None) -> bool:
        if first is None or second is None:
            return first is second
        if first in self._pairs:
            return self._pairs[first] is second
        if second in self._seconds:
            return False  # two values became one
        self._pairs[first] = second
        self._seconds.add(second)
        if not first.name and not second.name:
            return True  # an output that nobody wants
        return (
            first.name == second.name
            and first.type == second.type
            and shape_of(first) == shape_of(second)
            and (first.is_graph_input(), first.is_graph_output()) == (second.is_graph_input(), second.is_graph_output())
            and self._constants(first, second)
        )

    def _constants(self, first: ir.Value, second: ir.Value) -> bool:
        if first.const_value is None or second.const_value is None:
            return first.const_value is second.const_value
        one, other = (initial_array(value, store) for value, store in zip((first, second), self._weights, strict=True))
        if one.dtype != other.dtype or one.shape != other.shape or _order(one) != _order(other):
            return False
        return one.nbytes > _COMPARED or _same_bytes(one, other)

    def _nodes(self, first: ir.Node, second: ir.Node) -> bool:
        return (
            (first.name, *first.op_identifier(), first.version) == (second.name, *second.op_identifier(), second.version)
            and self._values(first.inputs, second.inputs)
            and list(first.attributes) == list(second.attributes)
            and all(map(self._attributes, first.attributes.values(), second.attributes.values()))
            and self._values(first.outputs, second.outputs)
        )

    def _attributes(self, first: ir.Attr, second: ir.Attr) -> bool:
        if (first.name, first.type, first.ref_attr_name) != (second.name, second.type, second.ref_attr_name):
            return False
        if first.is_ref():
            return True
        bodies, others = attribute_graphs(first), attribute_graphs(second)
        if bodies or others:
            return len(bodies) == len(others) and all(map(self.graphs, bodies, others))
        return _same_attribute(attribute_value(first), attribute_value(second))


def _same_attribute(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same_attribute, first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and _same_bytes(first, second)
    if isinstance(first, ir.TypeAndShape) and isinstance(second, ir.TypeAndShape):
        return str(first) == str(second)
    return bool(type(first) is type(second) and (first == second or (first != first and second != second)))


def _order(array: Array) -> list[int]:
    """The axes as they follow each other in memory, which decides how a product with the array is computed."""
    axes = [axis for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)) if size > 1 and stride and array.size]
    return sorted(axes, key=lambda axis: -abs(array.strides[axis]))


def _same_bytes(first: Any, second: Any) -> bool:
    if first.dtype == object:
        return bool(np.array_equal(first, second))
    one, other = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (first, second))
    return bool(np.array_equal(one, other))
