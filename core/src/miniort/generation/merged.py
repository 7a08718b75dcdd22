"""Decoders that hold their prompt's graph and their step's graph in one file, as the two branches of an `If`.

Optimum writes them so: an input `use_cache_branch` chooses. Taken apart they're an ordinary pair, which needs no empty past to be fed, and
whose cache can be joined.
"""

from __future__ import annotations

import onnx_ir as ir

CACHE_BRANCH = "use_cache_branch"
_TRANSPARENT = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Ops between the input and the `If` that leave the choice as it is."""


def is_merged(model: ir.Model, name: str = CACHE_BRANCH) -> bool:
    """Whether some `If` of the graph is decided by the input of that name."""
    return any(True for _ in _decided(model.graph, name))


def take_branch(model: ir.Model, cached: bool, name: str = CACHE_BRANCH) -> None:
    """Put the chosen branch in the place of every `If` that the input decides, and take out the inputs that nothing reads any more."""
    graph = model.graph
    for node in list(_decided(graph, name)):
        choice = node.inputs[0]
        _inline(graph, node, "then_branch" if cached else "else_branch")
        _remove_unread(graph, choice)
    for value in [each for each in graph.inputs if not each.uses() and not each.is_graph_output()]:
        if value.name == name or (value.dtype is not None and value.dtype.is_floating_point()):  # the choice, or a past
            graph.inputs.remove(value)


def _decided(graph: ir.Graph, name: str) -> list[ir.Node]:
    chosen = next((value for value in graph.inputs if value.name == name), None)
    found: list[ir.Node] = []
    reached = [] if chosen is None else [chosen]
    while reached:
        for node, index in reached.pop().uses():
            if index != 0 or node.domain != "" or node.graph is not graph:
                continue
            if node.op_type == "If":
                found.append(node)
            elif node.op_type in _TRANSPARENT:
                reached.append(node.outputs[0])
    return found


def _remove_unread(graph: ir.Graph, value: ir.Value | None) -> None:
    """Remove what computed a value that nobody reads any more."""
    while value is not None and (node := value.producer()) is not None and not (value.uses() or value.is_graph_output()):
        value = node.inputs[0]
        graph.remove(node, safe=True)


def _inline(graph: ir.Graph, node: ir.Node, chosen: str) -> None:
    """Move one branch's nodes and initializers into the graph, in the place of the `If`."""
    branches = {name: attribute.as_graph() for name, attribute in node.attributes.items()}
    branch = branches.pop(chosen)
    results = list(branch.outputs)
    branch.outputs.clear()
    for initializer in list(branch.initializers.values()):
        branch.initializers.pop(initializer.name or "")
        while initializer.name in graph.initializers:
            initializer.name = f"{initializer.name}_"
        graph.register_initializer(initializer)
    inner = list(branch)
    branch.remove(inner)
    graph.insert_before(node, inner)
    for index, (old, new) in enumerate(zip(node.outputs, results, strict=True)):
        if new.producer() not in inner or new in results[:index]:  # a weight, a value from outside, or one that's given twice
            identity = ir.Node("", "Identity", [new], name=f"{node.name}/{chosen}/{index}")
            graph.insert_before(node, identity)
            new = identity.outputs[0]
        name = old.name
        old.name, new.name = f"{name}/replaced", name
        new.type, new.shape = old.type or new.type, new.shape if old.shape is None else old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    for other in branches.values():
        for reader in ir.traversal.RecursiveGraphIterator(other):
            reader.resize_inputs(0)  # or what the branch read would still count as read
    graph.remove(node, safe=True)
