"""How many token ids a decoder's graph knows."""

from __future__ import annotations

import onnx_ir as ir

from miniort.generation.cache_flow import MICROSOFT, attribute
from miniort.model.constants import shape_of

_SAME_IDS = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


def vocabulary_size(graph: ir.Graph, tokens: str, logits: str) -> int | None:
    """Rows of the embedding that token ids choose from, else the last axis of the logits; None where neither is known."""
    rows = _embedding_rows(next(value for value in graph.inputs if value.name == tokens))
    if rows is not None:
        return rows
    shape = shape_of(next(value for value in graph.outputs if value.name == logits))
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def _embedding_rows(tokens: ir.Value) -> int | None:
    found: set[int] = set()
    reached = [tokens]
    while reached:
        for node, index in reached.pop().uses():
            table: ir.Value | None = None
            if node.domain == MICROSOFT and node.op_type == "EmbedLayerNormalization" and index == 0:
                table = node.inputs[2]
            elif node.op_type in ("Gather", "GatherBlockQuantized") and index == 1 and not attribute(node, "gather_axis", 0):
                table = node.inputs[0] if not attribute(node, "axis", 0) else None
            elif node.domain == "" and node.op_type in _SAME_IDS and index == 0:
                reached.append(node.outputs[0])
            shape = None if table is None else _table_shape(table)
            if shape and len(shape) == 2 and isinstance(shape[0], int):
                found.add(shape[0])
    return found.pop() if len(found) == 1 else None


def _table_shape(table: ir.Value) -> tuple[int | str | None, ...] | None:
    """The shape of a table, or of the weight that it's cast or dequantized from."""
    shape = shape_of(table)
    node = table.producer()
    if shape is not None or node is None or node.op_type not in ("Cast", "DequantizeLinear", "Identity"):
        return shape
    return None if node.inputs[0] is None else shape_of(node.inputs[0])
