"""Values read lane by lane: each element along the last axes as a sum of signed products of elements of other values.

`Concat(-x[8:], x[:8])`, `Reshape(Concat(Unsqueeze(-x[1::2]), Unsqueeze(x[::2])))` and two halves that are computed apart each say in
their own way which elements of x take part in which element of the result. This reads all of them into one form, so that a pass compares
only that form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import int_attribute
from miniort.graph.shape_propagation import ShapeTable, constant_slices
from miniort.model.constants import constant_array, is_constant
from miniort.types import Array

_DEPTH = 16
_MOST_TERMS = 4

Element: TypeAlias = "tuple[int, int]"
"""A source, by its place in `LaneReader.sources`, and which element along its last axes, counted in row-major order."""


@dataclass(frozen=True)
class Term:
    """One product for each lane. factor, sources, elements: arrays of the shape of the lanes; a source of -1 stands for no source.

    sources, elements: one array for each value that's multiplied, one or two.
    """

    factor: Array
    sources: tuple[Array, ...]
    elements: tuple[Array, ...]


Lanes: TypeAlias = "tuple[Term, ...]"
"""A sum of terms."""


@dataclass
class LaneReader:
    """Reads values as lanes of `x` and of whatever it's multiplied with. `nodes` collects the nodes between x and what was read.

    x is source 0, an element of it is one of its last axis.
    """

    x: ir.Value
    table: ShapeTable
    sources: list[tuple[ir.Value, int]] = field(default_factory=list)
    nodes: set[ir.Node] = field(default_factory=set)
    _known: dict[tuple[ir.Value, int], tuple[Lanes, bool] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sources.append((self.x, 1))

    def read(self, value: ir.Value | None, axes: int, depth: int = _DEPTH) -> Lanes | None:
        """The lanes of a value along its last `axes` axes; None if they aren't of known sizes, or aren't sums of products."""
        found = self._read(value, axes, depth)
        return None if found is None else found[0]

    def _read(self, value: ir.Value | None, axes: int, depth: int) -> tuple[Lanes, bool] | None:
        """Lanes, and whether x is in them."""
        if value is None:
            return None
        if (value, axes) not in self._known:
            self._known[value, axes] = None  # a value isn't made of itself
            self._known[value, axes] = self._read_anew(value, axes, depth)
        return self._known[value, axes]

    def _read_anew(self, value: ir.Value, axes: int, depth: int) -> tuple[Lanes, bool] | None:
        dims = self.table.dims(value)
        sizes = None if dims is None or axes > len(dims) else _numbers([size.number for size in dims[len(dims) - axes :]])
        if sizes is None or axes < 0:
            return None
        if value is self.x:
            return ((_view(0, sizes),), True) if axes == 1 else None
        node = value.producer()
        if node is not None and node.domain == "" and depth >= 0 and not is_constant(value):
            before = set(self.nodes)
            lanes = self._through(node, value, axes, sizes, depth - 1)
            if lanes is not None and lanes[1]:
                self.nodes.add(node)
                return lanes
            self.nodes = before
            if lanes is not None and node.op_type not in ("Add", "Sub", "Mul"):
                return lanes  # an element of a table is traced to where it's from, a sum or product of tables is a table
        numbers = self._constant(value, axes, sizes)
        if numbers is not None:
            return (Term(numbers, (), ()),), False
        return (_view(self._source(value, axes), sizes),), False

    def _source(self, value: ir.Value, axes: int) -> int:
        if (value, axes) not in self.sources:
            self.sources.append((value, axes))
        return self.sources.index((value, axes))

    def _constant(self, value: ir.Value, axes: int, sizes: tuple[int, ...]) -> Array | None:
        """A constant that is a number for each lane, and the same along all other axes."""
        if not is_constant(value) or prod(sizes, start=1) > 4096:
            return None
        array = constant_array(value, self.table.weights)
        if array is None or array.size != prod(sizes, start=1) or array.dtype.kind not in "fiuV":
            return None
        numbers = np.asarray(array, np.float64).reshape(sizes)
        return numbers if np.isin(numbers, (-1.0, 1.0)).all() else None

    def _through(self, node: ir.Node, value: ir.Value, axes: int, sizes: tuple[int, ...], depth: int) -> tuple[Lanes, bool] | None:
        rank = len(self.table.dims(value) or ())
        match node.op_type:
            case "Identity":
                return self._read(node.inputs[0], axes, depth)
            case "Neg":
                return _mapped(self._read(node.inputs[0], axes, depth), np.negative)
            case "Add" | "Sub":
                return self._sum(node, axes, sizes, depth)
            case "Mul":
                return self._product(node, axes, sizes, depth)
            case "Concat":
                return self._concatenated(node, axes, rank, depth)
            case "Slice" | "Split" | "Gather":
                return self._part(node, value, axes, rank, depth)
            case "Unsqueeze" | "Squeeze" | "Reshape":
                return self._reshaped(node, axes, sizes, rank, depth)
            case "Transpose":
                return self._transposed(node, axes, rank, depth)
        return None

    def _operands(self, node: ir.Node, axes: int, depth: int) -> list[tuple[Lanes, bool]] | None:
        parts = []
        for x in node.inputs:
            dims = self.table.dims(x)
            part = None if dims is None else self._read(x, min(axes, len(dims)), depth)
            if part is None:
                return None
            parts.append(part)
        return parts

    def _sum(self, node: ir.Node, axes: int, sizes: tuple[int, ...], depth: int) -> tuple[Lanes, bool] | None:
        parts = self._operands(node, axes, depth)
        if parts is None or not all(has_x for _, has_x in parts):
            return None
        (a, _), (b, _) = parts
        if node.op_type == "Sub":
            b = tuple(replace(term, factor=-term.factor) for term in b)
        terms = tuple(_broadcast(term, sizes) for term in (*a, *b))
        return (terms, True) if len(terms) <= _MOST_TERMS else None

    def _product(self, node: ir.Node, axes: int, sizes: tuple[int, ...], depth: int) -> tuple[Lanes, bool] | None:
        parts = self._operands(node, axes, depth)
        if parts is None:
            return None
        (a, has_a), (b, has_b) = parts
        if has_a and has_b:
            return None
        terms = []
        for p in a:
            for q in b:
                sources, elements = (*p.sources, *q.sources), (*p.elements, *q.elements)
                if len(sources) > 2:
                    return None
                terms.append(_broadcast(Term(p.factor * q.factor, sources, elements), sizes))
        return (tuple(terms), has_a or has_b) if len(terms) <= _MOST_TERMS else None

    def _concatenated(self, node: ir.Node, axes: int, rank: int, depth: int) -> tuple[Lanes, bool] | None:
        axis = int_attribute(node, "axis", 1) % rank - (rank - axes)
        if axis < 0:
            return None
        parts = [self._read(x, axes, depth) for x in node.inputs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        count = max(len(lanes) for lanes, _ in known)
        padded = [[*lanes, *[_nothing(lanes[0])] * (count - len(lanes))] for lanes, _ in known]
        terms = []
        for row in zip(*padded, strict=True):
            factors = max(len(term.sources) for term in row)
            filled = [_filled(term, factors) for term in row]
            join = [[getattr(term, name)[index] for term in filled] for name in ("sources", "elements") for index in range(factors)]
            joined = [np.concatenate(arrays, axis) for arrays in join]
            terms.append(Term(np.concatenate([term.factor for term in row], axis), tuple(joined[:factors]), tuple(joined[factors:])))
        return tuple(terms), any(has_x for _, has_x in known)

    def _part(self, node: ir.Node, value: ir.Value, axes: int, rank: int, depth: int) -> tuple[Lanes, bool] | None:
        source = node.inputs[0]
        dims = self.table.dims(source)
        if source is None or dims is None:
            return None
        inner = axes + len(dims) - rank  # of the value that it's taken from
        taken = self._taken(node, value, dims, rank)
        if taken is None or inner < 0 or any(axis < len(dims) - inner for axis in taken):
            return None
        found = self._read(source, inner, depth)
        if found is None:
            return None
        index: list[slice | Array] = [taken.get(axis, slice(None)) for axis in range(len(dims) - inner, len(dims))]
        return _mapped_all(found, lambda array: array[tuple(index)])

    def _taken(self, node: ir.Node, value: ir.Value, dims: Sequence[object], rank: int) -> dict[int, slice | Array] | None:
        """What a node takes of each axis that it cuts."""
        if node.op_type == "Slice":
            cuts = constant_slices(node, len(dims), self.table.weights)
            return None if cuts is None else {**cuts}
        axis = int_attribute(node, "axis", 0) % len(dims)
        if node.op_type == "Gather":
            array = constant_array(node.inputs[1], self.table.weights)
            return None if array is None or array.ndim > 1 or len(dims) - 1 + array.ndim != rank else {axis: array}
        widths = [None if (part := self.table.dims(output)) is None else part[axis].number for output in node.outputs]
        index = node.outputs.index(value)
        known = _numbers(widths[: index + 1])
        return None if known is None else {axis: slice(sum(known[:-1]), sum(known))}

    def _reshaped(self, node: ir.Node, axes: int, sizes: tuple[int, ...], rank: int, depth: int) -> tuple[Lanes, bool] | None:
        source = node.inputs[0]
        dims, own = self.table.dims(source), self.table.dims(node.outputs[0])
        if source is None or dims is None or own is None:
            return None
        leading = rank - axes
        if dims[:leading] != own[:leading]:
            return None
        inner = _numbers([size.number for size in dims[leading:]])
        if inner is None or prod(inner, start=1) != prod(sizes, start=1):
            return None
        found = self._read(source, len(dims) - leading, depth)
        return None if found is None else _mapped_all(found, lambda array: array.reshape(sizes))

    def _transposed(self, node: ir.Node, axes: int, rank: int, depth: int) -> tuple[Lanes, bool] | None:
        perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
        leading = rank - axes
        if len(perm) != rank or perm[:leading] != list(range(leading)):
            return None
        found = self._read(node.inputs[0], axes, depth)
        order = [axis - leading for axis in perm[leading:]]
        return None if found is None else _mapped_all(found, lambda array: array.transpose(order))


def _numbers(sizes: Sequence[int | None]) -> tuple[int, ...] | None:
    known = tuple(size for size in sizes if size is not None)
    return known if len(known) == len(sizes) else None


def _view(source: int, sizes: tuple[int, ...]) -> Term:
    elements = np.arange(prod(sizes, start=1)).reshape(sizes)
    return Term(np.ones(sizes), (np.full(sizes, source),), (elements,))


def _broadcast(term: Term, sizes: tuple[int, ...]) -> Term:
    arrays = [np.broadcast_to(array, sizes) for array in (term.factor, *term.sources, *term.elements)]
    count = len(term.sources)
    return Term(arrays[0], tuple(arrays[1 : 1 + count]), tuple(arrays[1 + count :]))


def _nothing(like: Term) -> Term:
    zero = np.zeros(like.factor.shape, int)
    return Term(np.zeros(like.factor.shape), (zero - 1,), (zero,))


def _filled(term: Term, count: int) -> Term:
    """The term as a product of `count` factors, those that it doesn't have being no source."""
    missing = count - len(term.sources)
    none, first = np.full(term.factor.shape, -1), np.zeros(term.factor.shape, int)
    return Term(term.factor, (*term.sources, *[none] * missing), (*term.elements, *[first] * missing))


def _mapped(found: tuple[Lanes, bool] | None, change: np.ufunc) -> tuple[Lanes, bool] | None:
    return None if found is None else (tuple(replace(term, factor=change(term.factor)) for term in found[0]), found[1])


def _mapped_all(found: tuple[Lanes, bool], change: object) -> tuple[Lanes, bool]:
    assert callable(change)
    terms = tuple(Term(change(term.factor), tuple(map(change, term.sources)), tuple(map(change, term.elements))) for term in found[0])
    return terms, found[1]
