"""Values that are another one's elements in other places: axes turned, merged and split, and elements repeated.

Exporters move elements about in many ways that come to the same. Here a chain of such nodes is tried out on numbers: sizes that aren't
known stand for different primes, so what is true of these sizes is true of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import int_attribute, scalar
from miniort.graph.shape_propagation import Dims, ShapeTable
from miniort.graph.symbolic_sizes import Size
from miniort.model.constants import constant_array, is_constant
from miniort.types import Array

_MOVES = frozenset({"Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
_LARGEST = 1 << 24
"""Elements of the largest value that is tried out."""
_DEPTH = 12


@dataclass(frozen=True)
class Moved:
    """A value that another one's elements come from, multiplied with `factor` on the way."""

    source: ir.Value
    factor: float


def origins(value: ir.Value, table: ShapeTable) -> Iterator[Moved]:
    """The value itself, and those whose elements it has in other places and multiplied with a number, nearest first."""
    factor = 1.0
    current: ir.Value | None = value
    for _ in range(_DEPTH):
        if current is None or is_constant(current):
            return
        yield Moved(current, factor)
        step = _step(current, table)
        if step is None:
            return
        current, factor = step[0], factor * step[1]


def _step(value: ir.Value, table: ShapeTable) -> tuple[ir.Value | None, float] | None:
    """The value one node before, and what it's multiplied with there."""
    node = value.producer()
    if node is None or node.domain != "" or node.attributes.get("broadcast") is not None:
        return None
    if node.op_type in _MOVES:
        same = node.op_type != "Concat" or len(set(node.inputs)) == 1
        return (node.inputs[0], 1.0) if same else None
    if node.op_type in ("Mul", "Div"):
        for index, x in enumerate(node.inputs):
            number = scalar(node.inputs[1 - index], table.weights)
            keeps_shape = table.dims(x) == table.dims(value) and table.dims(x) is not None
            if number is not None and keeps_shape and number > 0 and not (node.op_type == "Div" and index == 1):
                return x, number if node.op_type == "Mul" else 1 / number
    return None


@dataclass
class Trial:
    """Sizes that stand for unknown ones."""

    table: ShapeTable
    _sizes: dict[str, int] = field(default_factory=dict)

    def shape(self, dims: Dims) -> tuple[int, ...] | None:
        """Sizes to try; None if they're too many or too large."""
        shape = tuple(self._number(size) for size in dims)
        return shape if 0 < int(np.prod(shape, dtype=float)) <= _LARGEST else None

    def _number(self, size: Size) -> int:
        total = 0
        for names, factor in size.terms:
            for name in names:
                if name not in self._sizes:
                    self._sizes[name] = _PRIMES[len(self._sizes) % len(_PRIMES)]
                factor *= self._sizes[name]
            total += factor
        return total

    def numbered(self, value: ir.Value) -> Array | None:
        """An array of the value's shape whose elements all differ."""
        dims = self.table.dims(value)
        shape = None if dims is None else self.shape(dims)
        return None if shape is None else np.arange(np.prod(shape), dtype=np.int32).reshape(shape)

    def moved(self, source: ir.Value, array: Array, value: ir.Value | None) -> Array | None:
        """What becomes of a source's elements in a value that is made of it by moves; None if it can't be told."""
        if value is source:
            return array
        step = None if value is None else _step(value, self.table)
        node = None if value is None else value.producer()
        if value is None or step is None or node is None:
            return None
        before = self.moved(source, array, step[0])
        dims = self.table.dims(value)
        shape = None if dims is None else self.shape(dims)
        if before is None or shape is None:
            return None
        after = self._move(node, before, shape)
        return after if after is not None and after.shape == shape else None

    def _move(self, node: ir.Node, x: Array, shape: tuple[int, ...]) -> Array | None:
        match node.op_type:
            case "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze":
                return x.reshape(shape) if x.size == np.prod(shape) else None
            case "Transpose":
                return x.transpose(node.attributes["perm"].as_ints() if "perm" in node.attributes else None)
            case "Expand":
                return np.broadcast_to(x, shape) if _broadcasts(x.shape, shape) else None
            case "Tile":
                divides = x.ndim == len(shape) and all(not size % own for own, size in zip(x.shape, shape, strict=True))
                return np.tile(x, [size // own for own, size in zip(x.shape, shape, strict=True)]) if divides else None
            case "Concat":
                return np.concatenate([x] * len(node.inputs), int_attribute(node, "axis", 1))
            case "Gather":
                index = constant_array(node.inputs[1], self.table.weights)
                axis = int_attribute(node, "axis", 0)
                inside = index is not None and index.size and int(index.max()) < x.shape[axis] and int(index.min()) >= -x.shape[axis]
                return np.take(x, index, axis) if index is not None and inside else None
        return x


def _broadcasts(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    padded = (1,) * (len(shape) - len(own)) + own
    return len(own) <= len(shape) and all(a in (1, b) for a, b in zip(padded, shape, strict=True))
