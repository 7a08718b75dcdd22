"""Folding what scales and shifts a convolution's channels into its weights: BatchNormalization, and Mul, Div, Add, Sub of constants.

A convolution is linear in its weights, so factor · (w * x + b) + term = (factor · w) * x + (factor · b + term), channel by channel.
BatchNormalization is such a line where its statistics are constants (Ioffe and Szegedy 2015, arXiv:1502.03167).

What comes before a convolution folds likewise: w * (factor · x + term) + b = (w · factor) * x + (b + Σ w · term). Padding comes after the
line and stays zero, so where there is padding only the factor does: factor · x + term = factor · (x + term / factor).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import int_attribute, producer
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, replace_value
from miniort.model.constants import constant_array, is_constant, shape_of
from miniort.model.schemas import node_opset
from miniort.types import Array

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Narrower floats would be rounded once more than without folding."""


@dataclass(frozen=True)
class Line:
    """factor · y + term for each channel of y. factor, term: [] or [M] float64."""

    factor: Array
    term: Array


def fold_into_convolutions(model: ir.Model, context: PassContext) -> None:
    """Fold lines behind Conv and ConvTranspose into their weights, as many as follow each other."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type in _LINES and node.outputs[0].dtype in _FLOATS:
                _fold(node, context)


def fold_into_next_convolutions(model: ir.Model, context: PassContext) -> None:
    """Fold lines before Conv into its weights. Activations have to be raised by then, whose last multiplication would look like one."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "Conv" and node.outputs[0].dtype in _FLOATS:
                while (replacement := _fold_before(node, context)) is not None:
                    node = replacement


def _fold(node: ir.Node, context: PassContext) -> None:
    for value in node.inputs[:2]:
        convolution = producer(value, "Conv", "ConvTranspose")
        if value is None or convolution is None or convolution.graph is not node.graph or convolution.outputs[0] is not value:
            continue
        if value.is_graph_output() or len(list(value.uses())) != 1 or not all(map(is_constant, convolution.inputs[1:])):
            return
        weight = constant_array(convolution.inputs[1], context.weights)
        if weight is None or weight.ndim < 3:
            return
        groups = int_attribute(convolution, "group", 1)
        transposed = convolution.op_type == "ConvTranspose"
        channels = weight.shape[1] * groups if transposed else weight.shape[0]
        line = _LINES[node.op_type](node, value, weight.ndim, channels, context)
        if line is not None:
            _scale(convolution, node, weight, groups if transposed else 0, channels, line, context)
        return


def _scale(convolution: ir.Node, node: ir.Node, weight: Array, groups: int, channels: int, line: Line, context: PassContext) -> None:
    """Give a convolution the weights that make the node needless. groups: of a ConvTranspose, 0 for a Conv."""
    factor, term = np.broadcast_to(line.factor, channels), np.broadcast_to(line.term, channels)
    spatial = (1,) * (weight.ndim - 2)
    with np.errstate(all="ignore"):
        wide = weight.astype(np.float64)
        if groups:  # [C, M / groups, *kernel]: channel m is in group m // (M / groups)
            scaled = wide.reshape(groups, -1, *weight.shape[1:]) * factor.reshape(groups, 1, -1, *spatial)
        else:
            scaled = wide * factor.reshape(-1, 1, *spatial)
        shifted = _bias(convolution, context) * factor + term
    replacement = _with_weights(convolution, convolution.inputs[0], scaled.reshape(weight.shape), shifted, f"{node.name}/folded")
    if replacement is None:
        return
    if not replace_value(node.outputs[0], replacement.outputs[0], [node, convolution]):
        convolution.graph.remove(replacement, safe=True)  # type: ignore[union-attr]
        return
    context.changed(replacement, f"{node.op_type} {node.name} folded into the weights")


