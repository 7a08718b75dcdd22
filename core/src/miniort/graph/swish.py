"""Raising `Swish`: x · sigmoid(α x), α = 1 being SiLU and 1.702 the fast approximation of Gelu.

Hendrycks and Gimpel 2016, arXiv:1606.08415; Ramachandran et al. 2017, arXiv:1710.05941.
"""

from __future__ import annotations

import onnx_ir as ir

from miniort.graph.matching import Algebra, downstream, equals, is_enclosed, is_float, tolerance, upstream
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import can_make, make_node, replace_value
from miniort.model.constants import is_constant, shape_of


def raise_swish(model: ir.Model, context: PassContext) -> None:
    """Replace x · sigmoid(α x), the factors in any order, by `Swish`."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "Sigmoid" and is_float(node.outputs[0]):
                _raise(node, context)


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
