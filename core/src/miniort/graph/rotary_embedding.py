"""Raising `RotaryEmbedding`: pairs of elements of each head turned by an angle (Su et al. 2021, arXiv:2104.09864).

y₁ = x₁ · cos - x₂ · sin and y₂ = x₂ · cos + x₁ · sin, a pair being elements i and i + dim / 2, or 2 i and 2 i + 1. What isn't turned is
handed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from miniort.graph.equal_lanes import equal_lanes
from miniort.graph.lanes import Element, LaneReader, Lanes
from miniort.graph.matching import is_enclosed, is_float, producer
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, can_make, make_node, replace_value
from miniort.graph.shape_propagation import Dims, ShapeTable, shape_tables
from miniort.graph.symbolic_sizes import Size, size_product
from miniort.model.constants import is_constant
from miniort.types import Array

_ROOTS = frozenset({"Add", "Sub", "Concat", "Reshape"})
_BETWEEN = _ROOTS | {"Mul", "Neg", "Slice", "Split", "Gather", "Unsqueeze", "Squeeze", "Transpose", "Identity"}
"""Ops that may stand between x and what is made of it."""
_DEPTH = 8
_ONE = Size.of(1)
_WIDEST = 1024
_SINCE = {"Slice": 10, "Squeeze": 13, "Unsqueeze": 13, "Expand": 8, "Reshape": 5, "Shape": 15}
"""The opsets that gave ops the form in which they're made here."""


@dataclass(frozen=True)
class _Rotation:
    """Which elements are turned with which: the first `width` ones, pairs of neighbours if `interleaved`, else of both halves.

    cosine, sine: an element of a table for each pair.
    """

    width: int
    interleaved: bool
    cosine: tuple[Element, ...]
    sine: tuple[Element, ...]


