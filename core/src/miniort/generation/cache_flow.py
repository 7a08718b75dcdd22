"""Where a cache tensor goes in a graph: which output it's joined into, and along which axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

MICROSOFT = "com.microsoft"

PRESENT_OF_PAST: Mapping[tuple[str, str], Mapping[int, int]] = {
    ("", "Attention"): {4: 1, 5: 2},
    (MICROSOFT, "Attention"): {4: 1},
    (MICROSOFT, "QAttention"): {8: 1},
    (MICROSOFT, "GroupQueryAttention"): {3: 1, 4: 2},
    (MICROSOFT, "MultiHeadAttention"): {6: 1, 7: 2},
    (MICROSOFT, "DecoderMaskedMultiHeadAttention"): {5: 1, 6: 2},
}
"""Ops that take a past and give a present: which output belongs to which input."""

_READ_AS: Mapping[tuple[str, str], Mapping[int, str]] = {
    ("", "Attention"): {1: "key", 2: "value", 4: "key", 5: "value"},
    (MICROSOFT, "GroupQueryAttention"): {1: "key", 2: "value", 3: "key", 4: "value"},
    (MICROSOFT, "MultiHeadAttention"): {1: "key", 2: "value", 6: "key", 7: "value"},
}
"""What attention ops read at which input."""

_TO_PRODUCT = frozenset({"Cast", "Concat", "Expand", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""What may lie between a past and the product that reads it: heads are repeated, axes change places, keys are scaled."""

_TO_SOFTMAX = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Reshape", "Sub", "Tanh", "Where"})
"""What may lie between scores and their softmax: a scale, a mask, a soft cap."""

_SAME = frozenset({"Cast", "Identity"})


@dataclass(frozen=True)
class Joint:
    """A `Concat` that puts what is new behind a past. `axis` is that of the past as it's stored, `order` its axes as they're joined."""

    node: ir.Node
    axis: int
    order: tuple[int, ...]


def attribute(node: ir.Node, name: str, default: object = None) -> object:
    """The value of an attribute, or the default where the node doesn't have it."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def read_by(past: ir.Value) -> list[tuple[ir.Node, int]]:
    """Who reads a past, with the place among its inputs, apart from its shape."""
    return [(node, index) for node, index in past.uses() if not (node.op_type == "Shape" and node.domain == "")]


def concat_of(past: ir.Value, rank: int) -> Joint | None:
    """The one `Concat` that a past goes into as the first of two, by way of casts and transposes; None if there's no such one."""
    order = tuple(range(rank))
    value = past
    while True:
        uses = read_by(value)
        if len(uses) != 1 or uses[0][0].domain != "":
            return None
        node, index = uses[0]
        if node.op_type in _SAME:
            value = node.outputs[0]
        elif node.op_type == "Transpose" and isinstance(perm := attribute(node, "perm", order[::-1]), list | tuple) and len(perm) == rank:
            order = tuple(order[int(axis)] for axis in perm)
            value = node.outputs[0]
        elif node.op_type == "Concat" and index == 0 and len(node.inputs) == 2:
            axis = int(node.attributes["axis"].as_int())
            return Joint(node, order[axis], order)
        else:
            return None


def flows_into(past: ir.Value) -> str | None:
    """The output that a past is joined into: behind a `Concat`, or the present of an attention op; None where that's no one output.

    Casts, identities and transposes don't matter.
    """
    found: set[str] = set()
    reached: list[tuple[ir.Value, bool]] = [(past, False)]  # with whether it's joined already
    while reached:
        value, joined = reached.pop()
        for node, index in value.uses():
            present = PRESENT_OF_PAST.get((node.domain, node.op_type), {}).get(index)
            following: ir.Value | None = None
            behind = joined
            if present is not None and not joined and len(node.outputs) > present:
                following, behind = node.outputs[present], True
            elif node.domain == "" and (node.op_type in _SAME or node.op_type == "Transpose"):
                following = node.outputs[0]
            elif node.domain == "" and node.op_type == "Concat" and not joined:
                following, behind = node.outputs[0], True
            if following is None:
                continue
            if behind and following.is_graph_output():
                found.add(following.name or "")
            reached.append((following, behind))
    return found.pop() if len(found) == 1 else None


def places_by_flow(pasts: Sequence[ir.Value]) -> dict[str, tuple[int, str]] | None:
    """Layer and kind of pasts whose names say neither: a key is multiplied into what a softmax is taken of, a value into something else.

    Layers are numbered in the order in which they're computed. None if that isn't told of every past, or keys and values aren't as many.
    """
    if not pasts:
        return None
    order: dict[ir.Node, int] = {}
    graph = pasts[0].graph
    for node in () if graph is None else graph:
        order[node] = len(order)
    readers = {past.name or "": _reader(past) for past in pasts}
    places: dict[str, tuple[int, str]] = {}
    for wanted in ("key", "value"):
        found = sorted((order[reader[0]], name) for name, reader in readers.items() if reader is not None and reader[1] == wanted)
        places |= {name: (layer, wanted) for layer, (_, name) in enumerate(found)}
        if 2 * len(found) != len(pasts):
            return None
    return places


def _reader(past: ir.Value) -> tuple[ir.Node, str] | None:
    """The product or the attention op that a past goes into, and what it's there."""
    found: dict[ir.Node, str] = {}
    reached, seen = [past], {past}
    while reached:
        for node, index in reached.pop().uses():
            read_as = _READ_AS.get((node.domain, node.op_type), {}).get(index)
            if read_as is not None:
                found[node] = read_as
            elif node.domain == "" and node.op_type == "MatMul":
                found[node] = "key" if _goes_into_softmax(node.outputs[0]) else "value"
            elif node.domain == "" and node.op_type in _TO_PRODUCT and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                reached.append(node.outputs[0])
    return next(iter(found.items())) if len(found) == 1 else None


def _goes_into_softmax(scores: ir.Value) -> bool:
    reached, seen = [scores], {scores}
    while reached:
        for node, _ in reached.pop().uses():
            if node.op_type == "Softmax":
                return True
            if node.domain == "" and node.op_type in _TO_SOFTMAX and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                reached.append(node.outputs[0])
    return False
