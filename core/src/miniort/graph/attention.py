"""Raising `Attention`: softmax(scale · q · kᵀ + mask) · v, found from the `Softmax` outwards (Vaswani et al. 2017, arXiv:1706.03762).

What a row of the scores that is masked as a whole gives: with a mask of -∞ the long form makes NaN, which a guard (`IsNaN`, `Where`)
makes 0; the op makes 0 as well, also where the guard is missing. With a mask of a finite number the op gets that very number to add, so
it makes what the long form makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isinf

import numpy as np
import onnx_ir as ir

from miniort.graph.matching import consumers, int_attribute, is_enclosed, is_float, producer, product, scalar
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, can_make, make_node, replace_value
from miniort.graph.shape_propagation import Dims, ShapeTable, shape_tables
from miniort.graph.symbolic_sizes import Size, size_product
from miniort.model.constants import shape_of
from miniort.model.schemas import node_opset
from miniort.model.weights import WeightStore
from miniort.types import dtype_from_onnx

_BEYOND_ROUNDING = -1e30
"""A number so low that adding a score to it doesn't change it in float32: then Where(m, score, low) is score + Where(m, 0, low)."""


@dataclass(frozen=True)
class _Mask:
    """Something that is added to the scores.

    value: what is added; or, if there's a `condition`, the scores are replaced by `fill` where it's not `kept`.
    """

    value: ir.Value | None = None
    condition: ir.Value | None = None
    kept: bool = True
    fill: float = 0.0


@dataclass(frozen=True)
class _Scores:
    """scale · q · kᵀ, capped, plus masks. `product` is the MatMul; `nodes` compute the scores from its result."""

    product: ir.Node
    scale: float = 1.0
    softcap: float = 0.0
    masks: tuple[_Mask, ...] = ()
    nodes: frozenset[ir.Node] = field(default_factory=frozenset)

    @property
    def is_bare(self) -> bool:
        """Whether nothing but a scale stands on the product yet."""
        return not self.masks and not self.softcap