def raise_rotary_embedding(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of `RotaryEmbedding` by the op, also where only the first elements of a head are turned."""
    for graph, table in shape_tables(model, context.weights):
        raiser = _Raiser(list(model.graph.inputs), table, context)
        for node in reversed(list(graph)):  # what's turned in part ends in a Concat behind what is turned
            if node.graph is not None and node.domain == "" and node.op_type in _ROOTS and is_float(node.outputs[0]):
                raiser.raise_from(node)


@dataclass
class _Raiser:
    """Raises what one graph has. `inputs` are the model's; `halves` are the tables that were made for the op so far."""

    inputs: list[ir.Value]
    table: ShapeTable
    context: PassContext
    halves: dict[object, ir.Value] = field(default_factory=dict)

    def raise_from(self, last: ir.Node) -> None:
        """Replace what ends in this node, if it's a rotation of something."""
        root = last.outputs[0]
        dims = self.table.dims(root)
        width = None if dims is None or len(dims) not in (3, 4) else dims[-1].number
        if dims is None or width is None or not 2 <= width <= _WIDEST:
            return
        for x in self._candidates(root, dims):
            reader = LaneReader(x, self.table)
            lanes = reader.read(root, 1)
            rotation = None if lanes is None else _rotation(lanes, reader, width)
            if rotation is not None and is_enclosed(reader.nodes, root):
                self._replace(last, x, dims, rotation, reader)
                return

    def _candidates(self, root: ir.Value, dims: Dims) -> list[ir.Value]:
        """Values of the same shape that it may be made of by two products and a change of sign, nearest first."""
        seen: dict[ir.Value, None] = {root: None}
        layer, products, signs = [root], set(), 0
        for _ in range(_DEPTH):
            reached: dict[ir.Value, None] = {}
            for value in layer:
                node = value.producer()
                if node is None or node.domain != "" or node.op_type not in _BETWEEN or node.graph is not root.graph:
                    continue
                if node.op_type == "Mul":
                    products.add(node)
                signs += node.op_type in ("Neg", "Sub") or (node.op_type == "Mul" and any(map(is_constant, node.inputs)))
                reached.update((x, None) for x in node.inputs if x is not None and x not in seen and not is_constant(x))
            layer = list(reached)
            seen.update(reached)
        if len(products) < 2 or not signs:
            return []
        return [value for value in seen if value is not root and value.dtype == root.dtype and self.table.dims(value) == dims]

    def _replace(self, last: ir.Node, x: ir.Value, dims: Dims, found: _Rotation, reader: LaneReader) -> None:
        four = dims if len(dims) == 4 else (dims[0], _ONE, *dims[1:])
        order = self._order(dims, found, reader)
        if four[0].number is None and not any(four[0] in (self.table.dims(each) or ()) for each in self.inputs):
            return  # the tables must have as many rows, and nobody could tell how many that is
        tables = [reader.sources[elements[0][0]][0] for elements in (found.cosine, found.sine)]
        if order is None or not can_make(self.context, "RotaryEmbedding", 23, [x, *tables]):
            return
        batch, *_ = four
        halves = [self._half(elements, reader, order, batch, last) for elements in (found.cosine, found.sine)]
        whole = x
        if len(dims) == 3:
            whole = self._made(last, "Unsqueeze", [x, self._vector(last, [1])], f"{last.outputs[0].name}/heads")
        elif order == "time first":
            whole = self._made(last, "Transpose", [x], f"{last.outputs[0].name}/heads", perm=[0, 2, 1, 3])
        attributes = {"interleaved": int(found.interleaved)} if found.interleaved else {}
        if found.width != dims[-1].number:
            attributes["rotary_embedding_dim"] = found.width
        node = make_node(self.context, last, "RotaryEmbedding", 23, [whole, *halves], attributes)
        result = node.outputs[0]
        if whole is not x:
            result.type = x.type
            self.table.follow(node)
            back = ("Squeeze", [result, self._vector(last, [1])], {}) if len(dims) == 3 else ("Transpose", [result], {"perm": [0, 2, 1, 3]})
            result = self._made(last, back[0], back[1], f"{last.outputs[0].name}/turned", **back[2])
        count = len(reader.nodes)
        replace_value(last.outputs[0], result, reader.nodes)
        self.table.follow(node)
        pairs = "neighbours" if found.interleaved else "halves"
        self.context.changed(node, f"x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin of {pairs} in {count} nodes made RotaryEmbedding")

    def _order(self, dims: Dims, found: _Rotation, reader: LaneReader) -> str | None:
        """What x is: [batch, heads, time, dim], [batch, time, heads, dim] or [batch, time, dim], as tables tell; None if they don't fit."""
        orders = {self._order_by(dims, *reader.sources[elements[0][0]]) for elements in (found.cosine, found.sine)}
        return orders.pop() if len(orders) == 1 else None

    def _order_by(self, dims: Dims, value: ir.Value, axes: int) -> str | None:
        given = self.table.dims(value) or ()
        leading = given[: len(given) - axes]
        if len(leading) >= len(dims):
            return None
        batch, *others = (*(_ONE,) * (len(dims) - 1 - len(leading)), *leading)
        if batch not in (_ONE, dims[0]):
            return None
        if len(dims) == 3:
            return "no heads" if others == [dims[1]] else None
        return "heads first" if others == [_ONE, dims[2]] else "time first" if others == [dims[1], _ONE] else None

    def _half(self, elements: tuple[Element, ...], reader: LaneReader, order: str, batch: Size, last: ir.Node) -> ir.Value:
        """A table [batch, time, pairs] of these elements. It's put where its source is computed: all layers read the same."""
        value, axes = reader.sources[elements[0][0]]
        index = tuple(element for _, element in elements)
        key = (value, axes, index, order, batch)
        if key not in self.halves:
            self.halves[key] = self._made_half(value, axes, list(index), order, batch, last)
        return self.halves[key]

    def _made_half(self, value: ir.Value, axes: int, index: list[int], order: str, batch: Size, last: ir.Node) -> ir.Value:
        graph = last.graph
        assert isinstance(graph, ir.Graph)
        source = value.producer()
        position = next(iter(graph)) if source is None or source.graph is not graph else next(_behind(graph, source))
        dims = self.table.dims(value) or ()
        leading, width = dims[: len(dims) - axes], size_product(dims[len(dims) - axes :]).number or 0
        name = f"{value.name}/{order.split()[0]}"
        given = _by_position(value, self.table) if axes == 1 and order == "heads first" else None
        if axes != 1:
            value = self._made(position, "Reshape", [value, self._vector(position, [*[0] * len(leading), width])], f"{name}/flat")
        if given is not None:
            value = given
        elif len(leading) == 3 and leading[0] != _ONE:
            value = self._made(position, "Squeeze", [value, self._vector(position, [1 if order == "heads first" else 2])], f"{name}/table")
        elif len(leading) != 2 or order == "time first":
            value = self._made(position, "Reshape", [value, self._vector(position, [1, -1, width])], f"{name}/table")
        if index != list(range(width)):
            value = self._selected(value, index, position, name)
        own = self.table.dims(value)
        if own is not None and own[0] != batch:
            value = self._expanded(value, batch, position, name)
        return value

    def _selected(self, value: ir.Value, index: list[int], position: ir.Node, name: str) -> ir.Value:
        step = index[1] - index[0] if len(index) > 1 else 1
        if step > 0 and index == list(range(index[0], index[-1] + 1, step)):
            bounds = [self._vector(position, [number]) for number in (index[0], index[-1] + 1, 2, step)]
            return self._made(position, "Slice", [value, *bounds], f"{name}/half")
        return self._made(position, "Gather", [value, self._vector(position, index)], f"{name}/half", axis=2)

    def _expanded(self, value: ir.Value, batch: Size, position: ir.Node, name: str) -> ir.Value:
        """A table for one row given to every row of the batch, as the op wants it."""
        if batch.number is not None:
            sizes = self._vector(position, [batch.number, 1, 1])
        else:
            places = ((each, axis) for each in self.inputs for axis, size in enumerate(self.table.dims(each) or ()) if size == batch)
            source, axis = next(places)
            one = self._made(position, "Shape", [source], f"{name}/batch", start=axis, end=axis + 1)
            sizes = self._made(position, "Concat", [one, self._vector(position, [1, 1])], f"{name}/rows", axis=0)
        return self._made(position, "Expand", [value, sizes], f"{name}/expanded")

    def _made(self, before: ir.Node, op: str, inputs: list[ir.Value], name: str, **attributes: object) -> ir.Value:
        node = make_node(self.context, before, op, _SINCE.get(op, 1), inputs, attributes)
        value = node.outputs[0]
        value.name = name
        value.type = ir.TensorType(ir.DataType.INT64) if op == "Shape" else inputs[0].type
        self.table.follow(node)
        return value

    def _vector(self, before: ir.Node, numbers: list[int]) -> ir.Value:
        return add_constant(before, f"{before.name}/{'_'.join(map(str, numbers[:4]))}", np.array(numbers, np.int64))


def _behind(graph: ir.Graph, node: ir.Node) -> Iterator[ir.Node]:
    following = False
    for each in graph:
        if following:
            yield each
        following = following or each is node


def _rotation(lanes: Lanes, reader: LaneReader, width: int) -> _Rotation | None:
    """What lanes of x and tables are turned; None if they aren't a rotation."""
    straight: list[tuple[int, Element | None]] = []  # for each lane: the element of x that it's made of, and the table's
    crossed: list[tuple[int, Element, float] | None] = []
    for lane in range(width):
        found = _lane(lanes, lane)
        if found is None:
            return None
        plain, other = found
        if plain[0] != lane:
            return None
        straight.append(plain)
        crossed.append(other)
    turned = sum(other is not None for other in crossed)
    if not turned or turned % 2 or any((other is None) != (lane >= turned) for lane, other in enumerate(crossed)):
        return None
    for interleaved in (False, True):
        pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + turned // 2) for i in range(turned // 2)]
        rotation = _paired(pairs, straight, crossed, reader, turned, interleaved)
        if rotation is not None:
            return rotation
    return None


def _lane(lanes: Lanes, lane: int) -> tuple[tuple[int, Element | None], tuple[int, Element, float] | None] | None:
    """What one lane is made of: (element of x, element of the cosines), and (element of x, element of the sines, ±1)."""
    terms: list[tuple[int, Element | None, float]] = []
    for term in lanes:
        factor = float(term.factor[lane])
        if not factor:
            continue
        parts = [(int(s[lane]), int(e[lane])) for s, e in zip(term.sources, term.elements, strict=True) if s[lane] >= 0]
        own = [element for source, element in parts if source == 0]
        others = [part for part in parts if part[0] != 0]
        if len(own) != 1 or len(others) > 1 or abs(factor) != 1.0:
            return None
        terms.append((own[0], others[0] if others else None, factor))
    if len(terms) == 1 and terms[0][1] is None and terms[0][2] == 1.0:
        return (terms[0][0], None), None
    if len(terms) != 2:
        return None
    plain, other = terms if terms[0][0] == lane else terms[::-1]
    if plain[1] is None or other[1] is None or plain[2] != 1.0:
        return None
    return (plain[0], plain[1]), (other[0], other[1], other[2])


def _paired(
    pairs: list[tuple[int, int]],
    straight: list[tuple[int, Element | None]],
    crossed: list[tuple[int, Element, float] | None],
    reader: LaneReader,
    turned: int,
    interleaved: bool,
) -> _Rotation | None:
    cosine, sine = [], []
    for first, second in pairs:
        a, b = crossed[first], crossed[second]
        c, d = straight[first][1], straight[second][1]
        if a is None or b is None or c is None or d is None or (a[0], b[0]) != (second, first) or (a[2], b[2]) != (-1.0, 1.0):
            return None
        cosine.append((c, d))
        sine.append((a[1], b[1]))
    kinds: dict[int, Array | None] = {}
    for wanted in (cosine, sine):
        if len({element[0] for pair in wanted for element in pair}) != 1:
            return None
        if not all(_same(c, d, reader, kinds) for c, d in wanted):
            return None
    return _Rotation(turned, interleaved, tuple(pair[0] for pair in cosine), tuple(pair[0] for pair in sine))


def _same(a: Element, b: Element, reader: LaneReader, kinds: dict[int, Array | None]) -> bool:
    """Whether two elements of tables are provably equal."""
    if a == b:
        return True
    source = a[0]
    if source != b[0]:
        return False
    if source not in kinds:
        value, axes = reader.sources[source]
        found = equal_lanes(value, axes, reader.table)
        kinds[source] = None if found is None else found.reshape(-1)
    known = kinds[source]
    return known is not None and bool(known[a[1]] == known[b[1]])


def _by_position(value: ir.Value | None, table: ShapeTable) -> ir.Value | None:
    """[batch, time, dim] of a table [batch, 1, time, dim]."""
    node = producer(value, "Unsqueeze", "Reshape")
    source = None if node is None else node.inputs[0]
    given, dims = table.dims(source), table.dims(value)
    return source if given is not None and len(given) == 3 and dims == (given[0], _ONE, *given[1:]) else None


RAISE_ROTARY_EMBEDDING = GraphPass("raise-rotary-embedding", Level.EXTENDED, raise_rotary_embedding)
