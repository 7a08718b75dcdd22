"""Joining a cache to a decoder's graph.

Three ways, tried in this order. An `Attention` with a past, or a `Concat` of a past and new keys, is replaced by `CacheAppend`, which
appends the new keys and values to the cache and gives what the attention then reads. Where the graph allows neither, its past inputs are
fed with the cache's views, and what is new is taken out of its present outputs. A graph that takes no past stores what it computes with
`CacheStore`.

Before that, fused attention ops are opened up, and packed pasts taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from miniort.generation.binding import DecoderBinding, GraphBinding
from miniort.generation.cache import KVCache, View
from miniort.generation.cache_axes import LOGICAL, Axes
from miniort.generation.cache_flow import attribute, concat_of, read_by
from miniort.generation.fused_attention import AddedInputs, open_fused_attention
from miniort.generation.node_insertion import insert, integers, typed
from miniort.generation.packed_cache import unpack
from miniort.generation.prompt_store import store_presents
from miniort.graph.inference import infer_types
from miniort.kernels import ANY_PROVIDER, Kernel, NodeContext, Run
from miniort.model.constants import set_constant, shape_of
from miniort.types import Array, dtype_from_onnx

CACHE_INPUT = "miniort.cache"
PAST_SHAPE_INPUT = "miniort.past_shape"


@dataclass(frozen=True)
class Join:
    """How a graph was joined: `appends` says whether it appends to the cache itself, `reason` how, or why not.

    `wants_past_shape`, `wants_positions` and `windows` say which inputs the graph now takes that it didn't have: the shape of what is
    cached, positions, and for each window which keys a query may see (0: all before it). `causal` says that nothing but those decides it;
    `counts_keys` that an op of the graph works it out from how many keys a row has. `dtype` is the element type that is appended, where
    it's another than that of the graph's past.
    """

    appends: bool
    reason: str
    wants_past_shape: bool = False
    wants_positions: bool = False
    windows: tuple[int, ...] = ()
    causal: bool = False
    counts_keys: bool = False
    dtype: str | None = None


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
class _Half:
    """A layer's keys, or its values: what is appended, the value that stands for everything after it, and where their axes lie.

    order: the axis of `new` and `whole` that is batch, kv heads, time, head dim.
    """

    new: ir.Value
    whole: ir.Value
    node: ir.Node
    order: Axes


@dataclass(frozen=True)
class _Site:
    """A layer's place in the graph."""

    key: _Half
    value: _Half
    kind: str
    causal: bool = False


def join_cache(model: ir.Model, binding: GraphBinding, sizes: DecoderBinding) -> tuple[Join, GraphBinding]:
    """Let a graph append to the cache itself, if every layer allows it; else leave it as it is and say why.

    Returns the join, and the binding of the graph as it is now.
    """
    graph = model.graph
    added, closed = open_fused_attention(graph, binding, sizes.head_dim)
    windows = tuple(sorted(added.visible))
    seen = Join(False, "", False, added.positions is not None, windows, counts_keys=closed is not None)
    binding, packed = unpack(graph, binding)
    if not binding.past:
        obstacle = closed or store_presents(graph, binding, ir.Value(name=CACHE_INPUT), sizes.dtype)
        if obstacle is not None:
            return replace(seen, reason=obstacle), binding
        return replace(seen, appends=True, reason="presents stored in the cache as soon as they're computed"), replace(binding, present=())
    if packed is not None or closed is not None:
        return replace(seen, reason=packed or closed or ""), binding
    sites = _find_sites(model, binding)
    if isinstance(sites, str):
        return replace(seen, reason=sites), binding
    kinds = " and ".join(sorted({site.kind for site in sites}))
    dtypes = {half.new.dtype for site in sites for half in (site.key, site.value)}
    past_dtype = next(value.dtype for value in graph.inputs if value.name == binding.past[0].key)
    causal = all(site.causal or (site.key.node.op_type == "Attention" and _sees(site.key.node, added)) for site in sites)
    if None in dtypes:
        dtypes = {past_dtype}
    if len(dtypes) > 1:
        return replace(seen, reason="its layers cache several element types"), binding
    dtype = dtypes.pop()
    wants_past_shape = _rewrite(graph, binding, sites, added)
    binding = replace(binding, past=(), present=())
    join = Join(
        True,
        f"{kinds} replaced by an append to the cache",
        wants_past_shape,
        added.positions is not None,
        tuple(sorted(added.visible)),
        causal,
        dtype=None if dtype is None or dtype == past_dtype else dtype_from_onnx(int(dtype)).name,
    )
    return join, binding


