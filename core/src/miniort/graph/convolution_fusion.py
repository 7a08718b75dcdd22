"""Fusing a convolution with what follows it, so that a provider may do it while a block of the result is in the cache.

What's made is the op `FusedConv` of the domain `miniort`: activation(batch normalization(Conv(x, w, bias)) + addend).

- inputs: those of Conv, then `addend`, added as Add does; then scale, bias, mean and variance of BatchNormalization, with its attribute
  `epsilon`. All but x and w may be absent.
- attributes: Conv's; `activation`, the name of a standard op of one input, absent for none; `activation_params`, its attributes in the
  order of `PARAMETERS`, or the bounds of a Clip.

It's made only where the provider of the convolution has the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from miniort.graph.matching import int_attribute, is_float, scalar
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import replace_value
from miniort.model.constants import is_constant, shape_of
from miniort.model.schemas import node_opset
from miniort.types import dtype_from_onnx

DOMAIN = "miniort"
FUSED_CONV = "FusedConv"

PARAMETERS: dict[str, tuple[tuple[str, float], ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "HardSwish": (),
    "LeakyRelu": (("alpha", 0.01),),
    "HardSigmoid": (("alpha", 0.2), ("beta", 0.5)),
    "Swish": (("alpha", 1.0),),
}
"""Activation -> its attributes and their defaults. Clip is the one more, whose bounds are inputs."""


@dataclass(frozen=True)
class Activation:
    """An op of one input, and its numbers."""

    op: str
    parameters: tuple[float, ...]


@dataclass
class Fusion:
    """A convolution and what has been found behind it so far. `last` is the value that the fused node computes."""

    last: ir.Value
    nodes: list[ir.Node]
    normalization: ir.Node | None = None
    addend: ir.Value | None = None
    activation: Activation | None = None


def fuse_convolutions(model: ir.Model, context: PassContext) -> None:
    """Make `FusedConv` of every convolution that something follows that it can take in."""
    for graph in list(model.graphs()):
        for node in reversed(list(graph)):  # the last one first: of two convolutions that are added, the later takes in the sum
            if node.graph is not None and node.domain == "" and node.op_type == "Conv" and is_float(node.outputs[0]):
                _fuse(node, context)


def _fuse(convolution: ir.Node, context: PassContext) -> None:
    fusion = Fusion(convolution.outputs[0], [convolution])
    while (reader := _only_reader(fusion.last)) is not None and _take(fusion, reader, context):
        fusion.nodes.append(reader)
        fusion.last = reader.outputs[0]
    if len(fusion.nodes) == 1:
        return
    inputs: list[ir.Value | None] = [*convolution.inputs, None][:3]
    inputs.append(fusion.addend)
    if fusion.normalization is not None:
        inputs += fusion.normalization.inputs[1:5]
    while inputs[-1] is None:
        inputs.pop()
    dtypes = [None if value is None or value.dtype is None else dtype_from_onnx(int(value.dtype)) for value in inputs]
    if not context.supports(FUSED_CONV, DOMAIN, 1, dtypes):
        return
    attributes = dict(convolution.attributes)
    if fusion.normalization is not None and (epsilon := fusion.normalization.attributes.get("epsilon")) is not None:
        attributes["epsilon"] = epsilon
    if fusion.activation is not None:
        attributes["activation"] = ir.AttrString("activation", fusion.activation.op)
        attributes["activation_params"] = ir.AttrFloat32s("activation_params", fusion.activation.parameters)
    last = fusion.nodes[-1]
    graph = last.graph
    assert isinstance(graph, ir.Graph)
    fused = ir.Node(DOMAIN, FUSED_CONV, inputs, list(attributes.values()), name=convolution.name, version=1)
    fused.outputs[0].name = f"{fusion.last.name}/fused"
    graph.insert_before(last, fused)
    if context.provider_of(fused) != context.provider_of(convolution):
        graph.remove(fused, safe=True)  # the provider of the convolution hasn't got the op, or not with this activation
        return
    graph.opset_imports.setdefault(DOMAIN, 1)
    if not replace_value(fusion.last, fused.outputs[0], fusion.nodes):
        graph.remove(fused, safe=True)
        return
    context.changed(fused, f"{', '.join(node.op_type for node in fusion.nodes)} made {FUSED_CONV}")


def _only_reader(value: ir.Value) -> ir.Node | None:
    """The one node of the same graph that reads a value, once; None where it has other readers or is a graph output."""
    uses = list(value.uses())
    producer = value.producer()
    if value.is_graph_output() or len(uses) != 1 or producer is None or uses[0][0].graph is not producer.graph:
        return None
    return uses[0][0] if uses[0][0].domain == "" else None


def _take(fusion: Fusion, reader: ir.Node, context: PassContext) -> bool:
    """Take a node into a fusion, if it can follow what is there."""
    if fusion.activation is not None:
        return False
    if reader.op_type == "BatchNormalization":
        if fusion.normalization is not None or fusion.addend is not None or not _is_inference(reader, fusion.last, context):
            return False
        fusion.normalization = reader
        return True
    if reader.op_type in ("Add", "Sum") and fusion.addend is None:
        fusion.addend = _addend(reader, fusion.last)
        return fusion.addend is not None
    fusion.activation = _activation(reader, fusion.last, context)
    return fusion.activation is not None


def _is_inference(node: ir.Node, x: ir.Value, context: PassContext) -> bool:
    opset = node_opset(node, context.opsets) or 0
    training = int_attribute(node, "training_mode", 0) if opset >= 14 else any(output.name for output in node.outputs[1:])
    return opset >= 7 and not training and bool(int_attribute(node, "spatial", 1)) and node.inputs[0] is x


def _addend(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """What a node adds to a value, if it's one other tensor of its type; not what is known to have few axes, such as a number."""
    if len(node.inputs) != 2 or node.attributes:
        return None
    first, second = node.inputs
    other = second if first is value else first
    if other is None or other is value or other.dtype != value.dtype or is_constant(other):
        return None
    shape = shape_of(other)
    return other if shape is None or len(shape) > 2 else None


def _activation(node: ir.Node, value: ir.Value, context: PassContext) -> Activation | None:
    if not node.inputs or node.inputs[0] is not value:
        return None
    if node.op_type == "Clip":
        bounds = _clip_bounds(node, context)
        return None if bounds is None else Activation("Clip", bounds)
    wanted: Sequence[tuple[str, float]] | None = PARAMETERS.get(node.op_type)
    if wanted is None or any(each.is_ref() for each in node.attributes.values()):
        return None
    given = {name: attribute.as_float() for name, attribute in node.attributes.items() if attribute.type == ir.AttributeType.FLOAT}
    return Activation(node.op_type, tuple(given.get(name, default) for name, default in wanted))


def _clip_bounds(node: ir.Node, context: PassContext) -> tuple[float, float] | None:
    """The bounds of a Clip, infinite for absent ones; None if they aren't known."""
    bounds = [float("-inf"), float("inf")]
    if (node_opset(node, context.opsets) or 0) < 11:
        for index, name in enumerate(("min", "max")):
            if (attribute := node.attributes.get(name)) is not None:
                bounds[index] = attribute.as_float()
        return bounds[0], bounds[1]
    for index, given in enumerate(node.inputs[1:3]):
        if given is not None:
            number = scalar(given, context.weights)
            if number is None:
                return None
            bounds[index] = number
    return bounds[0], bounds[1]


FUSE_CONVOLUTIONS = GraphPass("fuse-convolutions", Level.ALL, fuse_convolutions)
