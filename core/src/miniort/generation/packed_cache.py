"""Caches that hold a layer's keys and values in one tensor [2, batch, kv heads, time, head dim], taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from miniort.generation.binding import GraphBinding
from miniort.generation.cache_flow import attribute
from miniort.generation.cache_names import LayerNames
from miniort.generation.node_insertion import insert, integers
from miniort.model.constants import shape_of


@dataclass(frozen=True)
class _Halves:
    """Where a packed past is taken apart, and what a packed present is put together from; each a pair of key and value."""

    past: ir.Value
    olds: tuple[Sequence[ir.Value], Sequence[ir.Value]]
    shapes: Sequence[ir.Node]
    present: ir.Value
    news: tuple[ir.Value, ir.Value]


def unpack(graph: ir.Graph, binding: GraphBinding) -> tuple[GraphBinding, str | None]:
    """Give the graph an input and an output for each key and each value, where it only takes packed ones apart and puts them together.

    Returns the graph's new binding; or the old one, and why nothing was changed.
    """
    if not any(layer.packed for layer in binding.past):
        return binding, None
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    layers: list[_Halves] = []
    for layer, (past, present) in enumerate(zip(binding.past, binding.present, strict=True)):
        halves = _halves(inputs[past.key], outputs[present.key])
        if isinstance(halves, str):
            return binding, f"layer {layer}: {halves}"
        layers.append(halves)
    pasts, presents = zip(*(_split(graph, halves) for halves in layers), strict=True)
    dtypes, shapes = dict(binding.dtypes), dict(binding.shapes)
    for old, new in zip((*binding.past, *binding.present), (*pasts, *presents), strict=True):
        dtype, shape = dtypes.pop(old.key), shapes.pop(old.key)
        for name in (new.key, new.value):
            dtypes[name], shapes[name] = dtype, None if shape is None else shape[1:]
    return replace(binding, past=tuple(pasts), present=tuple(presents), dtypes=dtypes, shapes=shapes), None


def _halves(past: ir.Value, present: ir.Value) -> _Halves | str:
    """What belongs to key and to value of a layer, or why that can't be told."""
    olds: tuple[list[ir.Value], list[ir.Value]] = ([], [])
    shapes: list[ir.Node] = []
    for node, _ in past.uses():
        if node.op_type == "Gather" and (place := _number(node.inputs[1])) in (0, 1) and attribute(node, "axis", 0) == 0:
            olds[place].append(node.outputs[0])
        elif node.op_type == "Split" and attribute(node, "axis", 0) == 0 and len(node.outputs) == 2:
            for place, half in enumerate(node.outputs):
                readers = [reader for reader, _ in half.uses()]
                if not all(reader.op_type == "Squeeze" and _axes_of(reader) == [0] for reader in readers):
                    return f"half of {past.name} isn't read without its first axis"
                olds[place].extend(reader.outputs[0] for reader in readers)
        elif node.op_type == "Shape" and not node.attributes:
            shapes.append(node)
        else:
            return f"{past.name} goes into a {node.op_type}, which doesn't take it apart into key and value"
    stack = present.producer()
    if stack is None or stack.op_type != "Concat" or len(stack.inputs) != 2 or stack.attributes["axis"].as_int() != 0:
        return f"{present.name} isn't put together from a key and a value"
    news: list[ir.Value] = []
    for half_of in stack.inputs:
        wrapped = None if half_of is None else half_of.producer()
        if wrapped is None or wrapped.op_type != "Unsqueeze" or _axes_of(wrapped) != [0] or wrapped.inputs[0] is None:
            return f"{present.name} isn't put together from a key and a value"
        news.append(wrapped.inputs[0])
    return _Halves(past, olds, shapes, present, (news[0], news[1]))


def _split(graph: ir.Graph, halves: _Halves) -> tuple[LayerNames, LayerNames]:
    """Replace a packed past and present. Returns the names of what comes in their places."""
    shape = tuple(shape_of(halves.past) or (None,) * 5)
    pasts = [ir.Value(name=f"{halves.past.name}/{kind}", type=halves.past.type, shape=ir.Shape(shape[1:])) for kind in ("key", "value")]
    for place, new in enumerate(pasts):
        for old in halves.olds[place]:
            old.replace_all_uses_with(new)
    for node in halves.shapes:
        (rest,) = insert(node, "Shape", [pasts[0]], name=f"{node.name}/rest")
        two = integers(node, f"{node.name}/two", [2])
        (whole,) = insert(node, "Concat", [two, rest], {"axis": 0}, name=f"{node.name}/whole")
        whole.type, whole.shape = node.outputs[0].type, node.outputs[0].shape
        node.outputs[0].replace_all_uses_with(whole)
    _remove_readers(graph, halves.past)
    graph.inputs[graph.inputs.index(halves.past)] = pasts[0]
    graph.inputs.append(pasts[1])
    place = graph.outputs.index(halves.present)
    graph.outputs[place] = halves.news[0]
    graph.outputs.append(halves.news[1])
    _remove_unused(graph, halves.present)
    for value, kind in zip(halves.news, ("key", "value"), strict=True):
        value.name = f"{halves.present.name}/{kind}"
        value.type = value.type or halves.present.type
        value.shape = value.shape or ir.Shape(tuple(shape_of(halves.present) or (None,) * 5)[1:])
    return LayerNames(*(each.name or "" for each in pasts)), LayerNames(*(each.name or "" for each in halves.news))


def _remove_readers(graph: ir.Graph, value: ir.Value) -> None:
    for node in [node for node, _ in value.uses()]:
        for output in node.outputs:
            _remove_readers(graph, output)
        graph.remove(node, safe=True)


def _remove_unused(graph: ir.Graph, value: ir.Value) -> None:
    """Remove what made a value, as far back as nobody else reads it and it isn't an output."""
    node = value.producer()
    if node is None or any(output.uses() or output.is_graph_output() for output in node.outputs):
        return
    inputs = [each for each in node.inputs if each is not None]
    graph.remove(node, safe=True)
    for each in inputs:
        if each.producer() is not None and each.producer().op_type == "Unsqueeze":  # type: ignore[union-attr]
            _remove_unused(graph, each)


def _number(value: ir.Value | None) -> int:
    """The one number of a constant, -1 for what isn't one."""
    array = _constant(value)
    return int(array) if array is not None and array.ndim == 0 else -1


def _axes_of(node: ir.Node) -> list[int]:
    """The axes of a Squeeze or Unsqueeze: an attribute up to opset 12, an input since."""
    given = attribute(node, "axes")
    if isinstance(given, list | tuple):
        return [int(axis) for axis in given]
    array = _constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return [] if array is None else [int(axis) for axis in array.ravel()]


def _constant(value: ir.Value | None) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """A constant as an array: an initializer, or what a `Constant` gives."""
    node = None if value is None else value.producer()
    tensor = None if value is None else value.const_value
    if tensor is None and node is not None and node.op_type == "Constant" and "value" in node.attributes:
        tensor = node.attributes["value"].as_tensor()
    return None if tensor is None else tensor.numpy()