def raise_attention(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of `Attention` by the op: q, k, v of 4 axes, repeats of key and value heads undone, masks kept as inputs."""
    for graph, table in shape_tables(model, context.weights):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "Softmax" and is_float(node.outputs[0]):
                _raise(node, table, context)


def _raise(softmax: ir.Node, table: ShapeTable, context: PassContext) -> None:
    dims = table.dims(softmax.inputs[0])
    # Before opset 13 it's taken over all axes from this one on, which is one axis if it's the last.
    axis = int_attribute(softmax, "axis", -1 if (node_opset(softmax, context.opsets) or 0) >= 13 else 1)
    if softmax.inputs[0] is None or dims is None or len(dims) != 4 or axis not in (-1, 3):
        return
    scores = _scores(softmax.inputs[0], context)
    ending = _ending(softmax, context)
    if scores is None or ending is None:
        return
    last, after = ending
    nodes = scores.nodes | after | {softmax, scores.product, last}
    v, root = _narrowed(last)
    node = root.producer()
    assert node is not None
    if v is not None and is_enclosed(nodes | {node}, root):
        _Builder(scores, v, root, node, nodes | {node}, table, context).build()


def _narrowed(last: ir.Node) -> tuple[ir.Value | None, ir.Value]:
    """The values, before a Cast to float32 if there's one, and the result, behind a Cast back if there's one."""
    v, root = last.inputs[1], last.outputs[0]
    widening, narrowing = producer(v, "Cast"), next(consumers(root, "Cast"), None)
    narrow = None if widening is None else widening.inputs[0]
    if narrow is None or not is_float(narrow):
        return v, root
    is_alone = len(list(root.uses())) == 1 and not root.is_graph_output()
    return narrow, narrowing.outputs[0] if narrowing is not None and is_alone and narrowing.outputs[0].dtype == narrow.dtype else root


def _ending(softmax: ir.Node, context: PassContext) -> tuple[ir.Node, frozenset[ir.Node]] | None:
    """The product with the values, and the nodes between it and the softmax: casts, and a guard that makes NaN 0."""
    value, nodes = softmax.outputs[0], frozenset[ir.Node]()
    while True:
        guard = next(consumers(value, "IsNaN"), None)
        if guard is not None:
            where = next(consumers(guard.outputs[0], "Where"), None)
            if where is None or where.inputs[2] is not value or scalar(where.inputs[1], context.weights) != 0:
                return None
            nodes, value = nodes | {guard, where}, where.outputs[0]
            continue
        step = next(consumers(value, "Cast", "Identity"), None)
        if step is None:
            break
        if not is_float(step.outputs[0]):
            return None
        nodes, value = nodes | {step}, step.outputs[0]
    last = next(consumers(value, "MatMul"), None)
    return None if last is None or last.inputs[0] is not value else (last, nodes)


def _scores(value: ir.Value, context: PassContext, depth: int = 12) -> _Scores | None:
    """A value as attention scores; None if it isn't that."""
    node = producer(value, "MatMul", "Add", "Where", "Mul", "Div", "Cast")
    if node is None or depth < 0:
        return None
    match node.op_type:
        case "MatMul":
            return _Scores(node)
        case "Cast":
            inner = None if node.inputs[0] is None or not is_float(node.inputs[0]) else _scores(node.inputs[0], context, depth - 1)
            return None if inner is None else _with(inner, node)
        case "Add":
            for index, x in enumerate(node.inputs):
                inner = None if x is None else _scores(x, context, depth - 1)
                if inner is not None:
                    return replace(_with(inner, node), masks=(*inner.masks, _Mask(node.inputs[1 - index])))
            return None
        case "Where":
            return _masked_by_where(node, context, depth)
    return _scaled(value, context, depth)


def _with(scores: _Scores, *nodes: ir.Node) -> _Scores:
    return replace(scores, nodes=scores.nodes | set(nodes))


def _masked_by_where(node: ir.Node, context: PassContext, depth: int) -> _Scores | None:
    condition = node.inputs[0]
    for index in (1, 2):
        x, fill = node.inputs[index], scalar(node.inputs[3 - index], context.weights)
        inner = None if x is None or fill is None or fill > _BEYOND_ROUNDING else _scores(x, context, depth - 1)
        if inner is not None and fill is not None and condition is not None:
            return replace(_with(inner, node), masks=(*inner.masks, _Mask(None, condition, index == 1, fill)))
    return None


def _scaled(value: ir.Value, context: PassContext, depth: int) -> _Scores | None:
    """A number times bare scores, or a soft cap c · tanh(scores / c)."""
    outer = product(value, (), context.weights)
    if list(outer.powers.values()) != [1.0] or outer.factor <= 0 or not outer.nodes:
        return None
    inside = next(iter(outer.powers))
    tanh = producer(inside, "Tanh")
    if tanh is None:
        inner = _scores(inside, context, depth - 1)
        return replace(_with(inner, *outer.nodes), scale=inner.scale * outer.factor) if inner is not None and inner.is_bare else None
    argument = tanh.inputs[0]
    bare = None if argument is None else _scores(argument, context, depth - 1)
    if bare is None or not bare.is_bare:
        return None
    # c · tanh(s / c): the division is part of the scale that was found inside.
    return replace(_with(bare, *outer.nodes, tanh), scale=bare.scale * outer.factor, softcap=outer.factor)


@dataclass
class _Builder:
    """Puts the op in the place of what was found."""

    found: _Scores
    v: ir.Value
    root: ir.Value
    last: ir.Node
    nodes: frozenset[ir.Node]
    table: ShapeTable
    context: PassContext

    def build(self) -> None:
        """Make the op, unless shapes can't be proven to be what it takes, or nobody has it."""
        table, weights = self.table, self.context.weights
        left, right = self.found.product.inputs
        v = self.v
        if left is None or right is None:
            return
        q, q_factor = _unscaled(left, weights)
        transposed, outer_factor = _unscaled(right, weights)
        turned_k, order = _untransposed(transposed, table)
        k, inner_factor = _unscaled(turned_k, weights)
        scale = self.found.scale * q_factor * outer_factor * inner_factor
        k_whole, v_whole = self._ordered(k, order), table.dims(v)
        single_k, single_v = (_unrepeated(k, table) if order is None else k), _unrepeated(v, table)
        k_dims, v_dims = self._ordered(single_k, order), table.dims(single_v)
        if k_dims is None or v_dims is None or k_dims[1] != v_dims[1]:
            single_k, single_v, k_dims, v_dims = k, v, k_whole, v_whole
        q_dims = table.dims(q)
        if q_dims is None or k_dims is None or v_dims is None or not _fit(q_dims, k_dims, v_dims):
            return
        masks = [mask for mask in self.found.masks if self._mask_fits(mask, q_dims, k_dims)]
        plain = [single_k] if order is None else []
        types = {value.dtype for value in (q, *plain, single_v)}
        example = self._example(masks)
        if len(masks) < len(self.found.masks) or len(types) != 1 or not can_make(self.context, "Attention", 23, [q, q, q, *example]):
            return
        if order is not None:
            turned = make_node(self.context, self.last, "Transpose", 1, [single_k], {"perm": order})
            turned.outputs[0].name = f"{self.root.name}/keys"
            turned.outputs[0].type = single_k.type
            turned.outputs[0].shape = ir.Shape([size.number for size in k_dims])
            single_k = turned.outputs[0]
        attributes: dict[str, float] = {"scale": scale}
        if self.found.softcap:
            attributes["softcap"] = self.found.softcap
        mask = self._joined(masks)
        inputs = [q, single_k, single_v] if mask is None else [q, single_k, single_v, mask]
        node = last = make_node(self.context, self.last, "Attention", 23, inputs, attributes)
        if self.root.dtype is not None and self.root.dtype != q.dtype:
            node.outputs[0].type, node.outputs[0].shape = q.type, self.root.shape
            last = make_node(self.context, self.last, "Cast", 6, [node.outputs[0]], {"to": int(self.root.dtype)})
        replace_value(self.root, last.outputs[0], self.nodes)
        formula = f"softmax(scale · q · kᵀ{' + mask' if masks else ''}) · v"
        repeats = "" if k_dims == k_whole else ", repeated heads undone"
        self.context.changed(node, f"{formula} in {len(self.nodes)} nodes made Attention{repeats}")

    def _ordered(self, value: ir.Value, order: Sequence[int] | None) -> Dims | None:
        dims = self.table.dims(value)
        return dims if dims is None or order is None else tuple(dims[axis] for axis in order)

    def _mask_fits(self, mask: _Mask, q: Dims, k: Dims) -> bool:
        """Whether a mask broadcasts to the scores [batch, heads, queries, keys] and has an element for each key."""
        value = mask.value if mask.condition is None else mask.condition
        dims = self.table.dims(value)
        scores = (q[0], q[1], q[2], k[2])
        if value is None or dims is None or not 2 <= len(dims) <= 4 or dims[-1].number == 1:
            return False
        if mask.condition is None and (not is_float(value) or (len(self.found.masks) > 1 and value.dtype != self.root.dtype)):
            return False
        return all(
            size == whole or size.number == 1 or size.number is None or whole.number is None
            for size, whole in zip(dims, scores[4 - len(dims) :], strict=True)
        )

    def _example(self, masks: Sequence[_Mask]) -> list[ir.Value | None]:
        """What the mask will be like, to ask for support of its type."""
        if not masks:
            return []
        if all(self._condition(mask) is not None for mask in masks):
            return [self._condition(masks[0])]
        return [next(mask.value for mask in masks if mask.value is not None) if any(mask.value for mask in masks) else self.root]

    def _condition(self, mask: _Mask) -> ir.Value | None:
        """The condition under which a score is kept, where those that aren't become -∞; None for other masks."""
        if mask.condition is not None:
            return mask.condition if mask.kept and isinf(mask.fill) else None
        where = producer(mask.value, "Where")
        if where is None or len(shape_of(where.inputs[0]) or () if where.inputs[0] is not None else ()) < 2:
            return None
        kept, dropped = (scalar(value, self.context.weights) for value in where.inputs[1:])
        return where.inputs[0] if kept == 0 and dropped is not None and isinf(dropped) and dropped < 0 else None

    def _joined(self, masks: Sequence[_Mask]) -> ir.Value | None:
        """One mask for all: a single condition stays bool, others are added up."""
        if len(masks) == 1 and (condition := self._condition(masks[0])) is not None:
            return condition
        total: ir.Value | None = None
        for index, mask in enumerate(masks):
            value = mask.value if mask.condition is None else self._added(mask, index)
            if total is None or value is None:
                total = value
                continue
            node = make_node(self.context, self.last, "Add", 7, [total, value], {})
            total = self._named(node, f"mask_{index}", value)
        return total

    def _added(self, mask: _Mask, index: int) -> ir.Value:
        """What has to be added to the scores for a condition: 0 where they're kept, the fill elsewhere."""
        dtype = self.root.dtype
        assert dtype is not None
        assert mask.condition is not None
        zero, fill = (
            add_constant(self.last, f"{self.root.name}/{name}_{index}", np.array(number, dtype_from_onnx(int(dtype))))
            for name, number in (("kept", 0.0), ("fill", mask.fill))
        )
        branches = [zero, fill] if mask.kept else [fill, zero]
        node = make_node(self.context, self.last, "Where", 9, [mask.condition, *branches], {})
        return self._named(node, f"condition_{index}", self.root)

    def _named(self, node: ir.Node, name: str, like: ir.Value) -> ir.Value:
        value = node.outputs[0]
        value.name, value.type = f"{self.root.name}/{name}", like.type
        self.table.follow(node)
        return value


def _fit(q: Dims, k: Dims, v: Dims) -> bool:
    """Whether [batch, heads, queries, dim], [batch, kv heads, keys, dim] and [batch, kv heads, keys, value dim] are what the op takes."""
    if not len(q) == len(k) == len(v) == 4 or q[0] != k[0] or k[:3] != v[:3] or q[3] != k[3]:
        return False
    heads, kv_heads = q[1].number, k[1].number
    return q[1] == k[1] or (heads is not None and kv_heads is not None and kv_heads > 0 and heads % kv_heads == 0)


def _unscaled(value: ir.Value, weights: WeightStore) -> tuple[ir.Value, float]:
    """What a value is a positive multiple of, and the number; the value itself and 1 if it's none."""
    found = product(value, (), weights)
    return (next(iter(found.powers)), found.factor) if list(found.powers.values()) == [1.0] and found.factor > 0 else (value, 1.0)


def _untransposed(value: ir.Value, table: ShapeTable) -> tuple[ir.Value, Sequence[int] | None]:
    """The keys [batch, heads, time, dim] of transposed ones [batch, heads, dim, time], and the order of axes they still need, if any."""
    dims = table.dims(value)
    node = producer(value, "Transpose", "Reshape")
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None and "perm" in node.attributes:
        perm = node.attributes["perm"].as_ints()
        order = [perm[axis] for axis in (0, 1, 3, 2)] if len(perm) == 4 else [0, 1, 2, 3]
        return (node.inputs[0], None if order == [0, 1, 2, 3] else order) if len(perm) == 4 else (value, (0, 1, 3, 2))
    flat = producer(node.inputs[0], "Transpose") if node is not None and node.op_type == "Reshape" else None
    source = None if flat is None else producer(flat.inputs[0], "Reshape")
    if flat is not None and source is not None and source.inputs[0] is not None and dims is not None and len(dims) == 4:
        # [batch, heads, time, dim] flattened to [batch · heads, time, dim], turned, and given its axes back.
        keys, merged = table.dims(source.inputs[0]), table.dims(source.outputs[0])
        turned = "perm" in flat.attributes and list(flat.attributes["perm"].as_ints()) == [0, 2, 1]
        if turned and merged is not None and keys == (dims[0], dims[1], dims[3], dims[2]) and merged[1:] == keys[2:]:
            return source.inputs[0], None
    return value, (0, 1, 3, 2)


def _unrepeated(value: ir.Value, table: ShapeTable) -> ir.Value:
    """Keys or values before each head was repeated for the queries that share it: Unsqueeze, Expand, Reshape undone.

    [batch, kv heads, time, dim] -> [batch, kv heads, 1, time, dim] -> [batch, kv heads, n, time, dim] -> [batch, kv heads · n, time, dim]
    """
    merge = producer(value, "Reshape")
    expand = None if merge is None else producer(merge.inputs[0], "Expand", "Tile")
    split = None if expand is None else producer(expand.inputs[0], "Unsqueeze", "Reshape")
    if merge is None or expand is None or split is None or split.inputs[0] is None:
        return value
    source, one = table.dims(split.inputs[0]), table.dims(split.outputs[0])
    many, whole = table.dims(expand.outputs[0]), table.dims(value)
    if source is None or len(source) != 4 or one is None or many is None or len(many) != 5:
        return value
    if one != (*source[:2], Size.of(1), *source[2:]) or many != (*source[:2], many[2], *source[2:]):
        return value
    return split.inputs[0] if whole == (source[0], size_product([source[1], many[2]]), *source[2:]) else value


RAISE_ATTENTION = GraphPass("raise-attention", Level.EXTENDED, raise_attention)
