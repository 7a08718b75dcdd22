"""Constant folding: what doesn't depend on an input is computed once, with the session's own kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.model.constants import constant_array, is_constant, set_constant, shape_of
from miniort.model.loading import attribute_graphs, attribute_value
from miniort.model.schemas import node_opset
from miniort.model.weights import content_key
from miniort.types import Array

NON_DETERMINISTIC = frozenset({"Bernoulli", "Dropout", "Multinomial"}) | frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

GROWTH = 8
SMALL = 64 << 20
"""A result of more than SMALL bytes is kept only if it's at most GROWTH times as large as what it was made from."""


def lift_constants(model: ir.Model, context: PassContext) -> None:
    """Make every `Constant` node an initializer, so that no provider has to run it."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.op_type == "Constant" and node.domain == "" and (value := _constant_value(node)) is not None:
                replace_by_constants(graph, node, [value])
                context.changed(node, "made an initializer")


def _constant_value(node: ir.Node) -> Array | None:
    """What a `Constant` node stands for; None for a sparse tensor."""
    if len(node.attributes) != 1:
        return None
    ((name, attribute),) = node.attributes.items()
    dtype = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}.get(name)
    if name == "value":
        value: Array = attribute_value(attribute)
        return value
    if name in ("value_string", "value_strings"):
        return np.array(attribute_value(attribute), object)
    return None if dtype is None else np.array(attribute_value(attribute), dtype)


def fold_constants(model: ir.Model, context: PassContext) -> None:
    """Replace nodes whose inputs are all constant, and `Shape` of a value of fixed shape, by constants."""
    _fold_graph(model.graph, context)


def _fold_graph(graph: ir.Graph, context: PassContext) -> None:
    for node in list(graph):
        bodies = [body for attribute in node.attributes.values() for body in attribute_graphs(attribute)]
        for body in bodies:
            _fold_graph(body, context)
        results = None if bodies else _fold_node(node, context)
        if results is not None:
            replace_by_constants(graph, node, results)


def _fold_node(node: ir.Node, context: PassContext) -> Sequence[Array] | None:
    if node.op_type in NON_DETERMINISTIC and node.domain == "":
        return None
    static = _static_shape(node)
    if static is not None:
        context.changed(node, "the shape is fixed")
        return [static]
    if not node.inputs or not all(value is None or is_constant(value) for value in node.inputs):
        return None
    if node.op_type == "Identity" and node.domain == "" and node.outputs[0].is_graph_output():
        return None  # that's what a folded graph output looks like
    weights = context.weights
    inputs = [constant_array(value, weights) for value in node.inputs]
    key = (
        "folded",
        node.op_identifier(),
        node_opset(node, context.opsets),
        tuple((name, attribute_key(attribute)) for name, attribute in sorted(node.attributes.items())),
        tuple(None if array is None else weights.key(array) for array in inputs),
        tuple(bool(value.name) for value in node.outputs),  # Split's result depends on how many there are
    )
    results: Sequence[Array] | None = weights.made(key, lambda: _evaluate(node, inputs, context))
    if results is not None:
        context.changed(node, "all inputs are constant")
    return results


def _evaluate(node: ir.Node, inputs: Sequence[Array | None], context: PassContext) -> Sequence[Array] | None:
    results = context.evaluate(node, inputs)
    if results is None or not all(isinstance(result, np.ndarray) for result in results):
        return None
    if any(value.name for value in node.outputs[len(results) :]):
        return None
    given = sum(array.nbytes for array in inputs if array is not None)
    made = sum(result.nbytes for result in results)
    return None if made > max(SMALL, GROWTH * given) else results


def _static_shape(node: ir.Node) -> Array | None:
    """The result of a `Shape` node whose input has a fixed shape."""
    if node.op_type != "Shape" or node.domain != "" or not node.inputs or node.inputs[0] is None:
        return None
    shape = shape_of(node.inputs[0])
    if shape is None or not all(isinstance(size, int) for size in shape):
        return None
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    if (start is not None and start.is_ref()) or (end is not None and end.is_ref()):
        return None
    return np.array(shape[start.as_int() if start else 0 : end.as_int() if end else None], np.int64)


def attribute_key(attribute: ir.Attr) -> object:
    """What tells the attribute from another one of its name."""
    value = attribute_value(attribute)
    if isinstance(value, tuple):
        return tuple(content_key(item) if isinstance(item, np.ndarray) else item for item in value)
    if isinstance(value, ir.TypeAndShape):
        return str(value)
    return content_key(value) if isinstance(value, np.ndarray) else value


def replace_by_constants(graph: ir.Graph, node: ir.Node, results: Sequence[Array]) -> None:
    """Make the node's outputs initializers of its graph. A graph output must come from a node, so an `Identity` gives it."""
    for value, array in zip(node.outputs, results, strict=False):
        if not value.name:
            continue
        name, is_output = value.name, value.is_graph_output()
        value.name = f"{name}/replaced"
        constant = ir.Value(name=f"{name}/constant" if is_output else name)
        set_constant(constant, array)
        graph.register_initializer(constant)
        if is_output:
            identity = ir.Node("", "Identity", [constant], name=f"{node.name}/constant")
            graph.insert_before(node, identity)
            replacement = identity.outputs[0]
            replacement.name, replacement.type, replacement.shape = name, value.type, value.shape
            value.replace_all_uses_with(replacement, replace_graph_outputs=True)
        else:
            value.replace_all_uses_with(constant)
    graph.remove(node, safe=True)


LIFT_CONSTANTS = GraphPass("lift-constants", Level.REQUIRED, lift_constants)
FOLD_CONSTANTS = GraphPass("fold-constants", Level.BASIC, fold_constants)
FOLD_CONSTANTS_AGAIN = GraphPass("fold-constants", Level.EXTENDED, fold_constants)
"""Behind what makes constants of shapes."""