def _fold_before(convolution: ir.Node, context: PassContext) -> ir.Node | None:
    """The convolution that has taken in the line that computes its input; None if there's none that it can take in."""
    weight = constant_array(convolution.inputs[1], context.weights)
    if weight is None or weight.ndim < 3 or not all(map(is_constant, convolution.inputs[1:])):
        return None
    groups = int_attribute(convolution, "group", 1)
    channels = weight.shape[1] * groups
    found = _line_before(convolution.inputs[0], convolution, weight.ndim, channels, context)
    if found is None:
        return None
    node, x, line = found
    factor, term = line.factor, line.term
    divided: Array | None = None
    if term.any() and not _is_unpadded(convolution):
        before = _line_before(x, node, weight.ndim, channels, context)
        if before is None or before[2].term.any() or not before[2].factor.all() or not np.array_equal(factor, np.ones(factor.shape)):
            return None
        divided, x, factor, term = term / before[2].factor, before[1], before[2].factor, np.array(0.0)
    per_channel = np.broadcast_to(factor, channels).reshape(groups, 1, -1, *(1,) * (weight.ndim - 2))
    shift = np.broadcast_to(term, channels).reshape(per_channel.shape)
    with np.errstate(all="ignore"):
        wide = weight.astype(np.float64).reshape(groups, -1, *weight.shape[1:])
        scaled = (wide * per_channel).reshape(weight.shape)
        shifted = _bias(convolution, context) + (wide * shift).sum(axis=tuple(range(2, wide.ndim))).reshape(-1)
    replacement = _with_weights(convolution, x, scaled, shifted, f"{convolution.outputs[0].name}/folded")
    if replacement is None:
        return None
    if divided is not None:  # what's left of the line is a term
        per_channel = divided.reshape(divided.shape if not divided.ndim else (-1, *(1,) * (weight.ndim - 2)))
        constant = add_constant(replacement, f"{node.name}/term", per_channel.astype(weight.dtype))
        add = ir.Node("", "Add", [x, constant], name=f"{node.name}/divided", version=node.version)
        add.outputs[0].name, add.outputs[0].type, add.outputs[0].shape = f"{add.name}/sum", node.outputs[0].type, node.outputs[0].shape
        assert replacement.graph is not None
        replacement.graph.insert_before(replacement, add)
        replacement.replace_input_with(0, add.outputs[0])
    if not replace_value(convolution.outputs[0], replacement.outputs[0], [convolution, node, *_producers(node)]):
        return None
    context.changed(replacement, f"{node.op_type} {node.name} before it folded into the weights")
    return replacement if divided is None else None


def _producers(node: ir.Node) -> list[ir.Node]:
    return [producer for value in node.inputs if value is not None and (producer := value.producer()) is not None]


def _line_before(
    value: ir.Value | None, reader: ir.Node, rank: int, channels: int, context: PassContext
) -> tuple[ir.Node, ir.Value, Line] | None:
    """The node that computes a value as a line of another, for nobody but its reader: the node, the other value, the line."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.domain != "" or node.op_type not in _LINES or node.graph is not reader.graph:
        return None
    if value.is_graph_output() or len(list(value.uses())) != 1:
        return None
    for x in node.inputs[:2]:
        if x is not None and not is_constant(x) and len(shape_of(x) or ()) == rank:  # a value of another rank would be broadcast
            line = _LINES[node.op_type](node, x, rank, channels, context)
            if line is not None and np.isfinite(line.factor).all() and np.isfinite(line.term).all():
                return node, x, line
    return None


def _is_unpadded(convolution: ir.Node) -> bool:
    pads, auto_pad = convolution.attributes.get("pads"), convolution.attributes.get("auto_pad")
    same = auto_pad is not None and auto_pad.as_string() not in ("NOTSET", "VALID")
    return not same and not any(() if pads is None else pads.as_ints())


def _bias(convolution: ir.Node, context: PassContext) -> Array:
    """A convolution's bias in float64; zero without one. -> [M] or []."""
    bias = constant_array(convolution.inputs[2], context.weights) if len(convolution.inputs) > 2 else None
    return np.array(0.0) if bias is None else bias.astype(np.float64)


