"""Raising `Attention`: softmax(scale · q · kᵀ + mask) · v, found from the `Softmax` outwards (Vaswani et al. 2017, arXiv:1706.03762).

What a row of the scores that is masked as a whole gives: with a mask of -∞ the long form makes NaN, which a guard (`IsNaN`, `Where`)
makes 0; the op makes 0 as well, also where the guard is missing. With a mask of a finite number the op gets that very number to add, so
it makes what the long form makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf

import numpy as np
import onnx_ir as ir

from miniort.graph.attention_scores import LOW, Mask, ScoreReader, Scores
from miniort.graph.causal_masks import always_holds, causal_offset, conjuncts
from miniort.graph.matching import consumers, is_enclosed, is_float, producer, scalar
from miniort.graph.movement import Trial, origins
from miniort.graph.passes import GraphPass, Level, PassContext
from miniort.graph.replacement import add_constant, can_make, make_node, replace_value
from miniort.graph.shape_propagation import Dims, ShapeTable, shape_tables
from miniort.graph.symbolic_sizes import Size, size_product
from miniort.model.constants import shape_of
from miniort.types import Array, dtype_from_onnx

_TIME_FIRST = (0, 2, 1, 3)
"""The order that makes [batch, heads, time, dim] of [batch, time, heads, dim]."""


def raise_attention(model: ir.Model, context: PassContext) -> None:
    """Replace the long forms of `Attention` by the op: q, k, v of 4 axes, repeats of key and value heads undone, masks kept as inputs."""
    for graph, table in shape_tables(model, context.weights):
        for node in list(graph):
            if node.graph is not None and node.domain == "" and node.op_type == "Softmax" and is_float(node.outputs[0]):
                _raise(node, table, context)


def _raise(softmax: ir.Node, table: ShapeTable, context: PassContext) -> None:
    reader = ScoreReader(table, context)
    if not reader.normalizes_last_axis(softmax):
        return
    scores = reader.scores(softmax.inputs[0])
    ending = None if scores is None else reader.ending(softmax)
    if scores is None or ending is None:
        return
    product, after = ending
    nodes = scores.nodes | after | {softmax, scores.product, product}
    v, root = _narrowed(product)
    if v is None:
        return
    operands = _operands(scores, softmax, v, table)
    if operands is None:
        return
    if (unmerged := _unmerged(root, operands, table)) is not None:
        root = unmerged
    last = root.producer()
    assert last is not None
    step: ir.Node | None = last
    while step is not None and step is not product:  # the Cast and the Reshape behind the product
        nodes |= {step}
        step = None if step.inputs[0] is None else step.inputs[0].producer()
    if is_enclosed(nodes, root):
        _Builder(scores, operands, root, last, nodes, table, context).build()


def _narrowed(last: ir.Node) -> tuple[ir.Value | None, ir.Value]:
    """The values, before a Cast to float32 if there's one, and the result, behind a Cast back if there's one."""
    v, root = last.inputs[1], last.outputs[0]
    widening, narrowing = producer(v, "Cast"), next(consumers(root, "Cast"), None)
    narrow = None if widening is None else widening.inputs[0]
    if narrow is None or not is_float(narrow):
        return v, root
    is_alone = len(list(root.uses())) == 1 and not root.is_graph_output()
    return narrow, narrowing.outputs[0] if narrowing is not None and is_alone and narrowing.outputs[0].dtype == narrow.dtype else root


@dataclass(frozen=True)
class _Operand:
    """Queries, keys or values [batch, heads, time, dim] that the long form multiplied with `factor`.

    dims: their shape as the op takes them; the value itself may have batch and heads in one axis, and need its axes in another order.
    """

    value: ir.Value
    dims: Dims
    factor: float = 1.0
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Operands:
    q: _Operand
    k: _Operand
    v: _Operand
    repeated: bool


def _operands(scores: Scores, softmax: ir.Node, v: ir.Value, table: ShapeTable) -> _Operands | None:
    """What the op is given; None if shapes can't be proven to be what it takes."""
    left, right = scores.product.inputs
    if left is None or right is None:
        return None
    q = _queries(left, scores, softmax, table)
    if q is None:
        return None
    keys = _by_heads(right, q.dims, table, turned=True)
    values = {heads: found for heads, found in _by_heads(v, q.dims, table, turned=False).items() if found.factor == 1.0}
    for heads in sorted(set(keys) & set(values)):
        k, v_found = keys[heads], values[heads]
        if k.dims[2] == v_found.dims[2]:
            return _Operands(q, k, v_found, heads != q.dims[1].number)
    k_turned, v_whole = _keys_as_they_are(right, q.dims, table), _values_as_they_are(v, q.dims, table)
    if k_turned is None or v_whole is None or k_turned.dims[1:3] != v_whole.dims[1:3]:
        return None
    return _Operands(q, k_turned, v_whole, False)


