"""Removing shape arithmetic: targets of Reshape that are computed from shapes become constants, and what changes nothing goes."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from miniort.graph.cleanup import replace_outputs
from miniort.graph.folding import replace_by_constants
from miniort.graph.matching import int_attribute, integers, scalar
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, make_node
from miniort.graph.shape_propagation import Dims, Integers, ShapeTable
from miniort.graph.symbolic_sizes import Size
from miniort.model.constants import is_constant
from miniort.model.loading import attribute_graphs
from miniort.types import dtype_from_onnx

Places: TypeAlias = "dict[Size, tuple[ir.Value, int]]"
"""Sizes that a graph's inputs have, and on which axis of which."""


def remove_shape_arithmetic(model: ir.Model, context: PassContext) -> None:
    """Make constants of what is provable of shapes, compute equal sizes once, and drop what changes no shape and no element."""
    table = ShapeTable(context.weights)
    places: Places = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(table.dims(value) or ()):
            places.setdefault(size, (value, axis))
    _simplify(model.graph, table, places, context)


def _simplify(graph: ir.Graph, table: ShapeTable, places: Places, context: PassContext) -> None:
    known: dict[object, ir.Value] = {}
    computed: set[ir.Value] = set()  # sizes that are read off values which nodes compute
    for node in list(graph):
        for body in (body for attribute in node.attributes.values() for body in attribute_graphs(attribute)):
            _simplify(body, table, places, context)
        table.follow(node)
        if node.domain != "" or not node.outputs:
            continue
        numbers = table.integers(node.outputs[0])
        if numbers is not None and _settle_numbers(graph, node, numbers, known, context):
            continue
        if numbers is not None and ((node.op_type == "Shape" and not _is_input(node.inputs[0])) or any(x in computed for x in node.inputs)):
            if not _read_off_inputs(graph, node, numbers, places, known, table, context):
                computed.add(node.outputs[0])
            continue
        dims = table.dims(node.inputs[0]) if node.inputs else None
        if dims is not None and node.op_type == "Reshape":
            _simplify_target(node, dims, table, context)
        if node.op_type == "Transpose":
            _join_transposes(node, context)
        if node.op_type == "Unsqueeze":
            _join_unsqueezes(node, table, context)
        if node.op_type in ("And", "Or", "Mul") and len(node.inputs) == 2 and is_constant(node.inputs[0]):
            first, second = node.inputs
            node.replace_input_with(0, second)
            node.replace_input_with(1, first)
            dims = table.dims(second)
        if node.inputs and _changes_nothing(node, dims, table) and replace_outputs(graph, node, node.inputs[:1]):
            context.changed(node, f"a {node.op_type} that changes nothing")


def _settle_numbers(graph: ir.Graph, node: ir.Node, numbers: Integers, known: dict[object, ir.Value], context: PassContext) -> bool:
    """Whether whole numbers that a node computes are constant, or are computed by an earlier node already, and it could go."""
    value = node.outputs[0]
    if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL) or len(node.outputs) != 1:
        return False
    if numbers.numbers is not None:
        if node.op_type == "Identity" and is_constant(node.inputs[0]):
            return False  # that's what a constant graph output looks like
        array = np.array(numbers.numbers, dtype_from_onnx(int(value.dtype))).reshape((-1,) if numbers.rank else ())
        replace_by_constants(graph, node, [array])
        context.changed(node, "its sizes are known")
        return True
    first = known.setdefault((numbers, value.dtype), value)
    if first is value or not replace_outputs(graph, node, [first]):
        return False
    context.changed(node, f"the same sizes as {first.name}")
    return True


def _is_input(value: ir.Value | None) -> bool:
    return value is not None and value.is_graph_input()


def _read_off_inputs(
    graph: ir.Graph,
    node: ir.Node,
    numbers: Integers,
    places: Places,
    known: dict[object, ir.Value],
    table: ShapeTable,
    context: PassContext,
) -> bool:
    """Read a size off the graph's inputs instead of what layers compute, so that no layer has to be run to know it."""
    value = node.outputs[0]
    size = numbers.items[0] if len(numbers.items) == 1 else None
    terms = [] if size is None else [(size, 1)] if size in places else [(Size(((names, 1),)), factor) for names, factor in size.terms]
    if not terms or len(terms) > 2 or any(term not in places or factor != 1 for term, factor in terms) or value.dtype != ir.DataType.INT64:
        return False
    parts = []
    for term, _ in terms:
        key = ("read", term)
        if key not in known or known[key] is value:
            source, axis = places[term]
            shape = _made(context, node, "Shape", [source], f"{value.name}/shape_of_{source.name}", table)
            index = add_constant(node, f"{value.name}/axis_{axis}", np.array([axis], np.int64))
            known[key] = _made(context, node, "Gather", [shape, index], f"{value.name}/size_{axis}_of_{source.name}", table)
        parts.append(known[key])
    result = parts[0] if len(parts) == 1 else _made(context, node, "Add", parts, f"{value.name}/sum", table)
    if not numbers.rank:
        scalar = add_constant(node, f"{value.name}/scalar", np.array([], np.int64))
        result = _made(context, node, "Reshape", [result, scalar], f"{value.name}/scalar_size", table)
    if not replace_outputs(graph, node, [result]):
        return False
    known[numbers, value.dtype] = result
    context.changed(node, "its size is read off the inputs")
    return True


