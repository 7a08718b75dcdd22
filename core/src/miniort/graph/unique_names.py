"""Giving every value of a graph a name of its own, as ONNX wants it: passes name what they make after what they put it in the place of."""

from __future__ import annotations

import onnx_ir as ir

from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.model.loading import attribute_graphs


def make_names_unique(model: ir.Model, context: PassContext) -> None:
    """Rename values whose name another value of their graph, or of one around it, has already. Inputs and outputs keep theirs."""
    _rename(model.graph, frozenset(), context)


def _rename(graph: ir.Graph, around: frozenset[str], context: PassContext) -> None:
    kept = {value.name for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()) if value.name}
    taken = {*around, *kept}
    for node in graph:
        for value in node.outputs:
            if not value.name or value.is_graph_output():
                continue
            name, count = value.name, 1
            while name in taken:
                count += 1
                name = f"{value.name}_{count}"
            if name != value.name:
                context.changed(node, f"its output is called {name}, as another one is called {value.name}")
                value.name = name
            taken.add(name)
    inner = frozenset(taken)
    for node in graph:
        for body in (body for attribute in node.attributes.values() for body in attribute_graphs(attribute)):
            _rename(body, inner, context)


UNIQUE_NAMES = GraphPass("unique-names", Level.BASIC, make_names_unique)
