"""Cleaning up: identities, common sub-expressions, and what nobody reads.

onnx-ir has passes for the first two. They lose the name of one of two graph outputs that are equal, hand a branch's output over to the
outer graph, and merge nodes whose ops mean different things because they come from functions of different opsets.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from miniort.graph.folding import NON_DETERMINISTIC, attribute_key
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.model.constants import constant_array, is_constant
from miniort.model.loading import all_nodes, attribute_graphs
from miniort.model.schemas import node_opset
from miniort.model.weights import WeightStore, content_key

_SMALL = 1 << 16
"""Elements of a constant that is compared by what it holds."""


def clean_up(model: ir.Model, context: PassContext) -> None:
    """Remove identities, compute equal things once, and drop nodes and initializers that nothing reads."""
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.domain == "" and node.op_type == "Identity" and replace_outputs(graph, node, node.inputs):
                context.changed(node, "identity removed")
        _merge_equal_nodes(graph, context)
    before = sum(1 for graph in model.graphs() for _ in graph)
    _remove_unused(model)
    after = sum(1 for graph in model.graphs() for _ in graph)
    if after != before:
        context.changed(f"{before - after} nodes", "unused nodes removed")


def _remove_unused(model: ir.Model) -> None:
    """Remove what nobody reads. What only the bodies of removed nodes read goes as well: onnx-ir leaves them their inputs."""
    removed: list[ir.Node] | None = None
    while removed is None or removed:
        with_bodies = [node for node in all_nodes(model) if any(map(attribute_graphs, node.attributes.values()))]
        RemoveUnusedNodesPass()(model)
        removed = [node for node in with_bodies if node.graph is None]
        for node in removed:
            for body in (body for attribute in node.attributes.values() for body in attribute_graphs(attribute)):
                for reader in ir.traversal.RecursiveGraphIterator(body):
                    reader.resize_inputs(0)


def _merge_equal_nodes(graph: ir.Graph, context: PassContext) -> None:
    known: dict[object, ir.Node] = {}
    for node in list(graph):
        random = node.domain == "" and node.op_type in NON_DETERMINISTIC
        if random or any(attribute_graphs(attribute) for attribute in node.attributes.values()):
            continue
        key = (
            node.op_identifier(),
            node_opset(node, context.opsets),
            tuple(_input_key(value, context.weights) for value in node.inputs),
            tuple((name, attribute_key(attribute)) for name, attribute in sorted(node.attributes.items())),
            tuple(bool(value.name) for value in node.outputs),
        )
        first = known.setdefault(key, node)
        if first is not node and replace_outputs(graph, node, first.outputs):
            context.changed(node, f"equal to {first.name}")


def _input_key(value: ir.Value | None, weights: WeightStore) -> object:
    """What tells an input from another one: what it is, or for a small constant what it holds, as exporters write many equal ones."""
    if is_constant(value) and value is not None and value.const_value is not None and value.const_value.size <= _SMALL:
        array = constant_array(value, weights)
        return None if array is None else content_key(array)
    return id(value)


def replace_outputs(graph: ir.Graph, node: ir.Node, replacements: Sequence[ir.Value | None]) -> bool:
    """Let everybody read `replacements` in place of the node's outputs, and remove the node. False, and nothing done, if that can't be.

    A graph output keeps its name: the value that takes its place is renamed, which it can be only if it is computed in this graph and
    isn't a graph output itself.
    """
    pairs = list(zip(node.outputs, replacements, strict=False))
    if len(pairs) < len(node.outputs):
        return False
    for old, new in pairs:
        if new is None or (old.is_graph_output() and (new.is_graph_output() or new.producer() is None or new.graph is not graph)):
            return False
    for old, new in pairs:
        assert new is not None
        if old.is_graph_output():
            old.name, new.name = f"{old.name}/replaced", old.name
            new.type, new.shape = old.type or new.type, new.shape if old.shape is None else old.shape
        elif new.type is None:
            new.type = old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return True


CLEAN_UP = GraphPass("clean-up", Level.BASIC, clean_up)
CLEAN_UP_AGAIN = GraphPass("clean-up", Level.EXTENDED, clean_up)
"""Behind passes that replace many nodes by one."""
