"""Raising `RMSNormalization`: x / √(mean of x² + epsilon) · scale (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from miniort.graph.normalization import Normalized, normalized_values
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, can_make, make_node, replace_value
from miniort.graph.shape_propagation import CONTRIB
from miniort.model.constants import constant_array, shape_of
from miniort.types import dtype_from_onnx


def raise_rms_normalization(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of `RMSNormalization` by the op, and onnxruntime's name for it. One without a scale gets a scale of ones."""
    for graph in list(model.graphs()):
        if not isinstance(graph, ir.Graph):
            continue
        for node in list(graph):
            if node.op_type == "SimplifiedLayerNormalization" and node.domain in ("", CONTRIB):
                _rename(node, context)
        for found in normalized_values(graph, context):
            _replace(found, context)


def _rename(node: ir.Node, context: PassContext) -> None:
    """onnxruntime's op, which some exporters write even in the default domain: the same arithmetic, but for what it gives beside it."""
    x, scale = node.inputs[0], node.inputs[1]
    given = {name: node.attributes[name].value for name in node.attributes}
    stash_type = given.pop("stash_type", 1)
    extra = any(value.name and (value.uses() or value.is_graph_output()) for value in node.outputs[1:])
    if extra or len(node.inputs) != 2 or stash_type != 1 or not set(given) <= {"axis", "epsilon"}:
        return
    if x is None or scale is None or x.dtype != scale.dtype or not can_make(context, "RMSNormalization", 23, [x, scale]):
        return
    attributes = {"axis": given.get("axis", -1), "epsilon": given.get("epsilon", 1e-5)}
    made = make_node(context, node, "RMSNormalization", 23, [x, scale], attributes)
    old, new = node.outputs[0], made.outputs[0]
    new.type, new.shape = old.type or x.type, old.shape
    node.resize_outputs(1)
    replace_value(old, new, {node})
    context.changed(made, "SimplifiedLayerNormalization is RMSNormalization")


def _replace(found: Normalized, context: PassContext) -> None:
    last = found.root.producer()
    x = found.x if found.narrow is None else found.narrow
    sizes = (shape_of(found.x) or ())[-found.count :]
    assert last is not None
    if not all(isinstance(size, int) for size in sizes) or not can_make(context, "RMSNormalization", 23, [x, x]):
        return
    scale = found.scale
    if scale is None:
        assert x.dtype is not None
        scale = add_constant(last, f"{found.root.name}/ones", np.ones([int(str(size)) for size in sizes], dtype_from_onnx(int(x.dtype))))
    narrower = scale.dtype if scale.dtype != x.dtype else None
    if narrower is not None:
        array = constant_array(scale, context.weights)
        if array is None:
            return
        assert x.dtype is not None
        scale = add_constant(last, f"{found.root.name}/scale", array.astype(dtype_from_onnx(int(x.dtype))))
    attributes = {"axis": -found.count, "epsilon": found.epsilon}
    node = make_node(context, last, "RMSNormalization", 23, [x, scale], attributes)
    result = node.outputs[0]
    if narrower is not None:  # the op itself takes a scale of another type, but onnx's type inference doesn't know
        result.type, result.shape = x.type, x.shape
        result = make_node(context, last, "Cast", 6, [result], {"to": int(narrower)}).outputs[0]
    replace_value(found.root, result, found.nodes)
    context.changed(node, f"x / √(mean of x² + epsilon) in {len(found.nodes)} nodes made RMSNormalization")


RAISE_RMS_NORMALIZATION = GraphPass("raise-rms-normalization", Level.EXTENDED, raise_rms_normalization)
