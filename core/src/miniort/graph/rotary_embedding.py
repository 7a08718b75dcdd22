"""Raising `RotaryEmbedding`: x · cos + (-x₂, x₁) · sin, x₁ and x₂ the halves of each head (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import consumers, int_attribute, is_enclosed, producer, scalar
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, can_make, make_node, replace_value
from miniort.graph.shape_propagation import ShapeTable, shape_tables
from miniort.graph.symbolic_sizes import Size
from miniort.model.constants import is_constant


def raise_rotary_embedding(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of `RotaryEmbedding` by the op, also where only the first elements of a head are turned."""
    for graph, table in shape_tables(model, context.weights):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "Add":
                _raise(node, table, context)


def _raise(add: ir.Node, table: ShapeTable, context: PassContext) -> None:
    products = [producer(value, "Mul") for value in add.inputs]
    if None in products:
        return
    for straight, crossed in (products, products[::-1]):
        assert straight is not None
        assert crossed is not None
        for turned, sine in (crossed.inputs, list(crossed.inputs)[::-1]):
            found = _quarter_turn(turned, table)
            if found is None or found[0] not in straight.inputs:
                continue
            x, nodes = found
            cosine = straight.inputs[1] if straight.inputs[0] is x else straight.inputs[0]
            _replace(add, x, cosine, sine, nodes | {add, straight, crossed}, table, context)
            return


def _quarter_turn(value: ir.Value | None, table: ShapeTable) -> tuple[ir.Value, frozenset[ir.Node]] | None:
    """x where a value is (-x₂, x₁), and the nodes that compute that from x."""
    concat = producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2 or int_attribute(concat, "axis", 1) not in (-1, 3):
        return None
    negative = producer(concat.inputs[0], "Neg")
    upper = None if negative is None else producer(negative.inputs[0], "Slice", "Split")
    lower = producer(concat.inputs[1], "Slice", "Split")
    if negative is None or upper is None or lower is None or upper.inputs[0] is not lower.inputs[0] or upper.inputs[0] is None:
        return None
    x = upper.inputs[0]
    dims = table.dims(x)
    width = None if dims is None or len(dims) != 4 else dims[3].number
    if width is None or width % 2:
        return None
    parts = _range(negative.inputs[0], upper, width, table), _range(concat.inputs[1], lower, width, table)
    return (x, frozenset({concat, negative, upper, lower})) if parts == ((width // 2, width), (0, width // 2)) else None


def _range(value: ir.Value | None, node: ir.Node, width: int, table: ShapeTable) -> tuple[int, int] | None:
    """Which elements of the last of 4 axes a Slice or an output of a Split takes; None if it cuts another axis."""
    if node.op_type == "Split":
        axis = int_attribute(node, "axis", 0)
        parts = [None if (dims := table.dims(output)) is None else dims[3].number for output in node.outputs]
        if axis not in (-1, 3) or value not in node.outputs or None in parts:
            return None
        index = node.outputs.index(value)
        before = sum(part for part in parts[:index] if part is not None)
        return before, before + (parts[index] or 0)
    bounds = table.slice_bounds(node, 4)
    if bounds is None or set(bounds) != {3}:
        return None
    start, end = (bound.number for bound in bounds[3])
    return None if start is None or end is None else (start % width if start < 0 else start, min(end, width) if end >= 0 else end % width)


def _replace(
    add: ir.Node,
    x: ir.Value,
    cosine: ir.Value | None,
    sine: ir.Value | None,
    nodes: frozenset[ir.Node],
    table: ShapeTable,
    context: PassContext,
) -> None:
    dims = table.dims(x)
    tables = [_by_position(value, table) for value in (cosine, sine)]
    assert dims is not None
    turned = dims[3].number
    root = add.outputs[0]
    fits = all(each is not None and table.dims(each) == (dims[0], *dims[2:]) and _repeats(each, context) for each in tables)
    if not fits or turned is None or not is_enclosed(nodes, root) or not can_make(context, "RotaryEmbedding", 23, [x, *tables]):
        return
    last, attributes = add, {}
    whole = _partly_turned(x, root, turned, table)
    if whole is not None and is_enclosed(nodes | {whole[1]}, whole[1].outputs[0]):
        x, last = whole
        root, nodes, attributes = last.outputs[0], nodes | {last}, {"rotary_embedding_dim": turned}
    halves = [_first_half(each, turned, last, name) for each, name in zip(tables, ("cosines", "sines"), strict=True) if each is not None]
    node = make_node(context, last, "RotaryEmbedding", 23, [x, *halves], attributes)
    replace_value(root, node.outputs[0], nodes)
    context.changed(node, f"x · cos + (-x₂, x₁) · sin in {len(nodes)} nodes made RotaryEmbedding")


def _by_position(value: ir.Value | None, table: ShapeTable) -> ir.Value | None:
    """[batch, time, dim] of a table [batch, 1, time, dim]."""
    node = producer(value, "Unsqueeze", "Reshape")
    source = None if node is None else node.inputs[0]
    given, dims = table.dims(source), table.dims(value)
    return source if given is not None and len(given) == 3 and dims == (given[0], Size.of(1), *given[1:]) else None


def _repeats(value: ir.Value | None, context: PassContext) -> bool:
    """Whether the second half of the last axis is provably the first once more."""
    while True:
        node = producer(value, "Cos", "Sin", "Mul", "Cast", "Concat")
        if node is None:
            return False
        if node.op_type == "Concat":
            return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1] and int_attribute(node, "axis", 1) in (-1, 2)
        rest: Sequence[ir.Value | None] = [x for x in node.inputs if not is_constant(x)]
        if len(rest) != 1 or any(is_constant(x) and scalar(x, context.weights) is None for x in node.inputs):
            return False
        value = rest[0]


def _partly_turned(x: ir.Value, root: ir.Value, turned: int, table: ShapeTable) -> tuple[ir.Value, ir.Node] | None:
    """The whole heads of which x is the first part, and the Concat that puts the turned part before the rest again."""
    first = producer(x, "Slice", "Split")
    concat = next(consumers(root, "Concat"), None)
    whole = None if first is None else first.inputs[0]
    dims = table.dims(whole)
    width = None if dims is None or len(dims) != 4 else dims[3].number
    if first is None or concat is None or whole is None or width is None or len(concat.inputs) != 2 or concat.inputs[0] is not root:
        return None
    rest = producer(concat.inputs[1], "Slice", "Split")
    if rest is None or rest.inputs[0] is not whole or int_attribute(concat, "axis", 1) not in (-1, 3):
        return None
    ranges = _range(x, first, width, table), _range(concat.inputs[1], rest, width, table)
    return (whole, concat) if ranges == ((0, turned), (turned, width)) else None


def _first_half(value: ir.Value, width: int, before: ir.Node, name: str) -> ir.Value:
    """[batch, time, dim] -> [batch, time, dim / 2]: tables are given for pairs of elements. Equal ones of other layers are merged later."""
    prefix = f"{before.outputs[0].name}/{name}"
    bounds = [
        add_constant(before, f"{prefix}_{each}", np.array([number], np.int64))
        for each, number in (("start", 0), ("end", width // 2), ("axis", 2))
    ]
    node = ir.node("Slice", [value, *bounds], name=f"{before.name}/{name}")
    half = node.outputs[0]
    half.name, half.type = prefix, value.type
    shape = value.shape
    half.shape = None if shape is None else ir.Shape([*shape[:2], width // 2])
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return half


RAISE_ROTARY_EMBEDDING = GraphPass("raise-rotary-embedding", Level.EXTENDED, raise_rotary_embedding)
