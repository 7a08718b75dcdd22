"""Putting single nodes into a graph, whatever opset it imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from miniort.model.constants import set_constant


def insert(
    before: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    name: str,
    since: int = 1,
    outputs: int = 1,
) -> list[ir.Value]:
    """The outputs of a new node of the default domain, put before another one.

    since: the opset from which on the op takes these inputs; the node keeps that one where the graph imports an older one.
    """
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    imported = graph.opset_imports.get("", 0)
    node = ir.node(op, inputs, dict(attributes or {}) or None, num_outputs=outputs, name=name, version=None if imported >= since else since)
    for index, value in enumerate(node.outputs):
        value.name = name if outputs == 1 else f"{name}/{index}"
    graph.insert_before(before, node)
    return list(node.outputs)


def typed(value: ir.Value, like: ir.Value, shape: Sequence[int | str | None]) -> ir.Value:
    """The value, said to be of the element type of another one and of a shape."""
    value.type = like.type
    value.shape = ir.Shape(shape)
    return value


def integers(before: ir.Node, name: str, numbers: Sequence[int] | int) -> ir.Value:
    """A constant of int64."""
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    value = ir.Value(name=name)
    set_constant(value, np.array(numbers, np.int64))
    graph.register_initializer(value)
    return value