def _queries(left: ir.Value, scores: Scores, softmax: ir.Node, table: ShapeTable) -> _Operand | None:
    """The left side of the product as [batch, heads, time, dim]."""
    dims = table.dims(left)
    if dims is None or len(dims) not in (3, 4):
        return None
    found = None if len(dims) == 3 else _Operand(left, dims)
    for each in origins(left, table):
        own = table.dims(each.source)
        same_rows = own is not None and len(own) == 4 and own[2:] == dims[-2:] and size_product(own[:2]) == size_product(dims[:-2])
        if own is not None and same_rows and (len(dims) == 3 or own == dims) and _is_moved(each.source, left, table):
            found = _Operand(each.source, own, each.factor)
    if found is not None:
        return found
    for node in (softmax, *scores.nodes):
        own = table.dims(node.outputs[0])
        if own is not None and len(own) == 4 and size_product(own[:2]) == dims[0] and own[1].number is not None:
            return _Operand(left, (*own[:2], *dims[1:]))
    return _Operand(left, (dims[0], Size.of(1), *dims[1:]))


def _is_moved(source: ir.Value, value: ir.Value, table: ShapeTable) -> bool:
    """Whether a value holds a source's elements in their order, its first axes merged or not."""
    if source is value:
        return True
    trial = Trial(table)
    array = trial.numbered(source)
    moved = None if array is None else trial.moved(source, array, value)
    return array is not None and moved is not None and np.array_equal(moved.reshape(-1), array.reshape(-1))


