"""Raising `HardSigmoid`, max(0, min(1, α x + β)), and `HardSwish`, x · max(0, min(1, x/6 + 1/2)), in whatever order they're written.

Howard et al. 2019, arXiv:1905.02244, section 5.2. Exporters without these ops write x · Clip(x + 3, 0, 6) / 6.
"""

from __future__ import annotations

from math import isclose

import onnx_ir as ir

from miniort.graph.matching import Algebra, Polynomial, downstream, equals, is_enclosed, is_float, scalar, tolerance, upstream
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import can_make, make_node, replace_value
from miniort.model.constants import is_constant, shape_of


def raise_hard_activations(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of HardSigmoid and HardSwish by the ops."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type in ("Clip", "HardSigmoid") and is_float(node.outputs[0]):
                _raise(node, context)


def _raise(function: ir.Node, context: PassContext) -> None:
    """Try HardSwish first: what it covers, HardSigmoid covers in part."""
    argument, value = function.inputs[0], function.outputs[0]
    bounds = _bounds(function, context)
    if argument is None or bounds is None:
        return
    slope, shift, height = bounds
    sources = [x for x in upstream(argument) if not is_constant(x) and shape_of(x) is not None]
    for x in sources:
        line = _line(x, argument, context)
        if line is None:
            continue
        inner, factor, term = line
        alpha, beta = slope * factor / height, (slope * term + shift) / height  # value = height · max(0, min(1, alpha x + beta))
        close = tolerance(value)
        if (
            isclose(alpha, 1 / 6, rel_tol=close)
            and isclose(beta, 0.5, rel_tol=close)
            and _replace(function, inner, x, {(1.0, 1.0): 1 / height}, "HardSwish", 14, {}, context)
        ):
            return
    if function.op_type == "HardSigmoid":
        return
    for x in reversed(sources):  # the farthest, so that all arithmetic before the function goes into alpha and beta
        line = _line(x, argument, context)
        if line is not None:
            inner, factor, term = line
            attributes = {"alpha": slope * factor / height, "beta": (slope * term + shift) / height}
            if _replace(function, inner, x, {(0.0, 1.0): 1 / height}, "HardSigmoid", 6, attributes, context):
                return


def _bounds(function: ir.Node, context: PassContext) -> tuple[float, float, float] | None:
    """(slope, shift, height) where the function is max(0, min(height, slope · argument + shift))."""
    if function.op_type == "HardSigmoid":
        alpha, beta = (function.attributes.get(name) for name in ("alpha", "beta"))
        return (0.2 if alpha is None else alpha.as_float(), 0.5 if beta is None else beta.as_float(), 1.0)
    low: float | None
    high: float | None
    if len(function.inputs) > 1:
        low, high = (scalar(value, context.weights) for value in (*function.inputs[1:], None)[:2])
    else:
        least, most = (function.attributes.get(name) for name in ("min", "max"))
        low, high = None if least is None else least.as_float(), None if most is None else most.as_float()
    return None if low != 0 or high is None or high <= 0 or high == float("inf") else (1.0, 0.0, high)


def _line(x: ir.Value, argument: ir.Value, context: PassContext) -> tuple[Algebra, float, float] | None:
    """The argument as factor · x + term."""
    algebra = Algebra([x], context.weights)
    found = algebra.polynomial(argument)
    if found is None or (1.0,) not in found or not set(found) <= {(1.0,), (0.0,)}:
        return None
    return algebra, found[(1.0,)], found.get((0.0,), 0.0)


def _replace(
    function: ir.Node,
    inner: Algebra,
    x: ir.Value,
    wanted: Polynomial,
    op: str,
    since: int,
    attributes: dict[str, float],
    context: PassContext,
) -> bool:
    """Put the op in the place of a value that is this polynomial of x and the function's value. False if there's none."""
    value = function.outputs[0]
    for root in (value, *downstream(value)):
        outer = Algebra([x, value], context.weights)
        last = root.producer()
        if last is None or last.graph is not function.graph or not equals(outer.polynomial(root), wanted, tolerance(value)):
            continue
        nodes = inner.nodes | outer.nodes | {function}
        if len(nodes) < 2 or shape_of(root) != shape_of(x) or not is_enclosed(nodes, root) or not can_make(context, op, since, [x]):
            continue
        made = make_node(context, last, op, since, [x], attributes)
        if replace_value(root, made.outputs[0], nodes):
            context.changed(made, f"{len(nodes)} nodes around {function.op_type} made {op}")
            return True
    return False


RAISE_HARD_ACTIVATIONS = GraphPass("raise-hard-activations", Level.EXTENDED, raise_hard_activations)