def _with_weights(convolution: ir.Node, x: ir.Value | None, weight: Array, bias: Array, name: str) -> ir.Node | None:
    """The convolution with other weights, put before it. None where they aren't finite: infinity times zero isn't what the graph computes.

    weight: [M, C / groups, *kernel] or [C, M / groups, *kernel]; bias: [M]; float64, and rounded to the type of the convolution's own
    """
    old = convolution.outputs[0]
    assert old.dtype is not None
    dtype = old.dtype.numpy()
    with np.errstate(all="ignore"):
        rounded, shifted = weight.astype(dtype), bias.astype(dtype)
    if not (np.isfinite(rounded).all() and np.isfinite(shifted).all()):
        return None
    inputs = [x, add_constant(convolution, f"{name}/w", rounded), add_constant(convolution, f"{name}/b", shifted)]
    attributes = list(convolution.attributes.values())
    made = ir.Node("", convolution.op_type, inputs, attributes, version=convolution.version, name=convolution.name)
    made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = name, old.type, old.shape
    assert convolution.graph is not None
    convolution.graph.insert_before(convolution, made)
    return made


def _normalization(node: ir.Node, value: ir.Value, rank: int, channels: int, context: PassContext) -> Line | None:
    """BatchNormalization in inference: (y - mean) / √(variance + epsilon) · scale + bias."""
    opset = node_opset(node, context.opsets) or 0
    training = int_attribute(node, "training_mode", 0) if opset >= 14 else any(output.name for output in node.outputs[1:])
    if opset < 7 or training or not int_attribute(node, "spatial", 1) or value is not node.inputs[0]:
        return None
    arrays = [constant_array(each, context.weights) for each in node.inputs[1:5]]
    if len(arrays) != 4 or any(array is None or array.shape != (channels,) for array in arrays):
        return None
    scale, bias, mean, variance = (array.astype(np.float64) for array in arrays if array is not None)
    epsilon = node.attributes.get("epsilon")
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + (1e-5 if epsilon is None else epsilon.as_float()))
        return Line(factor, bias - mean * factor)


def _arithmetic(node: ir.Node, value: ir.Value, rank: int, channels: int, context: PassContext) -> Line | None:
    """Mul, Div, Add and Sub of a number, or of one number per channel: a constant [M, 1...], or [1, M, 1...]."""
    first, second = node.inputs
    other = second if first is value else first
    if node.attributes or other is value or other is None:  # before opset 7 attributes say how to broadcast
        return None
    array = constant_array(other, context.weights)
    if array is None:
        return None
    if array.size == 1 and array.ndim <= rank:
        array = array.reshape(())
    elif array.shape in ((channels, *(1,) * (rank - 2)), (1, channels, *(1,) * (rank - 2))):
        array = array.reshape(channels)
    else:
        return None
    number, one, zero = array.astype(np.float64), np.array(1.0), np.array(0.0)
    with np.errstate(all="ignore"):
        match node.op_type:
            case "Mul":
                return Line(number, zero)
            case "Div" if first is value:
                return Line(1 / number, zero)
            case "Add":
                return Line(one, number)
            case "Sub":
                return Line(one, -number) if first is value else Line(-one, number)
    return None


_LINES = {
    "BatchNormalization": _normalization,
    "Mul": _arithmetic,
    "Div": _arithmetic,
    "Add": _arithmetic,
    "Sub": _arithmetic,
}
"""Op -> what makes a `Line` of a node of it, if it's one."""

FOLD_INTO_CONVOLUTIONS = GraphPass("fold-into-convolutions", Level.BASIC, fold_into_convolutions)
FOLD_INTO_NEXT_CONVOLUTIONS = GraphPass("fold-into-next-convolutions", Level.EXTENDED, fold_into_next_convolutions)
