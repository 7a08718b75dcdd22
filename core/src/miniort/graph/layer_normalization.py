"""Raising `LayerNormalization`: d / √(mean of d² + epsilon) · scale + bias, d = x - mean of x (Ba et al. 2016, arXiv:1607.06450)."""

from __future__ import annotations

import onnx_ir as ir

from miniort.graph.matching import consumers, is_enclosed, other_input, producer
from miniort.graph.normalization import Normalized, is_scale, normalized_values, reduced_axes
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import can_make, make_node, replace_value


def raise_layer_normalization(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of `LayerNormalization` by the op."""
    for graph in list(model.graphs()):
        if not isinstance(graph, ir.Graph):
            continue
        for found in normalized_values(graph, context):
            if found.scale is not None and found.narrow is None and found.scale.dtype == found.x.dtype:
                _replace(found, found.scale, context)


def _replace(found: Normalized, scale: ir.Value, context: PassContext) -> None:
    subtract = producer(found.x, "Sub")
    x, mean_value = subtract.inputs if subtract is not None else (None, None)
    mean = producer(mean_value, "ReduceMean")
    if subtract is None or x is None or mean is None or mean.inputs[0] is not x or reduced_axes(mean, context) != found.count:
        return
    root, bias, nodes = found.root, None, found.nodes | {subtract, mean}
    for add in consumers(root, "Add"):
        other = other_input(add, root)
        if other is not None and is_scale(other, found.x, found.count) and is_enclosed({*nodes, add}, add.outputs[0]):
            root, bias, nodes = add.outputs[0], other, nodes | {add}
            break
    last = root.producer()
    inputs = [x, scale] if bias is None else [x, scale, bias]
    if last is None or not is_enclosed(nodes, root) or not can_make(context, "LayerNormalization", 17, inputs):
        return
    node = make_node(context, last, "LayerNormalization", 17, inputs, {"axis": -found.count, "epsilon": found.epsilon})
    replace_value(root, node.outputs[0], nodes)
    context.changed(node, f"(x - mean) / √(variance + epsilon) in {len(nodes)} nodes made LayerNormalization")


RAISE_LAYER_NORMALIZATION = GraphPass("raise-layer-normalization", Level.EXTENDED, raise_layer_normalization)
