"""Joining a cache to a decoder's graph.

Three ways, tried in this order. An `Attention` with a past, or a `Concat` of a past and new keys, is replaced by `CacheAppend`, which
appends the new keys and values to the cache and gives what the attention then reads. Where the graph allows neither, its past inputs are
fed with the cache's views, and what is new is taken out of its present outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from miniort.generation.binding import GraphBinding
from miniort.generation.cache import KVCache, View
from miniort.graph.inference import infer_types
from miniort.kernels import ANY_PROVIDER, Kernel, NodeContext, Run
from miniort.model.constants import set_constant, shape_of
from miniort.types import Array

CACHE_INPUT = "miniort.cache"
PAST_SHAPE_INPUT = "miniort.past_shape"


@dataclass(frozen=True)
class Join:
    """How a graph was joined: `appends` says whether it appends to the cache itself, `reason` how, or why not."""

    appends: bool
    reason: str
    wants_past_shape: bool = False


def compile_cache_append(node: NodeContext) -> Run:
    """CacheAppend(cache, key, value) -> all keys, all values of layer `layer`. Everything is on the host; see `KVCache.append`.

    A layout's blocks are handed on where all who read them take blocks, which the session knows once every node has its kernel. Anyone
    else gets one array.
    """
    layer = node.attribute("layer")
    keys_in_blocks, values_in_blocks = (output in node.block_outputs for output in (0, 1))

    def run(cache: KVCache, key: Array, value: Array) -> tuple[View, View]:
        keys, values = cache.append(layer, key, value)
        return keys if keys_in_blocks else np.asarray(keys), values if values_in_blocks else np.asarray(values)

    return run


CACHE_APPEND = Kernel(
    provider=ANY_PROVIDER,
    op="CacheAppend",
    domain="miniort",
    since=1,
    until=1,
    compile=compile_cache_append,
    metadata_inputs=frozenset({0}),
    host_inputs=frozenset({1, 2}),
    host_outputs=frozenset({0, 1}),
)


@dataclass(frozen=True)
class _Site:
    """A layer's place in the graph: what is appended, and the values that stand for everything after it."""

    key: ir.Value
    value: ir.Value
    all_keys: ir.Value
    all_values: ir.Value
    nodes: tuple[ir.Node, ...]


def join_cache(model: ir.Model, binding: GraphBinding) -> Join:
    """Let a graph with a past append to the cache itself, if every layer allows it; else leave it as it is and say why."""
    if not binding.past:
        return Join(False, "the graph takes no past")
    inputs = {value.name: value for value in model.graph.inputs}
    if any(node.op_type == "Attention" for node, _ in inputs[binding.past[0].key].uses()):
        infer_types(model)  # only shapes tell whether its keys are split by heads already
    sites: list[_Site] = []
    kinds: set[str] = set()
    for layer, (past, present) in enumerate(zip(binding.past, binding.present, strict=True)):
        if past.packed:
            return Join(False, "keys and values are packed in one tensor")
        key, value = inputs[past.key], inputs[past.value]
        site, kind = _find_site(key, value)
        if site is None:
            return Join(False, f"layer {layer}: {kind}")
        if {present.key, present.value} != {site.all_keys.name, site.all_values.name}:
            return Join(False, f"layer {layer}: its present is not what its attention reads")
        kinds.add(kind)
        sites.append(site)
    return Join(True, " and ".join(sorted(kinds)) + " replaced by an append to the cache", _rewrite(model, binding, sites))


def _find_site(key: ir.Value, value: ir.Value) -> tuple[_Site | None, str]:
    key_uses, value_uses = (_uses_but_shape(past) for past in (key, value))
    if len(key_uses) != 1 or len(value_uses) != 1:
        return None, "its past is read in several places"
    (key_node, key_index), (value_node, value_index) = key_uses[0], value_uses[0]
    if key_node.op_type == "Attention" and key_node.domain == "" and key_node is value_node:
        return _attention_site(key_node)
    for node, index, past in ((key_node, key_index, key), (value_node, value_index, value)):
        if node.op_type != "Concat" or node.domain != "" or index != 0 or len(node.inputs) != 2:
            return None, f"{past.name} goes into a {node.op_type}, not into a Concat of the past and what is new"
        if node.attributes["axis"].as_int() not in (2, -2):
            return None, f"{past.name} is joined along axis {node.attributes['axis'].as_int()}, not along time"
    new_key, new_value = key_node.inputs[1], value_node.inputs[1]
    assert new_key is not None
    assert new_value is not None
    return _Site(new_key, new_value, key_node.outputs[0], value_node.outputs[0], (key_node, value_node)), "Concat"


