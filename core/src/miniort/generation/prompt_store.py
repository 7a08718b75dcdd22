"""Storing a prompt's keys and values in the cache as soon as a graph that takes no past has computed them.

As outputs of the graph they'd all live until its last node has run, with whatever they're views of, and be copied to the cache only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from miniort.generation.binding import GraphBinding
from miniort.generation.cache import KVCache
from miniort.generation.cache_axes import LOGICAL
from miniort.generation.node_insertion import insert
from miniort.kernels import ANY_PROVIDER, Kernel, NodeContext, Run
from miniort.types import Array, DType, dtype_to_onnx


def compile_cache_store(node: NodeContext) -> Run:
    """CacheStore(cache, key, value) -> how many tokens were appended to layer `layer`, [] int64. Everything is on the host."""
    layer = node.attribute("layer")

    def run(cache: KVCache, key: Array, value: Array) -> Array:
        cache.append(layer, key, value)
        return np.array(key.shape[2], np.int64)

    return run


CACHE_STORE = Kernel(
    provider=ANY_PROVIDER,
    op="CacheStore",
    domain="miniort",
    since=1,
    until=1,
    compile=compile_cache_store,
    metadata_inputs=frozenset({0}),
    host_inputs=frozenset({1, 2}),
    host_outputs=frozenset({0}),
)


def store_presents(graph: ir.Graph, binding: GraphBinding, cache: ir.Value, dtype: DType) -> str | None:
    """Let a graph that takes no past append its presents to `cache`, a new input, of which each element is a `dtype`.

    The presents are outputs no longer; in their place there's one number a layer. Returns why nothing was changed, None where it was.
    """
    outputs = {value.name: value for value in graph.outputs}
    places: Mapping[ir.Node, int] = {node: place for place, node in enumerate(graph)}
    layers: list[tuple[ir.Value, ir.Value]] = []
    for layer, names in enumerate(binding.present):
        if names.packed:
            return f"layer {layer}: its keys and values are one tensor"
        layers.append((outputs[names.key], outputs[names.value]))
    presents = [present for pair in layers for present in pair]
    if any(present.producer() not in places for present in presents):
        return "a present isn't computed by a node of the graph"
    kept = [value for value in graph.outputs if not any(value is present for present in presents)]
    counts = [_store(graph, layer, pair, cache, binding, dtype, places) for layer, pair in enumerate(layers)]
    graph.outputs.clear()
    graph.outputs.extend([*kept, *counts])
    graph.inputs.append(cache)
    graph.opset_imports["miniort"] = 1
    return None


def _store(
    graph: ir.Graph,
    layer: int,
    presents: Sequence[ir.Value],
    cache: ir.Value,
    binding: GraphBinding,
    dtype: DType,
    places: Mapping[ir.Node, int],
) -> ir.Value:
    """One layer's `CacheStore`, right behind the later of the nodes that compute its presents. The value it gives."""
    store = ir.Node("miniort", "CacheStore", [cache, *presents], [ir.AttrInt64("layer", layer)], name=f"CacheStore_{layer}")
    producers = [node for present in presents if (node := present.producer()) is not None]
    graph.insert_after(max(producers, key=places.__getitem__), store)
    wanted = ir.DataType(dtype_to_onnx(dtype))
    for index, (kind, axes) in enumerate((("key", binding.axes.key), ("value", binding.axes.value))):
        new = presents[index]
        if new.dtype != wanted:
            (new,) = insert(store, "Cast", [new], {"to": int(wanted)}, name=f"{store.name}/{kind}/cast")
        if axes != LOGICAL:
            (new,) = insert(store, "Transpose", [new], {"perm": list(axes)}, name=f"{store.name}/{kind}")
        new.type = ir.TensorType(wanted)
        store.replace_input_with(1 + index, new)
    count = store.outputs[0]
    count.name, count.type, count.shape = f"{store.name}/count", ir.TensorType(ir.DataType.INT64), ir.Shape([])
    return count