def _by_heads(value: ir.Value, q: Dims, table: ShapeTable, turned: bool) -> dict[int, _Operand]:
    """Keys or values [batch, kv heads, time, dim] that the right side of a product is made of, by their number of heads.

    turned: the product reads [..., dim, time]. Each head may be repeated for the queries' heads that share it.
    """
    whole = table.dims(value)
    heads = q[1].number
    if whole is None or heads is None or len(whole) not in (3, 4):
        return {}
    time, dim = (whole[-1], whole[-2]) if turned else (whole[-2], whole[-1])
    found: dict[int, _Operand] = {}
    for each in origins(value, table):
        own = table.dims(each.source)
        if own is None or len(own) != 4 or own[0] != q[0] or own[3] != dim or (turned and dim != q[3]):
            continue
        for order in (None, _TIME_FIRST):
            dims = own if order is None else tuple(own[axis] for axis in order)
            kv, length = dims[1:3]
            fits = length == time and kv.number is not None and kv.number > 0 and not heads % kv.number
            better = kv.number not in found or (order is None) >= (found[kv.number].order is None)
            if fits and better and kv.number is not None and _is_repeated(each.source, value, order, heads // kv.number, table, turned):
                found[kv.number] = _Operand(each.source, dims, each.factor, order)
                break
    return found


def _is_repeated(source: ir.Value, value: ir.Value, order: tuple[int, ...] | None, count: int, table: ShapeTable, turned: bool) -> bool:
    """Whether a value is [batch, kv heads, time, dim], a source's axes in an order, with each head repeated.

    Its last two axes may be turned, its first two be merged.
    """
    trial = Trial(table)
    array = trial.numbered(source)
    moved = None if array is None else trial.moved(source, array, value)
    if array is None or moved is None:
        return False
    array = array if order is None else array.transpose(order)
    if array.shape[1] == 1 and moved.ndim == 4 and moved.shape[1] == 1:
        count = 1  # the product itself repeats a single head
    expected: Array = np.repeat(array, count, 1)
    expected = expected.swapaxes(2, 3) if turned else expected
    return expected.size == moved.size and np.array_equal(expected.reshape(-1), moved.reshape(-1))


def _keys_as_they_are(right: ir.Value, q: Dims, table: ShapeTable) -> _Operand | None:
    dims = table.dims(right)
    if dims is None or len(dims) not in (3, 4):
        return None
    whole = dims if len(dims) == 4 else (*q[:2], *dims[1:])
    fits = whole[0] == q[0] and whole[2] == q[3] and (whole[1] == q[1] or whole[1].number == 1)
    merged = len(dims) == 4 or dims[0] == size_product(q[:2])
    return _Operand(right, (*whole[:2], whole[3], whole[2]), order=(0, 1, 3, 2)) if fits and merged else None


def _values_as_they_are(v: ir.Value, q: Dims, table: ShapeTable) -> _Operand | None:
    dims = table.dims(v)
    if dims is None or len(dims) not in (3, 4):
        return None
    whole = dims if len(dims) == 4 else (*q[:2], *dims[1:])
    merged = len(dims) == 4 or dims[0] == size_product(q[:2])
    return _Operand(v, whole) if whole[0] == q[0] and (whole[1] == q[1] or whole[1].number == 1) and merged else None


def _unmerged(root: ir.Value, operands: _Operands, table: ShapeTable) -> ir.Value | None:
    """The result as [batch, heads, time, dim], if it's computed with batch and heads in one axis and split by the one who reads it."""
    dims = table.dims(root)
    readers = [node for node, _ in root.uses()]
    if dims is None or len(dims) != 3 or len(readers) != 1 or root.is_graph_output() or readers[0].op_type not in ("Reshape", "Unsqueeze"):
        return None
    split = readers[0].outputs[0]
    return split if table.dims(split) == (*operands.q.dims[:3], operands.v.dims[3]) else None


@dataclass
class _Builder:
    """Puts the op in the place of what was found."""

    found: Scores
    operands: _Operands
    root: ir.Value
    last: ir.Node
    nodes: frozenset[ir.Node]
    table: ShapeTable
    context: PassContext

    def build(self) -> None:
        """Make the op, unless a mask doesn't fit, or nobody has it."""
        q, k, v = self.operands.q, self.operands.k, self.operands.v
        masks, causal = self._without_causal(self._settled(self.found.masks))
        heads = q.dims[1].number
        if not all(mask.is_sum for mask in masks) or not all(self._mask_fits(mask) for mask in masks):
            return
        example = [] if not masks else [masks[0].condition] if self._is_bool(masks) else [self.root]
        types = {each.value.dtype for each in (q, k, v)}
        splits = any(len(self.table.dims(each.value) or ()) == 3 for each in (q, k, v))
        if (
            len(types) != 1
            or (splits and heads is None)
            or not can_make(self.context, "Attention", 23, [q.value, q.value, q.value, *example])
        ):
            return
        attributes: dict[str, float] = {"scale": self.found.scale * q.factor * k.factor}
        if causal:
            attributes["is_causal"] = 1
        if self.found.softcap:
            attributes["softcap"] = self.found.softcap
        inputs = [self._input(each, name) for each, name in ((q, "queries"), (k, "keys"), (v, "values"))]
        mask = self._joined(masks)
        node = make_node(self.context, self.last, "Attention", 23, inputs if mask is None else [*inputs, mask], attributes)
        result = node.outputs[0]
        result.type = q.value.type
        self.table.follow(node)
        if len(self.table.dims(self.root) or ()) == 3:
            flat = self._made("Reshape", [result, self._vector("merged", [1, -1, 0, 0])], "merged")
            result = self._made("Squeeze", [flat, self._vector("first", [0])], "flat")
        if self.root.dtype is not None and self.root.dtype != result.dtype:
            result = self._made("Cast", [result], "cast", to=int(self.root.dtype))
            result.type = self.root.type
        replace_value(self.root, result, self.nodes)
        formula = f"softmax(scale · q · kᵀ{' + mask' if masks else ''}{', causal' if causal else ''}) · v"
        repeats = ", repeated heads undone" if self.operands.repeated else ""
        self.context.changed(node, f"{formula} in {len(self.nodes)} nodes made Attention{repeats}")

    def _input(self, operand: _Operand, name: str) -> ir.Value:
        """[batch, heads, time, dim]."""
        value = operand.value
        if len(self.table.dims(value) or ()) == 3:
            value = self._split(value, name)
        return value if operand.order is None else self._made("Transpose", [value], name, perm=operand.order)

    def _split(self, value: ir.Value, name: str) -> ir.Value:
        """[batch · heads, a, b] -> [batch, heads, a, b]; a and b, which may both be unknown, are copied."""
        heads = self.operands.q.dims[1].number
        if heads == 1:
            return self._made("Unsqueeze", [value, self._vector("one_head", [1])], f"{name}_split")
        lifted = self._made("Unsqueeze", [value, self._vector("front", [0])], f"{name}_lifted")
        return self._made("Reshape", [lifted, self._vector("split", [-1, heads or 1, 0, 0])], f"{name}_split")

    def _made(self, op: str, inputs: Sequence[ir.Value], name: str, **attributes: object) -> ir.Value:
        since = {"Unsqueeze": 13, "Squeeze": 13, "Reshape": 5, "Max": 8, "Where": 9, "And": 7, "Add": 7, "Cast": 6}.get(op, 1)
        node = make_node(self.context, self.last, op, since, inputs, attributes)
        value = node.outputs[0]
        value.name, value.type = f"{self.root.name}/{name}", inputs[-1 if op == "Where" else 0].type
        self.table.follow(node)
        return value

    def _vector(self, name: str, numbers: list[int]) -> ir.Value:
        return add_constant(self.last, f"{self.root.name}/{name}", np.array(numbers, np.int64))

    # Masks.

    def _settled(self, masks: Sequence[Mask]) -> Sequence[Mask]:
        """The masks; one that's alone and leaves every query a key takes the others away altogether, whatever number it gives them."""
        if len(masks) != 1 or self.found.lowest is not None:
            return masks
        reader = ScoreReader(self.table, self.context)
        found = self._condition(masks[0], lowest=True)
        if found is None or not reader.leaves_something(*found):
            return masks
        return [Mask(None, *found, -inf, masks[0].rank)]

    def _without_causal(self, masks: Sequence[Mask]) -> tuple[Sequence[Mask], bool]:
        """The masks but for what is causal by position alone, and whether there was that: the attribute says the same.

        Without a past the op counts queries and keys from the first one, so there must be as many of both.
        """
        q, k = self.operands.q.dims, self.operands.k.dims
        if q[2] != k[2] or self.found.lowest is not None:
            return masks, False
        left, causal = [], False
        for mask in masks:
            rest = self._rest(mask)
            causal = causal or rest is not mask
            if rest is not None:
                left.append(rest)
        return left, causal

    def _rest(self, mask: Mask) -> Mask | None:
        """What is left of a mask, None for nothing; the mask itself if it isn't causal by position."""
        found = self._condition(mask)
        if found is None:
            return mask
        condition, kept = found
        if not kept:
            return None if causal_offset(condition, self.table, negated=True) == Size() else mask
        parts = [part for part in conjuncts(condition) if not always_holds(part, self.table)]
        rest = [part for part in parts if causal_offset(part, self.table) != Size()]
        if len(rest) == len(parts) or len(rest) > 1:
            return mask
        return Mask(None, rest[0], True, -inf, mask.rank) if rest else None

    def _mask_fits(self, mask: Mask) -> bool:
        """Whether a mask broadcasts to the scores [batch, heads, queries, keys] and has an element for each key."""
        value = mask.value if mask.condition is None else mask.condition
        dims = self.table.dims(value)
        q, k = self.operands.q.dims, self.operands.k.dims
        scores = (q[0], q[1], q[2], k[2])
        if value is None or dims is None or not 2 <= len(dims) <= mask.rank or dims[-1].number == 1:
            return False
        if mask.condition is None and (not is_float(value) or (self._is_sum and value.dtype != self._mask_type)):
            return False
        if self._is_packed(mask):
            merged = size_product(scores[:2])
            return dims[0] == merged and q[1].number is not None and _broadcasts(dims[1:], scores[2:])
        return _broadcasts(dims, scores[4 - len(dims) :])

    @property
    def _is_sum(self) -> bool:
        return len(self.found.masks) > 1 or self.found.lowest is not None

    @property
    def _mask_type(self) -> ir.DataType:
        """The element type of what is added to the scores."""
        values = [mask.value for mask in self.found.masks if mask.value is not None] or [self.found.product.outputs[0]]
        dtype = values[0].dtype
        assert dtype is not None
        return dtype

    def _is_packed(self, mask: Mask) -> bool:
        """Whether a mask has batch and heads in one axis."""
        dims = self.table.dims(mask.value if mask.condition is None else mask.condition) or ()
        return mask.rank == 3 and len(dims) == 3 and dims[0].number != 1

    def _is_bool(self, masks: Sequence[Mask]) -> bool:
        """Whether all masks together are conditions under which a score is kept, all others becoming -∞."""
        return self.found.lowest is None and all(self._condition(mask) is not None for mask in masks)

    def _condition(self, mask: Mask, lowest: bool = False) -> tuple[ir.Value, bool] | None:
        """The condition under which a score is kept (or, if False, dropped), where others become -∞; None for other masks.

        lowest: also where others become another low number.
        """
        if mask.condition is not None:
            return (mask.condition, mask.kept) if isinf(mask.fill) or lowest else None
        where = producer(mask.value, "Where")
        condition = None if where is None else where.inputs[0]
        if where is None or condition is None or len(shape_of(condition) or ()) < 2:
            return None
        chosen, other = (scalar(value, self.context.weights) for value in where.inputs[1:])
        above = LOW if lowest else -inf
        if chosen == 0 and other is not None and other <= above:
            return condition, True
        return (condition, False) if other == 0 and chosen is not None and chosen <= above else None

    def _joined(self, masks: Sequence[Mask]) -> ir.Value | None:
        """One mask for all: conditions stay bool, others are added up."""
        if not masks:
            return None
        if self._is_bool(masks):
            return self._all_conditions(masks)
        total: ir.Value | None = None
        for index, mask in enumerate(masks):
            value = mask.value if mask.condition is None else self._filled(mask, index)
            assert value is not None
            if self._is_packed(mask):
                value = self._split(value, f"mask_{index}")
            total = value if total is None else self._made("Add", [total, value], f"masks_{index}")
        assert total is not None
        if self.found.lowest is not None:
            lowest = self._number("lowest", self.found.lowest)
            total = self._made("Max", [total, lowest], "bounded_mask")
        return total

    def _all_conditions(self, masks: Sequence[Mask]) -> ir.Value:
        total: ir.Value | None = None
        for index, mask in enumerate(masks):
            found = self._condition(mask)
            assert found is not None
            value, kept = found
            if value.dtype != ir.DataType.BOOL:
                value = self._made("Cast", [value], f"seen_{index}", to=int(ir.DataType.BOOL))
                value.type = ir.TensorType(ir.DataType.BOOL)
            if not kept:
                value = self._made("Not", [value], f"kept_{index}")
            if self._is_packed(mask):
                value = self._split(value, f"mask_{index}")
            total = value if total is None else self._made("And", [total, value], f"masks_{index}")
        assert total is not None
        return total

    def _filled(self, mask: Mask, index: int) -> ir.Value:
        """What has to be added to the scores for a condition: 0 where they're kept, the fill elsewhere."""
        assert mask.condition is not None
        zero, fill = self._number(f"kept_{index}", 0.0), self._number(f"fill_{index}", mask.fill)
        return self._made("Where", [mask.condition, *([zero, fill] if mask.kept else [fill, zero])], f"condition_{index}")

    def _number(self, name: str, number: float) -> ir.Value:
        """A number of the type of the masks."""
        return add_constant(self.last, f"{self.root.name}/{name}", np.array(number, dtype_from_onnx(int(self._mask_type))))


def _broadcasts(dims: Dims, whole: Dims) -> bool:
    return all(
        size == full or size.number == 1 or size.number is None or full.number is None for size, full in zip(dims, whole, strict=True)
    )


RAISE_ATTENTION = GraphPass("raise-attention", Level.EXTENDED, raise_attention)