def _sees(node: ir.Node, added: AddedInputs) -> bool:
    """Whether an attention's mask is one of the inputs that say which keys may be seen."""
    return len(node.inputs) > 3 and any(node.inputs[3] is value for value in added.visible.values())


def _find_sites(model: ir.Model, binding: GraphBinding) -> list[_Site] | str:
    """Every layer's place, or why one can't be found."""
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    if any(node.op_type == "Attention" for node, _ in inputs[binding.past[0].key].uses()):
        infer_types(model)  # only shapes tell whether its keys are split by heads already
    sites: list[_Site] = []
    for layer, (past, present) in enumerate(zip(binding.past, binding.present, strict=True)):
        site = _find_site(inputs[past.key], inputs[past.value], binding)
        if isinstance(site, str):
            return f"layer {layer}: {site}"
        for half, name, axes in ((site.key, present.key, binding.axes.key), (site.value, present.value, binding.axes.value)):
            if not _is_same(outputs[name], half, axes):
                return f"layer {layer}: its present is not what its attention reads"
        sites.append(site)
    return sites


def _find_site(key: ir.Value, value: ir.Value, binding: GraphBinding) -> _Site | str:
    key_uses, value_uses = read_by(key), read_by(value)
    if len(key_uses) != 1 or len(value_uses) != 1:
        return "its past is read in several places"
    (key_node, _), (value_node, _) = key_uses[0], value_uses[0]
    if key_node.op_type == "Attention" and key_node.domain == "" and key_node is value_node:
        return _attention_site(key_node)
    halves = []
    for past, node, axes in ((key, key_node, binding.axes.key), (value, value_node, binding.axes.value)):
        joint = concat_of(past, 4)
        if joint is None:
            return f"{past.name} goes into a {node.op_type}, not into a Concat of the past and what is new"
        new = joint.node.inputs[1]
        if new is None or joint.axis != axes[2]:
            return f"{past.name} is joined along axis {joint.axis}, not along time"
        batch, heads, time, size = (joint.order.index(axis) for axis in axes)
        if new.dtype is None and (dtype := _dtype_behind(past)) is not None:
            new.dtype = dtype
        halves.append(_Half(new, joint.node.outputs[0], joint.node, (batch, heads, time, size)))
    return _Site(halves[0], halves[1], "Concat")


def _dtype_behind(past: ir.Value) -> ir.DataType | None:
    """The element type of a past behind its last cast, before it's joined."""
    dtype, value = past.dtype, past
    while (uses := read_by(value)) and (node := uses[0][0]).op_type != "Concat":
        if node.op_type == "Cast":
            dtype = ir.DataType(int(node.attributes["to"].as_int()))
        value = node.outputs[0]
    return dtype


def _attention_site(node: ir.Node) -> _Site | str:
    if len(node.outputs) < 3 or len(node.inputs) < 6 or (len(node.outputs) > 3 and node.outputs[3].name):
        return "its Attention gives no present, or its scores"
    parts = node.inputs[:3]
    mask = node.inputs[3]
    causal = bool(attribute(node, "is_causal", 0))
    if causal and mask is not None:
        return "its Attention is causal by attribute, which counts from the past that it's given, and has a mask, too"
    ranks = {len(shape_of(part) or ()) if part is not None else 0 for part in parts}
    by_heads = ranks == {4}
    if not by_heads and not (ranks <= {0, 3} and attribute(node, "q_num_heads") and attribute(node, "kv_num_heads")):
        return "nothing says how the keys and values that its Attention takes are split by heads"
    key, value = parts[1:]
    assert key is not None
    assert value is not None
    halves = (_Half(key, node.outputs[1], node, LOGICAL), _Half(value, node.outputs[2], node, LOGICAL))
    return _Site(*halves, "Attention's past", causal)


