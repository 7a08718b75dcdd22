"""Raising `Gelu`: ½ x (1 + erf(x / √2)), or with tanh(√(2/π) (x + 0.044715 x³)), in whatever order it's written.

Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

from __future__ import annotations

from math import pi, sqrt

import onnx_ir as ir

from miniort.graph.matching import Algebra, Polynomial, downstream, equals, is_enclosed, is_float, tolerance, upstream
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import can_make, make_node, replace_value
from miniort.model.constants import is_constant, shape_of

_SLOPE = sqrt(2 / pi)
_INNER: dict[str, tuple[str, Polynomial]] = {
    "Erf": ("none", {(1.0,): sqrt(0.5)}),
    "Tanh": ("tanh", {(1.0,): _SLOPE, (3.0,): _SLOPE * 0.044715}),
}
"""What stands in the function that the op begins from, as a polynomial of x."""
_OUTER: Polynomial = {(1.0, 0.0): 0.5, (1.0, 1.0): 0.5}
"""What stands around the function, as a polynomial of x and the function's value: ½ x + ½ x f."""


def raise_gelu(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of `Gelu` by the op."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type in _INNER and is_float(node.outputs[0]):
                _raise(node, context)


def _raise(function: ir.Node, context: PassContext) -> None:
    approximate, wanted = _INNER[function.op_type]
    argument, value = function.inputs[0], function.outputs[0]
    if argument is None:
        return
    allowed = tolerance(value)
    for x in upstream(argument):
        inner = Algebra([x], context.weights)
        if is_constant(x) or shape_of(x) is None or not equals(inner.polynomial(argument), wanted, allowed):
            continue
        for root in downstream(value):
            outer = Algebra([x, value], context.weights)
            last = root.producer()
            if last is None or last.graph is not function.graph or not equals(outer.polynomial(root), _OUTER, allowed):
                continue
            nodes = inner.nodes | outer.nodes | {function}
            if not is_enclosed(nodes, root) or not can_make(context, "Gelu", 20, [x]):
                continue
            gelu = make_node(context, last, "Gelu", 20, [x], {"approximate": approximate})
            replace_value(root, gelu.outputs[0], nodes)
            context.changed(gelu, f"½ x (1 + {function.op_type}(…)) in {len(nodes)} nodes made Gelu")
            return


RAISE_GELU = GraphPass("raise-gelu", Level.EXTENDED, raise_gelu)
