"""Narrowing: what a `Slice` leaves out is not computed.

A `Slice` behind an op that computes each place of its axis by itself is moved in front of the op. So where a decoder is asked for the last
position's logits, the last layer's feed-forward part, its norms and its attention's queries are computed for that position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import int_attribute
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, make_node, replace_value
from miniort.graph.shape_propagation import Dims, ShapeTable, shape_tables
from miniort.model.constants import constant_array, is_constant, shape_of

_UNARY = frozenset(
    {"Abs", "Cast", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "Neg"}
    | {"Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh"}
)
_BROADCASTING = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Where"})


@dataclass(frozen=True)
class _Cut:
    """A `Slice` along one axis of its input, with step 1. `start` and `end` are known before any node runs."""

    node: ir.Node
    value: ir.Value
    start: ir.Value
    end: ir.Value
    axis: int


def narrow(model: ir.Model, context: PassContext) -> None:
    """Move slices up through ops that compute each place of the sliced axis by itself."""
    for graph, table in shape_tables(model, context.weights):
        waiting = [cut for node in graph if (cut := _cut(node, table, context)) is not None]
        while waiting:
            waiting += _move_up(waiting.pop(), table, context)


def _cut(node: ir.Node, table: ShapeTable, context: PassContext) -> _Cut | None:
    if node.op_type != "Slice" or node.domain != "" or not 4 <= len(node.inputs) <= 5:
        return None
    value, start, end, axes = node.inputs[:4]
    dims = table.dims(value)
    if value is None or start is None or end is None or dims is None or not _is_known(start) or not _is_known(end):
        return None
    axis, step = (None if each is None else constant_array(each, context.weights) for each in (axes, [*node.inputs, None][4]))
    if (
        axis is None
        or axis.size != 1
        or (len(node.inputs) == 5 and node.inputs[4] is not None and (step is None or step.ravel().tolist() != [1]))
    ):
        return None
    return _Cut(node, value, start, end, int(axis.ravel()[0]) % len(dims))


def _is_known(value: ir.Value) -> bool:
    return is_constant(value) or value.is_graph_input()


def _move_up(cut: _Cut, table: ShapeTable, context: PassContext) -> list[_Cut]:
    """Put slices in front of the node that computes what is sliced, and remove the one behind it. The new ones; none if that can't be."""
    node = cut.value.producer()
    if node is None or cut.node.graph is None or node.graph is not cut.node.graph or node.domain != "" or cut.value.is_graph_output():
        return []
    if not _merge_equal(cut) or any(output.name and output is not cut.value and output.uses() for output in node.outputs):
        return []
    axes = _axes_of_inputs(node, cut, table)
    if axes is None:
        return []
    made: list[_Cut] = []
    for index, axis in axes:
        value = node.inputs[index]
        assert value is not None
        sliced = make_node(
            context, node, "Slice", 10, [value, cut.start, cut.end, add_constant(node, f"{node.name}/axis", np.array([axis]))], {}
        )
        sliced.outputs[0].name = f"{value.name}/narrow"
        sliced.outputs[0].type = value.type
        sliced.outputs[0].shape = _narrow_shape(value, axis)
        node.replace_input_with(index, sliced.outputs[0])
        made.append(_Cut(sliced, value, cut.start, cut.end, axis))
    cut.value.shape = _narrow_shape(cut.value, cut.axis)
    replace_value(cut.node.outputs[0], cut.value, [cut.node])
    context.changed(node, "computed only for what a Slice behind it keeps")
    return made


def _narrow_shape(value: ir.Value, axis: int) -> ir.Shape | None:
    shape = shape_of(value)
    return None if shape is None else ir.Shape([None if place == axis else size for place, size in enumerate(shape)])


def _merge_equal(cut: _Cut) -> bool:
    """Whether nobody reads the value but through this slice. Others that are the same are replaced by it; it must come first then."""
    others = {node for node, _ in cut.value.uses()} - {cut.node}
    same = [other for other in others if other.op_identifier() == cut.node.op_identifier() and _same_bounds(other, cut)]
    if len(same) < len(others):
        return False
    graph = cut.node.graph
    assert graph is not None
    for other in same:
        if other.outputs[0].is_graph_output() or cut.node.outputs[0].is_graph_output():
            return False
    for other in same:
        producer = cut.value.producer()
        assert producer is not None
        graph.remove(cut.node)
        graph.insert_after(producer, cut.node)
        other.outputs[0].replace_all_uses_with(cut.node.outputs[0])
        graph.remove(other, safe=True)
    return True


