"""Attention ops of com.microsoft that hold a past, rewritten as the default domain's `Attention`.

What they hide is then open: keys can be appended to a cache, and which keys a query may see is an input of the graph instead of being
worked out from how long each row is. So rows may be padded on the left, also in graphs whose op wants them padded on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from miniort.generation.binding import GraphBinding
from miniort.generation.cache_flow import MICROSOFT, attribute
from miniort.generation.node_insertion import insert, integers, typed
from miniort.model.constants import shape_of

POSITIONS_INPUT = "miniort.positions"
"""Input [batch, new] int64: the position of each new token in its own row."""

FUSED = frozenset({"Attention", "QAttention", "GroupQueryAttention", "MultiHeadAttention"})


def visible_input(window: int) -> str:
    """The input [batch, 1, new, time] bool that says which keys a query may see: the last `window` up to its own, all if that's 0."""
    return f"miniort.visible.{window}" if window else "miniort.visible"


@dataclass
class AddedInputs:
    """Inputs that a rewritten graph takes beside those of its binding."""

    positions: ir.Value | None = None
    visible: dict[int, ir.Value] = field(default_factory=dict)

    def positions_of(self, graph: ir.Graph) -> ir.Value:
        """The input of positions, which is made if it isn't there."""
        if self.positions is None:
            self.positions = _new_input(graph, POSITIONS_INPUT, ir.DataType.INT64, ("miniort.batch", "miniort.new"))
        return self.positions

    def visible_to(self, graph: ir.Graph, window: int) -> ir.Value:
        """The input of visible keys for a window, which is made if it isn't there."""
        if window not in self.visible:
            shape = ("miniort.batch", 1, "miniort.new", "miniort.time")
            self.visible[window] = _new_input(graph, visible_input(window), ir.DataType.BOOL, shape)
        return self.visible[window]


def _new_input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value


def open_fused_attention(graph: ir.Graph, binding: GraphBinding, head_dim: int) -> tuple[AddedInputs, str | None]:
    """Rewrite all of the graph's fused attention, or nothing if one of them isn't understood.

    Returns the inputs that were added, and why nothing was rewritten, None where all of it was or there's nothing to rewrite.
    """
    added = AddedInputs()
    nodes = [node for node in graph if node.domain == MICROSOFT and node.op_type in FUSED]
    for node in nodes:
        reason = _obstacle(node, binding)
        if reason is not None:
            return added, f"{node.op_type} {reason}"
    for node in nodes:
        {
            "GroupQueryAttention": _open_group_query,
            "MultiHeadAttention": _open_multi_head,
            "Attention": _open_projected,
            "QAttention": _open_projected,
        }[node.op_type](graph, node, added, head_dim)
    return added, None


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _obstacle(node: ir.Node, binding: GraphBinding) -> str | None:
    """Why a node can't be rewritten, None if it can."""
    if any(value.name and (value.uses() or value.is_graph_output()) for value in node.outputs[3:]):
        return "gives its scores"
    if node.op_type == "GroupQueryAttention":
        return _group_query_obstacle(node)
    if attribute(node, "do_rotary", 0) or attribute(node, "past_present_share_buffer", 0):
        return "turns its keys itself, or shares a buffer for past and present"
    if node.op_type == "MultiHeadAttention":
        return _multi_head_obstacle(node)
    mask, bias = (_input(node, 3), _input(node, 5)) if node.op_type == "Attention" else (_input(node, 5), None)
    if bias is not None or not attribute(node, "unidirectional", 0):
        return "has an additive bias, or isn't causal"
    if mask is not None and not _is_from(mask, binding.mask):
        return "has a mask that isn't the graph's own"
    return None


def _group_query_obstacle(node: ir.Node) -> str | None:
    if any(_input(node, index) is not None for index in range(10, len(node.inputs))):
        return "has a bias, a sink, scales or norms of its own"
    if attribute(node, "smooth_softmax", -1) == 1 or attribute(node, "sliding_window_cache", 0) or attribute(node, "causal", 1) != 1:
        return "has a smooth softmax, a cache that slides, or isn't causal"
    if any(attribute(node, name, "NONE") not in ("NONE", b"NONE") for name in ("k_quant_type", "v_quant_type")):
        return "keeps a quantized cache"
    if attribute(node, "do_rotary", 0) and _angles(_input(node, 7)) is None:
        return "turns keys by angles of which it isn't known how many there are"
    return None


