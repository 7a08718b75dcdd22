"""Tied weights that an exporter wrote twice: an output head that is the token embedding, transposed.

The second copy is as large as the first, a third of a small model. It's replaced by a `Transpose` of the first, which is a view.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import can_make
from miniort.model.constants import constant_array, is_constant, shape_of
from miniort.model.weights import WeightStore, let_go_of_pages
from miniort.types import Array

SMALLEST = 1 << 20
"""Elements of a weight that is worth the search."""

_ROWS = 1024
"""Rows of the embedding that are compared at a time: so many that a block and its transpose stay in a core's cache."""

_SAMPLE = 8


def tie_weights(model: ir.Model, context: PassContext) -> None:
    """Let products whose right matrix is another weight, transposed, read that one."""
    weights = [value for value in model.graph.initializers.values() if is_constant(value) and len(shape_of(value) or ()) == 2]
    by_shape: dict[tuple[object, ...], list[ir.Value]] = {}
    for value in weights:
        if any(node.op_type == "Gather" and index == 0 for node, index in value.uses()):
            by_shape.setdefault((value.dtype, *(shape_of(value) or ())), []).append(value)
    for value in weights:
        rows, columns = shape_of(value) or (0, 0)
        if not isinstance(rows, int) or not isinstance(columns, int) or rows * columns < SMALLEST or value.is_graph_output():
            continue
        uses = list(value.uses())
        readers = [node for node, index in uses if (node.domain, node.op_type, index) == ("", "MatMul", 1) and node.graph is model.graph]
        if not readers or len(readers) < len(uses):
            continue
        for table in by_shape.get((value.dtype, columns, rows), []):
            if can_make(context, "Transpose", 1, [table]) and _is_transpose(value, table, context.weights):
                _replace(value, table, readers)
                context.changed(readers[0], f"reads {table.name}, transposed, in place of the copy {value.name}")
                break


def _is_transpose(value: ir.Value, table: ir.Value, store: WeightStore) -> bool:
    """Whether one matrix is the other one, transposed. A few elements tell most that aren't."""
    first, second = constant_array(value, store), constant_array(table, store)
    if first is None or second is None or not _equal(first[:, :_SAMPLE], second[:_SAMPLE]):
        return False
    same = all(_equal(first[:, start : start + _ROWS], second[start : start + _ROWS]) for start in range(0, len(second), _ROWS))
    let_go_of_pages(first)
    return same


def _equal(columns: Array, rows: Array) -> bool:
    """Whether the bytes are the same, so that also NaN equals NaN, and 0 isn't -0."""
    size = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[rows.itemsize]
    return bool(np.array_equal(np.ascontiguousarray(columns).view(size), np.ascontiguousarray(rows).view(size).T))


def _replace(value: ir.Value, table: ir.Value, readers: list[ir.Node]) -> None:
    graph = readers[0].graph
    assert graph is not None
    turned = ir.node("Transpose", [table], {"perm": [1, 0]}, name=f"{value.name}/tied")
    turned.outputs[0].name = f"{value.name}/tied"
    turned.outputs[0].type, turned.outputs[0].shape = value.type, value.shape
    first = next(node for node in graph if node in readers)
    graph.insert_before(first, turned)
    value.replace_all_uses_with(turned.outputs[0])


TIE_WEIGHTS = GraphPass("tie-weights", Level.EXTENDED, tie_weights)