def _is_same(present: ir.Value, half: _Half, axes: Axes) -> bool:
    """Whether a present holds what a layer reads: the same numbers, stored in the same order as the past."""
    value, order = present, list(range(4))
    while value is not half.whole:
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in ("Cast", "Identity", "Transpose") or node.inputs[0] is None:
            return False
        if node.op_type == "Transpose":
            perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else (3, 2, 1, 0)
            order = [perm[axis] for axis in order]
        value = node.inputs[0]
    return tuple(order[axis] for axis in axes) == half.order


def _rewrite(graph: ir.Graph, binding: GraphBinding, sites: Sequence[_Site], added: AddedInputs) -> bool:
    """Put the appends in, and take past inputs and present outputs out. Returns whether the graph reads the shape of its past."""
    by_name = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    pasts = [by_name[name] for layer in binding.past for name in (layer.key, layer.value)]
    presents = [by_name[name] for layer in binding.present for name in (layer.key, layer.value)]
    cache = ir.Value(name=CACHE_INPUT)
    past_shape = ir.Value(name=PAST_SHAPE_INPUT, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([4]))
    kept = [value for value in graph.outputs if not any(value is present for present in presents)]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    for present in presents:
        _remove_unread(graph, present)
    for layer, site in enumerate(sites):
        _append(graph, layer, site, cache, added)
    shapes = [
        found
        for layer in binding.past
        for name, axes in ((layer.key, binding.axes.key), (layer.value, binding.axes.value))
        for found in _shapes_of(by_name[name], axes)
    ]
    for node, places in shapes:
        node.outputs[0].replace_all_uses_with(_chosen(graph, node, past_shape, places))
        graph.remove(node, safe=True)
    for past in pasts:
        _remove_readers(graph, past)
    remaining = [value for value in graph.inputs if not any(value is past for past in pasts)]
    graph.inputs.clear()
    graph.inputs.extend([*remaining, cache, *([past_shape] if shapes else [])])
    graph.opset_imports["miniort"] = 1
    graph.sort()
    return bool(shapes)


def _shapes_of(past: ir.Value, axes: Axes) -> list[tuple[ir.Node, list[int]]]:
    """Every `Shape` of a past, also behind casts and transposes, and which of [batch, kv heads, time, head dim] it gives."""
    found = []
    reached = [(past, tuple(axes.index(axis) for axis in range(4)))]
    while reached:
        value, order = reached.pop()
        for node, _ in value.uses():
            if node.op_type == "Shape":
                start, end = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
                found.append((node, list(order[start:end])))
            elif node.op_type in ("Cast", "Identity"):
                reached.append((node.outputs[0], order))
            elif node.op_type == "Transpose":
                perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else (3, 2, 1, 0)
                reached.append((node.outputs[0], tuple(order[axis] for axis in perm)))
    return found


def _append(graph: ir.Graph, layer: int, site: _Site, cache: ir.Value, added: AddedInputs) -> None:
    """One layer's `CacheAppend`, and everybody who read the past with what is new behind it reads what it gives."""
    node = site.value.node
    if node.op_type == "Attention":
        site = _split_by_heads(node, site)
    news = [_as_logical(node, half, f"CacheAppend_{layer}/{kind}") for half, kind in ((site.key, "key"), (site.value, "value"))]
    append = ir.Node("miniort", "CacheAppend", [cache, *news], [ir.AttrInt64("layer", layer)], num_outputs=2, name=f"CacheAppend_{layer}")
    graph.insert_before(node, append)
    for output, half, kind in zip(append.outputs, (site.key, site.value), ("key", "value"), strict=True):
        output.name = f"CacheAppend_{layer}/all/{kind}"
        output.type = half.whole.type or half.new.type
        shape = shape_of(half.whole)
        if shape is not None:
            output.shape = ir.Shape([shape[axis] for axis in half.order])
        whole = output
        if half.order != LOGICAL:
            stored = [half.order.index(axis) for axis in range(4)]
            (whole,) = insert(node, "Transpose", [output], {"perm": stored}, name=f"CacheAppend_{layer}/stored/{kind}")
            whole.type, whole.shape = output.type, half.whole.shape
        half.whole.replace_all_uses_with(whole)
    if node.op_type != "Attention":
        for concat in {id(half.node): half.node for half in (site.key, site.value)}.values():
            graph.remove(concat, safe=True)
        return
    for index, replacement in ((1, append.outputs[0]), (2, append.outputs[1]), (4, None), (5, None)):
        node.replace_input_with(index, replacement)
    if site.causal:
        del node.attributes["is_causal"]
        node.replace_input_with(3, added.visible_to(graph, 0))
    for output in node.outputs[1:]:
        output.name = ""


