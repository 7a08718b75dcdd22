"""Products that are written as `Einsum` made `MatMul`, which is faster, and which passes that look for attention and linear layers know."""

from __future__ import annotations

import onnx_ir as ir

from miniort.graph.matching import is_float
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import can_make, make_node, replace_value
from miniort.graph.shape_propagation import ShapeTable, shape_tables


def raise_einsum(model: ir.Model, context: PassContext) -> None:
    """Replace an Einsum of two values by MatMul, where it sums over one axis and has one axis of its own from each."""
    for graph, table in shape_tables(model, context.weights):
        for node in list(graph):
            if node.domain == "" and node.op_type == "Einsum" and len(node.inputs) == 2 and is_float(node.outputs[0]):
                _raise(node, table, context)


def _raise(node: ir.Node, table: ShapeTable, context: PassContext) -> None:
    equation = "".join(node.attributes["equation"].as_string().split())
    operands, arrow, out = equation.partition("->")
    left, comma, right = operands.partition(",")
    a, b = node.inputs
    if (
        not arrow
        or not comma
        or "." in equation
        or a is None
        or b is None
        or any(len(set(part)) < len(part) for part in (left, right, out))
    ):
        return
    batch = [label for label in out if label in left and label in right]
    summed = [label for label in left if label in right and label not in out]
    rows, columns = ([label for label in out if label in own and label not in other] for own, other in ((left, right), (right, left)))
    accounted = {*batch, *summed, *rows, *columns}
    if not len(summed) == len(rows) == len(columns) == 1 or accounted != {*left, *right} or not can_make(context, "MatMul", 13, [a, b]):
        return
    ranks = [len(table.dims(value) or ()) for value in (a, b)]
    if ranks != [len(left), len(right)]:
        return
    x = _ordered(a, left, [*batch, *rows, *summed], node, table, context)
    y = _ordered(b, right, [*batch, *summed, *columns], node, table, context)
    product = make_node(context, node, "MatMul", 9, [x, y], {})
    result = product.outputs[0]
    result.type = node.outputs[0].type
    table.follow(product)
    last = _ordered(result, "".join([*batch, *rows, *columns]), list(out), node, table, context)
    replace_value(node.outputs[0], last, {node})
    context.changed(product, f"Einsum {equation} made MatMul")


def _ordered(value: ir.Value, labels: str, wanted: list[str], before: ir.Node, table: ShapeTable, context: PassContext) -> ir.Value:
    """A value with its axes in another order, itself if they're in that order already."""
    order = [labels.index(label) for label in wanted]
    if order == list(range(len(order))):
        return value
    turned = make_node(context, before, "Transpose", 1, [value], {"perm": order})
    turned.outputs[0].name, turned.outputs[0].type = f"{before.outputs[0].name}/{''.join(wanted)}_of_{value.name}", value.type
    table.follow(turned)
    return turned.outputs[0]


RAISE_EINSUM = GraphPass("raise-einsum", Level.EXTENDED, raise_einsum)
