"""Scales and shifts behind BatchNormalization that are one number per channel, taken into its own scale and bias.

Converters from Caffe write its layers BatchNorm and Scale as BatchNormalization, Mul and Add, with Unsqueeze for the shapes. Where weights
are inputs with defaults, nothing of that is constant; then two or three operations on one number per channel take the place of two on whole
images. Where they are constants, the operations are done here.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import int_attribute, integers, producer
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, make_node, replace_value
from miniort.model.constants import constant_array, shape_of
from miniort.model.schemas import node_opset


def merge_channel_scales(model: ir.Model, context: PassContext) -> None:
    """BN(x; s, b) · u + t, with u and t one number per channel, becomes BN(x; s · u, b · u + t)."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "BatchNormalization" and _is_inference(node, context):
                while (merged := _merge(node, context)) is not None:
                    node = merged


def _is_inference(node: ir.Node, context: PassContext) -> bool:
    opset = node_opset(node, context.opsets) or 0
    training = int_attribute(node, "training_mode", 0) if opset >= 14 else any(output.name for output in node.outputs[1:])
    return opset >= 9 and not training


def _merge(node: ir.Node, context: PassContext) -> ir.Node | None:
    """The normalization that has taken in the Mul or Add that reads it; None if there's none."""
    value, scale, bias = node.outputs[0], node.inputs[1], node.inputs[2]
    uses = list(value.uses())
    if value.is_graph_output() or len(uses) != 1 or scale is None or bias is None:
        return None
    reader = uses[0][0]
    if reader.domain != "" or reader.op_type not in ("Mul", "Add") or reader.attributes or reader.graph is not node.graph:
        return None
    other = reader.inputs[1 - uses[0][1]]
    per_channel = _constant_vector(other, scale, reader, value, context)
    unsqueeze = None if per_channel is not None else _unsqueezed(other, value, context)
    if unsqueeze is not None:
        per_channel = unsqueeze.inputs[0]
    if per_channel is None or shape_of(per_channel) != shape_of(scale) or per_channel.dtype != scale.dtype:
        return None
    if reader.op_type == "Mul":
        scale, bias = _computed(context, reader, "Mul", scale, per_channel), _computed(context, reader, "Mul", bias, per_channel)
    else:
        bias = _computed(context, reader, "Add", bias, per_channel)
    inputs = [node.inputs[0], scale, bias, *node.inputs[3:]]
    merged = ir.Node("", node.op_type, inputs, list(node.attributes.values()), version=node.version, name=node.name)
    merged.outputs[0].name = f"{reader.outputs[0].name}/merged"
    assert node.graph is not None
    node.graph.insert_before(reader, merged)
    if not replace_value(reader.outputs[0], merged.outputs[0], [reader, node, *(() if unsqueeze is None else (unsqueeze,))]):
        node.graph.remove(merged, safe=True)
        return None
    context.changed(merged, f"{reader.op_type} {reader.name} of one number per channel taken into its scale and bias")
    return merged


def _constant_vector(
    value: ir.Value | None, scale: ir.Value, reader: ir.Node, normalized: ir.Value, context: PassContext
) -> ir.Value | None:
    """A constant [C, 1, ...] or [1, C, 1, ...] as a constant [C] like the scale; None if the value isn't one."""
    array, shape, size = constant_array(value, context.weights), shape_of(normalized), shape_of(scale)
    if value is None or array is None or shape is None or size is None or len(shape) < 2:
        return None
    image = (*size, *(1,) * (len(shape) - 2))
    return add_constant(reader, f"{value.name}/vector", array.reshape(-1)) if array.shape in (image, (1, *image)) else None


def _unsqueezed(value: ir.Value | None, normalized: ir.Value, context: PassContext) -> ir.Node | None:
    """The Unsqueeze that makes [C, 1, ...] of a vector [C], so that it belongs to the channels of [N, C, ...]; None if there's none."""
    node, shape = producer(value, "Unsqueeze"), shape_of(normalized)
    if node is None or shape is None or node.inputs[0] is None or len(shape_of(node.inputs[0]) or ()) != 1:
        return None
    axes = node.attributes.get("axes")
    given = tuple(axes.as_ints()) if axes is not None else integers(node.inputs[1], context.weights) if len(node.inputs) > 1 else None
    return node if given == tuple(range(1, len(shape) - 1)) else None


def _computed(context: PassContext, before: ir.Node, op: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """The product or the sum of two vectors: a constant where both are."""
    first, second = constant_array(a, context.weights), constant_array(b, context.weights)
    if first is not None and second is not None:
        with np.errstate(all="ignore"):
            return add_constant(before, f"{before.name}/{op}/{a.name}", first * second if op == "Mul" else first + second)
    made = make_node(context, before, op, 7, [a, b], {})
    output = made.outputs[0]
    made.name, output.name = f"{before.name}/{op}/{a.name}", f"{before.outputs[0].name}/{op}/{a.name}"
    output.type, output.shape = a.type, a.shape
    return output


MERGE_CHANNEL_SCALES = GraphPass("merge-channel-scales", Level.EXTENDED, merge_channel_scales)
