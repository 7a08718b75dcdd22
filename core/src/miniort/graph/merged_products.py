"""Products of one value with several constant matrices made one product: queries, keys and values; gate and input of an MLP.

x · a, x · b and x · c are the parts of x · [a b c]. The matrix that is put together takes the place of its parts in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import is_float
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, can_make, make_node
from miniort.model.constants import constant_array, is_constant, shape_of

_LARGEST = 32 << 20
"""Bytes of the matrix that is put together. A larger product takes so long that one call less isn't seen, and a copy of it isn't cheap."""


@dataclass(frozen=True)
class _Product:
    """x · weight (+ bias). `result` is the value that holds it, `nodes` compute it."""

    weight: ir.Value
    bias: ir.Value | None
    result: ir.Value
    nodes: tuple[ir.Node, ...]

    @property
    def width(self) -> int:
        """How many columns it has."""
        return int(str((shape_of(self.weight) or (0,))[-1]))


def merge_products(model: ir.Model, context: PassContext) -> None:
    """Make one MatMul (and Add) of those that read the same value and differ in their constant matrices alone."""
    for graph in list(model.graphs()):
        if not isinstance(graph, ir.Graph):
            continue
        by_operand: dict[tuple[ir.Value, ir.DataType | None, bool], list[_Product]] = {}
        for node in graph:
            product = _product(node)
            if product is not None and node.inputs[0] is not None:
                key = (node.inputs[0], product.weight.dtype, product.bias is not None)
                by_operand.setdefault(key, []).append(product)
        for (x, _, _), products in by_operand.items():
            if len(products) > 1 and sum(_nbytes(product.weight) for product in products) <= _LARGEST:
                _merge(x, products, context)


def _product(node: ir.Node) -> _Product | None:
    """A MatMul with a constant matrix that nobody else reads, and the Add of a constant bias behind it."""
    if node.domain != "" or node.op_type != "MatMul" or not is_float(node.outputs[0]):
        return None
    weight, result = node.inputs[1], node.outputs[0]
    if weight is None or is_constant(node.inputs[0]) or not _is_own(weight, node, 2):
        return None
    readers = [reader for reader, _ in result.uses()]
    if len(readers) == 1 and readers[0].op_type == "Add" and readers[0].domain == "" and not result.is_graph_output():
        add = readers[0]
        bias = add.inputs[0] if add.inputs[1] is result else add.inputs[1]
        if bias is not None and add.graph is node.graph and _is_own(bias, add, 1) and shape_of(bias) == (shape_of(weight) or ())[1:]:
            return _Product(weight, bias, add.outputs[0], (node, add))
    return _Product(weight, None, result, (node,))


def _nbytes(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes


def _is_own(value: ir.Value, reader: ir.Node, rank: int) -> bool:
    """Whether a value is a constant of that many axes that only one node reads: nobody else needs it as it is."""
    return is_constant(value) and len(shape_of(value) or ()) == rank and [node for node, _ in value.uses()] == [reader]


def _merge(x: ir.Value, products: Sequence[_Product], context: PassContext) -> None:
    first = products[0].nodes[0]
    outputs = [product.result for product in products]
    if any(value.is_graph_output() for value in outputs) or not can_make(context, "Split", 13, [x]):
        return
    graph = first.graph
    assert isinstance(graph, ir.Graph)
    name = "_".join(str(value.name).rpartition("/")[2] for value in (outputs[0], outputs[-1]))
    weight = _joined(first, [product.weight for product in products], f"{first.name}/merged_{name}", context)
    merged = make_node(context, first, "MatMul", 1, [x, weight], {})
    last, shape = merged, outputs[0].shape
    whole = None if shape is None else ir.Shape([*list(shape)[:-1], sum(product.width for product in products)])
    biases = [product.bias for product in products if product.bias is not None]
    if biases:
        merged.outputs[0].type, merged.outputs[0].shape = outputs[0].type, whole
        bias = _joined(first, biases, f"{first.name}/merged_bias_{name}", context)
        last = make_node(context, first, "Add", 7, [merged.outputs[0], bias], {})
    last.outputs[0].type, last.outputs[0].shape = outputs[0].type, whole
    sizes = add_constant(first, f"{first.name}/merged_sizes_{name}", np.array([product.width for product in products], np.int64))
    split = make_node(context, first, "Split", 13, [last.outputs[0], sizes], {"axis": -1}, outputs=len(products))
    for part, value in zip(split.outputs, outputs, strict=True):
        part.name, part.type, part.shape = f"{value.name}/part", value.type, value.shape
        value.replace_all_uses_with(part)
    for product in products:
        for node in reversed(product.nodes):
            graph.remove(node, safe=True)
        for constant in (product.weight, product.bias):
            if constant is not None:
                _give_up(constant, context)
    context.changed(merged, f"{len(products)} products of one value made one")


def _joined(before: ir.Node, parts: Sequence[ir.Value], name: str, context: PassContext) -> ir.Value:
    """The parts side by side, made once for all sessions that share weights."""
    weights = context.weights
    arrays = [array for part in parts if (array := constant_array(part, weights)) is not None]
    keys = tuple(weights.key(array) for array in arrays)
    (joined,) = weights.made(("side by side", keys), lambda: [np.concatenate(arrays, axis=-1)])
    return add_constant(before, name, joined)


def _give_up(part: ir.Value, context: PassContext) -> None:
    """Let go of a constant that has become a part of another one, so that its memory can be had again."""
    graph = part.graph
    array = constant_array(part, context.weights)
    if isinstance(graph, ir.Graph) and part.name is not None and part.name in graph.initializers:
        del graph.initializers[part.name]
    if array is not None:
        context.weights.release(array)


MERGE_PRODUCTS = GraphPass("merge-products", Level.EXTENDED, merge_products)
