"""Raising `Swish`: x · sigmoid(α x), α = 1 being SiLU and 1.702 the fast approximation of Gelu.

Hendrycks and Gimpel 2016, arXiv:1606.08415; Ramachandran et al. 2017, arXiv:1710.05941.
"""

from __future__ import annotations

import onnx_ir as ir

from miniort.graph.matching import (
    Algebra,
    consumers,
    downstream,
    equals,
    is_enclosed,
    is_float,
    other_input,
    producer,
    scalar,
    tolerance,
    upstream,
)
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import can_make, make_node, replace_value
from miniort.model.constants import is_constant, shape_of


def raise_swish(model: ir.Model, context: PassContext) -> None:
    """Replace x · sigmoid(α x), the factors in any order and the sigmoid written out or not, by `Swish`."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "Exp" and is_float(node.outputs[0]):
                _raise_sigmoid(node, context)
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "Sigmoid" and is_float(node.outputs[0]):
                _raise(node, context)


def _raise_sigmoid(exp: ir.Node, context: PassContext) -> None:
    """Write `Sigmoid` for 1 / (1 + e⁻ᶻ), and y · sigmoid(z) for y / (1 + e⁻ᶻ)."""
    power, argument = exp.outputs[0], exp.inputs[0]
    add = next(consumers(power, "Add"), None)
    if argument is None or add is None or scalar(other_input(add, power), context.weights) != 1:
        return
    total = add.outputs[0]
    last = next(consumers(total, "Div", "Reciprocal"), None)
    if last is None or (last.op_type == "Div" and (last.inputs[1] is not total or last.inputs[0] is total)):
        return
    nodes, root = {exp, add, last}, last.outputs[0]
    shapes = [shape_of(value) for value in (argument, total, root)]
    if None in shapes or len({len(shape or ()) for shape in shapes[:2]}) != 1:
        return
    if not is_enclosed(nodes, root) or not can_make(context, "Sigmoid", 6, [argument]):
        return
    negated = producer(argument, "Neg")
    z = negated.inputs[0] if negated is not None else None
    if z is None:
        opposite = make_node(context, last, "Neg", 6, [argument], {})
        z = opposite.outputs[0]
        z.type, z.shape = argument.type, argument.shape
    sigmoid = make_node(context, last, "Sigmoid", 6, [z], {})
    result = sigmoid.outputs[0]
    numerator = last.inputs[0] if last.op_type == "Div" else None
    if numerator is not None and (scalar(numerator, context.weights) != 1 or len(shapes[2] or ()) != len(shapes[0] or ())):
        result.type, result.shape = argument.type, argument.shape
        result = make_node(context, last, "Mul", 7, [numerator, result], {}).outputs[0]
    replace_value(root, result, nodes if negated is None else {*nodes, negated})
    context.changed(sigmoid, "1 / (1 + e⁻ᶻ) made Sigmoid")


def _raise(sigmoid: ir.Node, context: PassContext) -> None:
    argument, value = sigmoid.inputs[0], sigmoid.outputs[0]
    if argument is None:
        return
    for x in upstream(argument):
        inner = Algebra([x], context.weights)
        found = None if is_constant(x) or shape_of(x) is None else inner.polynomial(argument)
        if found is None or set(found) != {(1.0,)}:
            continue
        for root in downstream(value):
            outer = Algebra([x, value], context.weights)
            last = root.producer()
            if last is None or last.graph is not sigmoid.graph or not equals(outer.polynomial(root), {(1.0, 1.0): 1.0}, tolerance(value)):
                continue
            nodes = inner.nodes | outer.nodes | {sigmoid}
            if not is_enclosed(nodes, root) or not can_make(context, "Swish", 24, [x]):
                continue
            swish = make_node(context, last, "Swish", 24, [x], {"alpha": found[(1.0,)]})
            replace_value(root, swish.outputs[0], nodes)
            context.changed(swish, f"x · sigmoid({found[(1.0,)]:g} x) in {len(nodes)} nodes made Swish")
            return


RAISE_SWISH = GraphPass("raise-swish", Level.EXTENDED, raise_swish)
