"""Putting one standard op in the place of many nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from miniort.graph.cleanup import replace_outputs
from miniort.graph.passes import PassContext
from miniort.model.constants import set_constant
from miniort.model.schemas import schema_version
from miniort.types import Array, dtype_from_onnx


def can_make(context: PassContext, op: str, since: int, inputs: Sequence[ir.Value | None]) -> bool:
    """Whether some provider has a standard op, which came with opset `since`, for the types of these inputs, all of which are known.

    Never one of a newer opset than the rest of the model can be written in.
    """
    if context.opset_bound is not None and since > context.opset_bound:
        return False
    if any(value is not None and value.dtype is None for value in inputs):
        return False
    dtypes = [None if value is None or value.dtype is None else dtype_from_onnx(int(value.dtype)) for value in inputs]
    imported = context.opsets.get("")
    return imported is not None and context.supports(op, "", schema_version(op, "", max(imported, since)), dtypes)


def make_node(
    context: PassContext,
    before: ir.Node,
    op: str,
    since: int,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    outputs: int = 1,
) -> ir.Node:
    """A node of a standard op, put before another one. It keeps its own opset where the model imports an older one."""
    imported = context.opsets.get("", 0)
    version = None if imported >= since else since
    node = ir.node(op, inputs, dict(attributes) or None, name=f"{before.name}/{op}", version=version, num_outputs=outputs)
    node.outputs[0].name = f"{before.outputs[0].name}/{op}"
    graph = before.graph
    assert graph is not None
    graph.insert_before(before, node)
    return node


def add_constant(before: ir.Node, name: str, array: Array) -> ir.Value:
    """A constant of the graph that a node is in."""
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    while name in graph.initializers:
        name = f"{name}_"
    value = ir.Value(name=name)
    set_constant(value, np.ascontiguousarray(array))
    graph.register_initializer(value)
    return value


def replace_value(old: ir.Value, new: ir.Value, nodes: Collection[ir.Node]) -> bool:
    """Let everybody read `new` in place of `old`, and remove those of the nodes that nobody reads any more. False if that can't be."""
    node = old.producer()
    graph = None if node is None else node.graph
    assert isinstance(graph, ir.Graph)
    assert node is not None
    if new.type is None:
        new.type = old.type
    if new.shape is None:
        new.shape = old.shape
    if not replace_outputs(graph, node, [new]):
        return False
    remaining = [each for each in nodes if each is not node]
    while dead := [each for each in remaining if not any(value.uses() or value.is_graph_output() for value in each.outputs)]:
        for each in dead:
            graph.remove(each, safe=True)
        remaining = [each for each in remaining if each not in dead]
    return True