def _made(context: PassContext, before: ir.Node, op: str, inputs: list[ir.Value], name: str, table: ShapeTable) -> ir.Value:
    node = make_node(context, before, op, 1, inputs, {})
    node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.INT64)
    table.follow(node)
    return node.outputs[0]


def _simplify_target(node: ir.Node, dims: Dims, table: ShapeTable, context: PassContext) -> None:
    """Give a Reshape a constant target: numbers, 0 for a size that stays in its place, and -1 for at most one that doesn't."""
    given = table.integers(node.inputs[1]) if len(node.inputs) > 1 else None
    result = table.dims(node.outputs[0])
    if given is None or result is None or given.numbers is not None or len(given.items) != len(result):
        return
    target: list[int] = []
    for axis, (size, wanted) in enumerate(zip(result, given.items, strict=True)):
        stays = axis < len(dims) and size == dims[axis]
        target.append(0 if stays or wanted.number == 0 else -1 if size.number is None else size.number)
    if target.count(-1) > 1 or any(size.number == 0 for size in result):
        return
    node.attributes.pop("allowzero", None)  # a size that stays and is 0 is copied as 0
    node.replace_input_with(1, add_constant(node, f"{node.outputs[0].name}/shape", np.array(target, np.int64)))
    context.changed(node, f"its shape is {target}")


def _changes_nothing(node: ir.Node, dims: Dims | None, table: ShapeTable) -> bool:
    x = node.inputs[0]
    if x is None:
        return False
    match node.op_type:
        case "Mul" | "Div" | "And" | "Or" | "Add" | "Sub":
            return _is_neutral(node, x, table)
        case "Cast":
            return x.dtype is not None and int_attribute(node, "to", 0) == int(x.dtype)
        case "Expand" | "Reshape":
            return dims is not None and table.dims(node.outputs[0]) == dims
        case "Concat":
            return len(node.inputs) == 1
        case "Slice" if dims is not None:
            bounds = table.slice_bounds(node, len(dims))
            return bounds is not None and all(_is_whole(*bounds[axis], dims[axis]) for axis in bounds)
        case "Transpose" if dims is not None and "perm" in node.attributes:
            return list(node.attributes["perm"].as_ints()) == list(range(len(dims)))
    return False


def _is_neutral(node: ir.Node, x: ir.Value, table: ShapeTable) -> bool:
    """Whether the second operand is the one number that changes nothing. Zero is one for whole numbers alone: -0 + 0 is 0."""
    number = scalar(node.inputs[1], table.weights)
    dims = table.dims(x)
    neutral = {"Mul": 1, "Div": 1, "And": 1, "Or": 0, "Add": 0, "Sub": 0}[node.op_type]
    exact = node.op_type not in ("Add", "Sub") or x.dtype in (ir.DataType.INT64, ir.DataType.INT32)
    return number == neutral and exact and dims is not None and table.dims(node.outputs[0]) == dims and not node.attributes


def _is_whole(start: Size, end: Size, size: Size) -> bool:
    """Whether a slice takes everything."""
    if start.number != 0:
        return False
    if end.number is not None and end.number >= 1 << 31:
        return True
    return (end - size).is_natural


def _join_transposes(node: ir.Node, context: PassContext) -> None:
    """Let a Transpose of a Transpose read what that one reads."""
    source = node.inputs[0]
    first = None if source is None else source.producer()
    if first is None or first.domain != "" or first.op_type != "Transpose":
        return
    if "perm" not in first.attributes or "perm" not in node.attributes or first.graph is not node.graph:
        return
    inner, outer = first.attributes["perm"].as_ints(), node.attributes["perm"].as_ints()
    node.attributes["perm"] = ir.AttrInt64s("perm", [inner[axis] for axis in outer])
    node.replace_input_with(0, first.inputs[0])
    context.changed(node, f"joined with {first.name}")


def _join_unsqueezes(node: ir.Node, table: ShapeTable, context: PassContext) -> None:
    """Let an Unsqueeze of an Unsqueeze add the axes of both. Both take them as inputs: since opset 13."""
    source = node.inputs[0]
    first = None if source is None else source.producer()
    if first is None or first.domain != "" or first.op_type != "Unsqueeze" or first.graph is not node.graph:
        return
    dims, result = table.dims(first.inputs[0]), table.dims(node.outputs[0])
    added = [integers(each.inputs[1], context.weights) if len(each.inputs) == 2 else None for each in (first, node)]
    if dims is None or result is None or added[0] is None or added[1] is None:
        return
    middle = len(dims) + len(added[0])
    inner, outer = {axis % middle for axis in added[0]}, {axis % len(result) for axis in added[1]}
    kept = [axis for axis in range(len(result)) if axis not in outer]  # where each axis of the value in between goes
    axes = sorted(outer | {kept[axis] for axis in inner})
    node.replace_input_with(1, add_constant(node, f"{node.outputs[0].name}/axes", np.array(axes, np.int64)))
    node.replace_input_with(0, first.inputs[0])
    context.changed(node, f"joined with {first.name}")


REMOVE_SHAPE_ARITHMETIC = GraphPass("remove-shape-arithmetic", Level.EXTENDED, remove_shape_arithmetic)