def _uses_but_shape(past: ir.Value) -> list[tuple[ir.Node, int]]:
    return [(node, index) for node, index in past.uses() if node.op_type != "Shape"]


def _attention_site(node: ir.Node) -> tuple[_Site | None, str]:
    causal = node.attributes.get("is_causal")
    if causal is not None and causal.as_int():
        return None, "its Attention is causal by attribute, which counts from the past that it's given"
    if len(node.outputs) < 3 or len(node.inputs) < 6 or (len(node.outputs) > 3 and node.outputs[3].name):
        return None, "its Attention gives no present, or its scores"
    key, value = node.inputs[1], node.inputs[2]
    if key is None or value is None or any(len(shape_of(each) or ()) != 4 for each in (key, value)):
        return None, "its Attention takes keys and values that aren't of the shape [batch, heads, time, head dim]"
    return _Site(key, value, node.outputs[1], node.outputs[2], (node,)), "Attention's past"


def _rewrite(model: ir.Model, binding: GraphBinding, sites: Sequence[_Site]) -> bool:
    """Put the appends in, and take past inputs and present outputs out. Returns whether the graph reads the shape of its past."""
    graph = model.graph
    by_name = {value.name: value for value in graph.inputs}
    pasts = [by_name[name] for layer in binding.past for name in (layer.key, layer.value)]
    presents = {name for layer in binding.present for name in (layer.key, layer.value)}
    cache = ir.Value(name=CACHE_INPUT)
    past_shape = ir.Value(name=PAST_SHAPE_INPUT, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([4]))
    kept = [value for value in graph.outputs if value.name not in presents]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    for layer, site in enumerate(sites):
        attributes = [ir.AttrInt64("layer", layer)]
        append = ir.Node("miniort", "CacheAppend", [cache, site.key, site.value], attributes, num_outputs=2, name=f"CacheAppend_{layer}")
        graph.insert_before(site.nodes[-1], append)
        for new, old in zip(append.outputs, (site.all_keys, site.all_values), strict=True):
            new.type, new.shape, name = old.type, old.shape, old.name
            old.name = f"{name}/replaced"
            new.name = name
            old.replace_all_uses_with(new)
        _detach(graph, site, append)
    shapes = [node for past in pasts for node, _ in past.uses()]
    for node in shapes:
        node.outputs[0].replace_all_uses_with(_shape_range(graph, node, past_shape))
        graph.remove(node, safe=True)
    remaining = [value for value in graph.inputs if value not in pasts]
    graph.inputs.clear()
    graph.inputs.extend([*remaining, cache, *([past_shape] if shapes else [])])
    graph.opset_imports["miniort"] = 1
    graph.sort()
    return bool(shapes)


def _shape_range(graph: ir.Graph, node: ir.Node, past_shape: ir.Value) -> ir.Value:
    """What a `Shape` with `start` and `end` gives of a past's shape: that range of it."""
    start, end = (node.attributes[name].as_int() if name in node.attributes else default for name, default in (("start", 0), ("end", 4)))
    if (start, end) == (0, 4):
        return past_shape
    bounds = []
    for name, number in (("start", start), ("end", end)):
        bound = ir.Value(name=f"{node.name}/{name}")
        set_constant(bound, np.array([number], np.int64))
        graph.register_initializer(bound)
        bounds.append(bound)
    part = ir.Node("", "Slice", [past_shape, *bounds], name=f"{node.name}/range")
    part.outputs[0].type, part.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    graph.insert_before(node, part)
    return part.outputs[0]


def _detach(graph: ir.Graph, site: _Site, append: ir.Node) -> None:
    """Remove the two `Concat`s, or let the `Attention` read all keys and values with no past of its own."""
    for node in site.nodes:
        if node.op_type == "Concat":
            graph.remove(node, safe=True)
            continue
        node.replace_input_with(1, append.outputs[0])
        node.replace_input_with(2, append.outputs[1])
        node.replace_input_with(4, None)
        node.replace_input_with(5, None)
        for output in node.outputs[1:]:
            output.name = ""
