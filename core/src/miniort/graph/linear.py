"""Linear layers written as a flattened `Gemm`: Reshape, Gemm, Reshape back become MatMul and Add, which take any number of axes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import producer
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, can_make, make_node, replace_value
from miniort.graph.shape_propagation import ShapeTable, shape_tables
from miniort.graph.symbolic_sizes import size_product


def raise_linear(model: ir.Model, context: PassContext) -> None:
    """Replace Reshape(Gemm(Reshape(x), w, b)) by x · w + b where only the last axis changes: nobody computes the other sizes then."""
    for graph, table in shape_tables(model, context.weights):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "Reshape":
                _raise(node, table, context)


def _raise(unflatten: ir.Node, table: ShapeTable, context: PassContext) -> None:
    gemm = producer(unflatten.inputs[0], "Gemm")
    flatten = None if gemm is None else producer(gemm.inputs[0], "Reshape", "Flatten")
    if gemm is None or flatten is None or flatten.inputs[0] is None or not _is_plain(gemm):
        return
    x, weight, bias = flatten.inputs[0], gemm.inputs[1], gemm.inputs[2] if len(gemm.inputs) > 2 else None
    given, flat, result = table.dims(x), table.dims(flatten.outputs[0]), table.dims(unflatten.outputs[0])
    sizes = table.dims(weight)
    if weight is None or given is None or flat is None or result is None or sizes is None:
        return
    leading, width = result[:-1], sizes[0]
    is_flat = given == (*leading, width)
    unmerged = given[: len(leading)] == leading and width.number is not None and size_product(given[len(leading) :]) == width
    read_elsewhere = any(value.is_graph_output() for value in gemm.outputs) or len(list(gemm.outputs[0].uses())) != 1
    bias_dims = () if bias is None else table.dims(bias)
    fits = flat[-1] == width and result[-1] == sizes[1] and bias_dims is not None and len(bias_dims) <= 1
    if read_elsewhere or not fits or not (is_flat or unmerged) or not can_make(context, "MatMul", 13, [x, weight]):
        return
    if not is_flat:  # the Reshape merges other axes as well, such as heads
        target = np.array([*([0] * len(leading)), width.number], np.int64)
        merge = make_node(context, unflatten, "Reshape", 5, [x, add_constant(unflatten, f"{flatten.name}/shape", target)], {})
        merge.outputs[0].name, merge.outputs[0].type = f"{unflatten.outputs[0].name}/merged", x.type
        merge.outputs[0].shape = ir.Shape([*([None] * len(leading)), width.number])
        x = merge.outputs[0]
    product = make_node(context, unflatten, "MatMul", 1, [x, weight], {})
    last = product
    if bias is not None:
        product.outputs[0].type, product.outputs[0].shape = unflatten.outputs[0].type, unflatten.outputs[0].shape
        last = make_node(context, unflatten, "Add", 7, [product.outputs[0], bias], {})
    replace_value(unflatten.outputs[0], last.outputs[0], [unflatten, gemm])
    context.changed(product, "Reshape, Gemm and Reshape made MatMul and Add")


def _is_plain(gemm: ir.Node) -> bool:
    numbers = {name: gemm.attributes[name].value for name in gemm.attributes}
    return not numbers.get("transA", 0) and not numbers.get("transB", 0) and numbers.get("alpha", 1.0) == numbers.get("beta", 1.0) == 1.0


RAISE_LINEAR = GraphPass("raise-linear", Level.EXTENDED, raise_linear)