def _same_bounds(node: ir.Node, cut: _Cut) -> bool:
    """Whether another slice of the value has the same start and end, and by construction or its constant the same axis."""
    if len(node.inputs) < 4 or node.inputs[1] is not cut.start or node.inputs[2] is not cut.end or node.inputs[0] is not cut.value:
        return False
    mine, others = cut.node.inputs[3], node.inputs[3]
    if mine is others:
        return True
    if mine is None or others is None or mine.const_value is None or others.const_value is None:
        return False
    return bool(np.array_equal(mine.const_value.numpy(), others.const_value.numpy()))


def _axes_of_inputs(node: ir.Node, cut: _Cut, table: ShapeTable) -> Sequence[tuple[int, int]] | None:
    """Inputs that have to be sliced, and along which axis, so that the node computes what the cut leaves of its output; None if none do."""
    dims = table.dims(cut.value)
    inputs = [table.dims(value) for value in node.inputs]
    if dims is None or not inputs:
        return None
    op, axis, first = node.op_type, cut.axis, inputs[0]
    if op in _UNARY:
        return [(0, axis)]
    if op in _BROADCASTING:
        return _broadcast_axes(dims, inputs, axis)
    if op in ("LayerNormalization", "RMSNormalization", "Softmax"):
        begin = int_attribute(node, "axis", -1) % len(dims)
        return [(0, axis)] if axis < begin and (op != "Softmax" or begin == len(dims) - 1) else None
    if op == "MatMul":
        weight = inputs[1]
        return (
            [(0, axis)]
            if first is not None and len(first) == len(dims) and weight is not None and len(weight) == 2 and axis < len(dims) - 1
            else None
        )
    if op == "Transpose" and first is not None:
        order = node.attributes["perm"].as_ints() if "perm" in node.attributes else list(range(len(dims)))[::-1]
        return [(0, order[axis])]
    if op == "Reshape" and first is not None:
        return _reshape_axes(node, dims, first, axis)
    return _attention_axes(node, dims, inputs, axis) if op == "Attention" else None


def _broadcast_axes(dims: Dims, inputs: Sequence[Dims | None], axis: int) -> list[tuple[int, int]] | None:
    """Those inputs that have the axis, counted from the back, in full; the others repeat along it."""
    from_back = len(dims) - axis
    axes = []
    for index, own in enumerate(inputs):
        if own is None:
            return None
        if len(own) < from_back or own[-from_back].number == 1 != dims[axis].number:
            continue
        if own[-from_back] != dims[axis]:
            return None
        axes.append((index, len(own) - from_back))
    return axes or None


def _reshape_axes(node: ir.Node, dims: Dims, first: Dims, axis: int) -> list[tuple[int, int]] | None:
    """A Reshape that leaves the axis and those before it as they are, and copies its size rather than being told it."""
    target = node.inputs[1].const_value if node.inputs[1] is not None else None
    if target is None or len(first) <= axis or first[: axis + 1] != dims[: axis + 1] or int_attribute(node, "allowzero", 0):
        return None
    numbers = target.numpy().ravel().tolist()
    return [(0, axis)] if numbers[axis] == 0 and -1 not in numbers[: axis + 1] else None


def _attention_axes(node: ir.Node, dims: Dims, inputs: Sequence[Dims | None], axis: int) -> list[tuple[int, int]] | None:
    """The queries, and the mask where it has a row for each. Not where a query's place among the keys is told from its number."""
    bounded = any(int_attribute(node, name, default) != default for name, default in _PLACE_ATTRIBUTES)
    present = any(output.name for output in node.outputs[1:])
    queries, mask = inputs[0], inputs[3] if len(inputs) > 3 and node.inputs[3] is not None else None
    if bounded or present or queries is None or (len(inputs) > 4 and any(value is not None for value in node.inputs[4:])):
        return None
    if axis != (2 if len(dims) == 4 else 1) or queries[axis] != dims[axis]:
        return None
    if len(inputs) <= 3 or node.inputs[3] is None:
        return [(0, axis)]
    if mask is None or len(mask) < 2:
        return None
    if mask[-2].number == 1 != dims[axis].number:
        return [(0, axis)]
    return [(0, axis), (3, len(mask) - 2)] if mask[-2] == dims[axis] else None


_PLACE_ATTRIBUTES = (("is_causal", 0), ("left_window_size", -1), ("right_window_size", -1))

NARROW = GraphPass("narrow", Level.EXTENDED, narrow)