def _multi_head_obstacle(node: ir.Node) -> str | None:
    parts = [_input(node, index) for index in range(3)]
    if any(part is None or len(shape_of(part) or (0, 0, 0)) != 3 for part in parts):
        return "takes queries, keys and values in one tensor, or split by heads"
    if any(_input(node, index) is not None for index in (3, 4, 8, 9)):
        return "has a bias, a padding mask or a shared buffer"
    if attribute(node, "unidirectional", 0) and _input(node, 5) is not None:
        return "is causal and has an additive bias, too"
    return None


def _is_from(value: ir.Value, name: str | None) -> bool:
    """Whether a value is that graph input, cast or not."""
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Identity") and node.inputs[0] is not None:
        value = node.inputs[0]
    return value.is_graph_input() and value.name == name


def _open_group_query(graph: ir.Graph, node: ir.Node, added: AddedInputs, head_dim: int) -> None:
    """q: [batch, new, heads · dim], alone with k and v in it; k, v: [batch, new, kv heads · dim]."""
    heads, kv_heads = int(node.attributes["num_heads"].as_int()), int(node.attributes["kv_num_heads"].as_int())
    q, k, v = (_input(node, index) for index in range(3))
    assert q is not None
    if k is None or v is None:
        sizes = integers(node, f"{node.name}/sizes", [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
        q, k, v = insert(node, "Split", [q, sizes], {"axis": 2}, name=f"{node.name}/split", since=13, outputs=3)
        for value, count in ((q, heads), (k, kv_heads), (v, kv_heads)):
            typed(value, node.outputs[0], ("miniort.batch", "miniort.new", count * head_dim))
    if attribute(node, "do_rotary", 0):
        positions = _input(node, 9) or added.positions_of(graph)
        q, k = (_turned(node, x, count, positions, head_dim, kind) for x, count, kind in ((q, heads, "q"), (k, kv_heads, "k")))
    window = attribute(node, "local_window_size", -1)
    attributes = {"q_num_heads": heads, "kv_num_heads": kv_heads, **_kept(node, "scale", "softcap")}
    visible = added.visible_to(graph, window if isinstance(window, int) and window > 0 else 0)
    _replace(node, [q, k, v, visible, _input(node, 3), _input(node, 4)], attributes)


def _angles(cosines: ir.Value | None) -> int | None:
    """How many angles each position has: the last axis of a table, also of one that an `If` chooses (long contexts have another)."""
    if cosines is None:
        return None
    chooses = cosines.producer()
    if chooses is not None and chooses.op_type == "If":
        found = {_angles(branch.as_graph().outputs[cosines.index() or 0]) for branch in chooses.attributes.values()}
        return found.pop() if len(found) == 1 else None
    if cosines.shape is None and chooses is not None and chooses.op_type in ("Constant", "Identity"):
        tensor = chooses.attributes["value"].as_tensor() if "value" in chooses.attributes else None
        return int(tensor.shape[-1]) if tensor is not None else _angles(chooses.inputs[0]) if chooses.inputs else None  # type: ignore[arg-type]
    size = (shape_of(cosines) or (None,))[-1]
    return size if isinstance(size, int) else None


def _turned(node: ir.Node, x: ir.Value, heads: int, positions: ir.Value, head_dim: int, kind: str) -> ir.Value:
    """RotaryEmbedding of the default domain. x: [batch, new, heads · dim] -> same."""
    cosines, sines = node.inputs[7], node.inputs[8]
    if positions.dtype != ir.DataType.INT64:
        positions = insert(node, "Cast", [positions], {"to": int(ir.DataType.INT64)}, name=f"{node.name}/{kind}/positions")[0]
    angles = _angles(cosines)
    attributes = {"num_heads": heads, "interleaved": attribute(node, "rotary_interleaved", 0)}
    if angles is not None and 2 * angles < head_dim:
        attributes["rotary_embedding_dim"] = 2 * angles
    (turned,) = insert(node, "RotaryEmbedding", [x, cosines, sines, positions], attributes, name=f"{node.name}/{kind}/turned", since=23)
    return typed(turned, node.outputs[0], ("miniort.batch", "miniort.new", heads * head_dim))


def _open_multi_head(graph: ir.Graph, node: ir.Node, added: AddedInputs, head_dim: int) -> None:
    heads = int(node.attributes["num_heads"].as_int())
    mask = added.visible_to(graph, 0) if attribute(node, "unidirectional", 0) else _input(node, 5)
    attributes = {"q_num_heads": heads, "kv_num_heads": heads, **_kept(node, "scale")}
    _replace(node, [*node.inputs[:3], mask, _input(node, 6), _input(node, 7)], attributes)


def _open_projected(graph: ir.Graph, node: ir.Node, added: AddedInputs, head_dim: int) -> None:
    """Attention and QAttention, which project x [batch, new, width] themselves and keep key and value in one past and present."""
    heads = int(node.attributes["num_heads"].as_int())
    given = attribute(node, "qkv_hidden_sizes")
    sizes = [int(size) for size in given] if isinstance(given, list | tuple) else [heads * head_dim] * 3
    projected = _projected(node)
    split = integers(node, f"{node.name}/sizes", sizes)
    parts = insert(node, "Split", [projected, split], {"axis": 2}, name=f"{node.name}/split", since=13, outputs=3)
    for part, size in zip(parts, sizes, strict=True):
        typed(part, node.outputs[0], ("miniort.batch", "miniort.new", size))
    past = _input(node, 4 if node.op_type == "Attention" else 8)
    pasts: list[ir.Value | None] = [None, None]
    if past is not None:
        for place, kind in enumerate(("key", "value")):
            index = integers(node, f"{node.name}/{kind}/index", place)
            (pasts[place],) = insert(node, "Gather", [past, index], {"axis": 0}, name=f"{node.name}/past/{kind}")
            typed(pasts[place], past, tuple(shape_of(past) or (None,) * 5)[1:])  # type: ignore[arg-type]
    present = node.outputs[1] if len(node.outputs) > 1 and node.outputs[1].name else None
    attributes = {"q_num_heads": heads, "kv_num_heads": heads, **_kept(node, "scale")}
    new = insert(
        node,
        "Attention",
        [*parts, added.visible_to(graph, 0), *pasts],
        attributes,
        name=f"{node.name}/opened",
        since=23,
        outputs=1 if present is None else 3,
    )
    typed(new[0], node.outputs[0], tuple(shape_of(node.outputs[0]) or (None,) * 3))
    results = [new[0]]
    if present is not None:
        both = []
        axis = integers(node, f"{node.name}/axis", [0])
        for value, kind in zip(new[1:], ("key", "value"), strict=True):
            typed(value, present, tuple(shape_of(present) or (None,) * 5)[1:])
            both += insert(node, "Unsqueeze", [value, axis], name=f"{node.name}/present/{kind}", since=13)
        results += insert(node, "Concat", both, {"axis": 0}, name=f"{node.name}/present")
    _hand_over(node, results)


def _projected(node: ir.Node) -> ir.Value:
    """x · weight + bias, [batch, new, all three widths]; of 8-bit integers in a QAttention."""
    x, weight, bias = (_input(node, index) for index in range(3))
    if node.op_type == "Attention":
        (product,) = insert(node, "MatMul", [x, weight], name=f"{node.name}/product")
    else:
        inputs = [x, weight, _input(node, 6), _input(node, 7)]
        (product,) = insert(node, "MatMulInteger", inputs, name=f"{node.name}/integers")
        (product,) = insert(node, "Cast", [product], {"to": int(node.outputs[0].dtype or ir.DataType.FLOAT)}, name=f"{node.name}/floats")
        (scale,) = insert(node, "Mul", [node.inputs[3], node.inputs[4]], name=f"{node.name}/scale", since=7)
        (product,) = insert(node, "Mul", [product, scale], name=f"{node.name}/product", since=7)
    if bias is None:
        return product
    return insert(node, "Add", [product, bias], name=f"{node.name}/projected", since=7)[0]


def _kept(node: ir.Node, *names: str) -> Mapping[str, Any]:
    """Those attributes that say something: 0 stands for the default."""
    return {name: value for name in names if (value := attribute(node, name, 0.0))}


def _replace(node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> None:
    """An `Attention` of the default domain that gives what the node gives, its outputs in the same order."""
    wanted = 3 if any(value.name for value in node.outputs[1:]) else 1
    results = insert(node, "Attention", inputs, attributes, name=f"{node.name}/opened", since=23, outputs=wanted)
    _hand_over(node, results)


def _hand_over(node: ir.Node, results: Sequence[ir.Value]) -> None:
    """Give the node's names, types and readers to other values, and remove it."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    for old, new in zip(node.outputs, results, strict=False):
        if not old.name:
            continue
        name = old.name
        old.name, new.name = f"{name}/replaced", name
        new.type, new.shape = old.type or new.type, new.shape if old.shape is None else old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