def _as_logical(before: ir.Node, half: _Half, name: str) -> ir.Value:
    """What is new, as [batch, kv heads, new, head dim]."""
    if half.order == LOGICAL:
        return half.new
    (new,) = insert(before, "Transpose", [half.new], {"perm": list(half.order)}, name=name)
    new.type = half.new.type
    return new


def _split_by_heads(node: ir.Node, site: _Site) -> _Site:
    """An `Attention` that takes [batch, new, heads · dim] made to take and give [batch, heads, new, dim], the cache's own shape."""
    if all(part is not None and len(shape_of(part) or ()) == 4 for part in node.inputs[:3]):
        return site
    counts = [int(node.attributes[name].as_int()) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    for name in ("q_num_heads", "kv_num_heads"):
        del node.attributes[name]
    whole = (site.key.whole, site.key.whole, site.value.whole)
    for index, (count, kind) in enumerate(zip(counts, "qkv", strict=True)):
        part = node.inputs[index]
        assert part is not None
        sizes = integers(node, f"{node.name}/{kind}/sizes", [0, 0, count, -1])
        (split,) = insert(node, "Reshape", [part, sizes], name=f"{node.name}/{kind}/split", since=5)
        size = (shape_of(whole[index]) or (None,) * 4)[3]
        batch, new = (shape_of(part) or (None,) * 3)[:2]
        typed(split, node.outputs[0], (batch, new, count, size))
        (heads,) = insert(node, "Transpose", [split], {"perm": [0, 2, 1, 3]}, name=f"{node.name}/{kind}/heads")
        node.replace_input_with(index, typed(heads, node.outputs[0], (batch, count, new, size)))
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    mixed = node.outputs[0]
    mixed_name, readers, is_output = mixed.name, list(mixed.uses()), mixed.is_graph_output()
    mixed.name = f"{mixed_name}/heads"
    transpose = ir.node("Transpose", [mixed], {"perm": [0, 2, 1, 3]}, name=f"{node.name}/mixed")
    transpose.outputs[0].name = f"{mixed_name}/split"
    sizes = integers(node, f"{node.name}/mixed/sizes", [0, 0, -1])
    merge = ir.node("Reshape", [transpose.outputs[0], sizes], name=f"{node.name}/merged")
    merged = merge.outputs[0]
    merged.name, merged.type, merged.shape = mixed_name, mixed.type, mixed.shape
    mixed.shape = None
    graph.insert_after(node, [transpose, merge])
    for reader, index in readers:
        reader.replace_input_with(index, merged)
    if is_output:
        graph.outputs[graph.outputs.index(mixed)] = merged
    key, value = node.inputs[1], node.inputs[2]
    assert key is not None
    assert value is not None
    return replace(site, key=replace(site.key, new=key), value=replace(site.value, new=value))


def _remove_unread(graph: ir.Graph, value: ir.Value) -> None:
    """Remove the casts, identities and transposes that made a value which nobody reads any more."""
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Identity", "Transpose") and node.inputs[0] is not None:
        if value.uses() or value.is_graph_output():
            return
        value = node.inputs[0]
        graph.remove(node, safe=True)


def _remove_readers(graph: ir.Graph, value: ir.Value) -> None:
    """Remove the casts and transposes of a past that led into a `Concat` which is gone."""
    for node in [node for node, _ in value.uses()]:
        _remove_readers(graph, node.outputs[0])
        graph.remove(node, safe=True)


def _chosen(graph: ir.Graph, node: ir.Node, past_shape: ir.Value, places: list[int]) -> ir.Value:
    """Those sizes of the past's shape, in this order."""
    if places == [0, 1, 2, 3]:
        return past_shape
    indices = ir.Value(name=f"{node.name}/axes")
    set_constant(indices, np.array(places, np.int64))
    graph.register_initializer(indices)
    part = ir.Node("", "Gather", [past_shape, indices], [ir.AttrInt64("axis", 0)], name=f"{node.name}/sizes")
    part.outputs[0].name = f"{node.name}/sizes"
    part.outputs[0].type, part.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    graph.insert_before(node, part)
    return part.outputs[0]
