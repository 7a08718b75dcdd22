"""What stands around the `Softmax` of an attention: the scores that go in, scaled, capped and masked, and the weights that come out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from miniort.graph.causal_masks import causal_offset
from miniort.graph.matching import consumers, int_attribute, is_float, producer, product, scalar
from miniort.graph.passes import PassContext
from miniort.graph.shape_propagation import ShapeTable
from miniort.graph.symbolic_sizes import size_product
from miniort.model.schemas import node_opset

_DEPTH = 16
_VANISHING = 60.0
"""A mask's number times its type's rounding step: from here on a score (of up to some 30) that it's added to doesn't change it.

Then Where(m, score, low) is score + Where(m, 0, low): such are -1e9 in float32 and -65504 in float16.
"""
LOW = -1000.0
"""Where a query sees some key, a key with a number so low weighs nothing beside it: e to that power is 0."""
_STEPS = {ir.DataType.FLOAT: 2.0**-23, ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7, ir.DataType.DOUBLE: 2.0**-52}


@dataclass(frozen=True)
class Mask:
    """Something that is added to the scores.

    value: what is added; or, if there's a `condition`, the scores are replaced by `fill` where it's not `kept`.
    rank: how many axes the scores have there, 4 or 3 (batch and heads in one).
    is_sum: whether adding the fill to the scores is as good as putting it in their place.
    """

    value: ir.Value | None = None
    condition: ir.Value | None = None
    kept: bool = True
    fill: float = 0.0
    rank: int = 4
    is_sum: bool = True


@dataclass(frozen=True)
class Scores:
    """scale · q · kᵀ, capped, plus masks. `product` is the MatMul; `nodes` compute the scores from its result.

    lowest: the number that no sum of scores and masks is let be below, None for none.
    """

    product: ir.Node
    scale: float = 1.0
    softcap: float = 0.0
    masks: tuple[Mask, ...] = ()
    lowest: float | None = None
    nodes: frozenset[ir.Node] = field(default_factory=frozenset)

    def with_nodes(self, *nodes: ir.Node, **changes: Any) -> Scores:
        """These scores after further nodes, with the fields changed that those change."""
        return replace(self, nodes=self.nodes | set(nodes), **changes)

    @property
    def is_bare(self) -> bool:
        """Whether nothing but a scale stands on the product yet."""
        return not self.masks and not self.softcap


@dataclass(frozen=True)
class ScoreReader:
    """Reads values as scores of an attention.

    A mask may call the number of keys by a name of its own. It's taken to be the scores' number then: were there more in the mask, there
    would be more weights than values, and no such graph runs.
    """

    table: ShapeTable
    context: PassContext

    def normalizes_last_axis(self, softmax: ir.Node) -> bool:
        """Whether a Softmax is taken over the last axis alone."""
        dims = self.table.dims(softmax.inputs[0])
        # Before opset 13 it's taken over all axes from this one on, which is one axis if it's the last.
        axis = int_attribute(softmax, "axis", -1 if (node_opset(softmax, self.context.opsets) or 0) >= 13 else 1)
        return dims is not None and len(dims) in (3, 4) and axis in (-1, len(dims) - 1)

    def scores(self, value: ir.Value | None, depth: int = _DEPTH) -> Scores | None:
        """A value as attention scores; None if it isn't that."""
        node = producer(value, "MatMul", "Add", "Sub", "Where", "Mul", "Div", "Cast", "Reshape", "Max", "Clip", "Unsqueeze", "Squeeze")
        if value is None or node is None or depth < 0:
            return None
        match node.op_type:
            case "MatMul":
                return Scores(node)
            case "Cast" if is_float(node.inputs[0]):
                found = self.scores(node.inputs[0], depth - 1)
                return _with(found, node) if found is not None and self._follow(node) else None
            case "Reshape" | "Unsqueeze" | "Squeeze":
                found = self.scores(node.inputs[0], depth - 1)
                return _with(found, node) if found is not None and self._follow(node) and self.keeps_rows(node) else None
            case "Add":
                return self._added(node, depth)
            case "Where":
                return self._where(node, depth)
            case "Sub":
                return self._multiplied(node, depth)
            case "Max" | "Clip":
                return self._bounded(node, depth)
            case "Mul" | "Div":
                return self._scaled(value, depth)
        return None

    def keeps_rows(self, node: ir.Node) -> bool:
        """Whether a node only merges or splits batch and heads: [batch, heads, a, b] <-> [batch · heads, a, b]."""
        before, after = self.table.dims(node.inputs[0]), self.table.dims(node.outputs[0])
        if before is None or after is None or not {len(before), len(after)} <= {3, 4} or before[-2:] != after[-2:]:
            return False
        return size_product(before[:-2]) == size_product(after[:-2])

    def _follow(self, node: ir.Node, scores: ir.Value | None = None) -> bool:
        """Work out a node's shape again; it's that of the scores in it where it only masks them."""
        self.table.follow(node)
        dims, own = self.table.dims(scores), self.table.dims(node.outputs[0])
        if scores is not None and dims is not None and own is not None and len(own) == len(dims):
            self.table.assume(node.outputs[0], dims)
        return True

    def _rank(self, node: ir.Node) -> int:
        return len(self.table.dims(node.outputs[0]) or ())

    def _added(self, node: ir.Node, depth: int) -> Scores | None:
        for index, x in enumerate(node.inputs):
            inner = self.scores(x, depth - 1)
            if inner is not None and inner.lowest is None:
                self._follow(node, x)
                return inner.with_nodes(node, masks=(*inner.masks, Mask(node.inputs[1 - index], rank=self._rank(node))))
        return None

    def _where(self, node: ir.Node, depth: int) -> Scores | None:
        """Scores that are replaced by a very low number under a condition."""
        condition = node.inputs[0]
        dtype = node.outputs[0].dtype
        for index in (1, 2):
            fill = scalar(node.inputs[3 - index], self.context.weights)
            if fill is None or condition is None or dtype not in _STEPS:
                continue
            vanishes = -fill * _STEPS[dtype] >= _VANISHING
            if not vanishes and (fill > LOW or not self.leaves_something(condition, index == 1)):
                continue
            inner = self.scores(node.inputs[index], depth - 1)
            if inner is not None and inner.lowest is None:
                self._follow(node, node.inputs[index])
                mask = Mask(None, condition, index == 1, fill, self._rank(node), vanishes)
                return inner.with_nodes(node, masks=(*inner.masks, mask))
        return None

    def _multiplied(self, node: ir.Node, depth: int) -> Scores | None:
        """s · b - n · (1 - b), b a triangle of ones and zeros: the scores where b is 1, and -n elsewhere."""
        weights = self.context.weights
        product, taken = producer(node.inputs[0], "Mul"), producer(node.inputs[1], "Mul")
        if product is None or taken is None:
            return None
        for index, x in enumerate(product.inputs):
            b = product.inputs[1 - index]
            inverted = [producer(value, "Sub") for value in taken.inputs]
            numbers = [scalar(value, weights) for value in taken.inputs]
            place = 0 if inverted[0] is not None else 1
            rest, number = inverted[place], numbers[1 - place]
            if b is None or rest is None or number is None or number < -LOW:
                continue
            if scalar(rest.inputs[0], weights) != 1 or rest.inputs[1] is not b or not self.leaves_something(b, True):
                continue
            inner = self.scores(x, depth - 1)
            if inner is not None and inner.lowest is None:
                self._follow(product, x)
                self._follow(node, product.outputs[0])
                mask = Mask(None, b, True, -number, self._rank(node), is_sum=False)
                return inner.with_nodes(node, product, masks=(*inner.masks, mask))
        return None

    def leaves_something(self, condition: ir.Value, kept: bool) -> bool:
        """Whether every query provably sees a key: where no other mask takes that away, those that it doesn't see weigh nothing."""
        offset = causal_offset(condition, self.table, negated=not kept)
        return offset is not None and offset.is_natural

    def _bounded(self, node: ir.Node, depth: int) -> Scores | None:
        """Scores kept from falling below a very low number, to which two masks might add up to -∞."""
        dtype = node.outputs[0].dtype
        if len(node.inputs) != 2:
            return None
        for index in (1, 0) if node.op_type == "Max" else (1,):
            lowest = scalar(node.inputs[index], self.context.weights)
            inner = None if lowest is None else self.scores(node.inputs[1 - index], depth - 1)
            if inner is not None and lowest is not None and dtype in _STEPS and -lowest * _STEPS[dtype] >= _VANISHING:
                self._follow(node)
                return inner.with_nodes(node, lowest=lowest) if inner.lowest is None else None
        return None

    def _scaled(self, value: ir.Value, depth: int) -> Scores | None:
        """A number times bare scores, or a soft cap c · tanh(scores / c)."""
        outer = product(value, (), self.context.weights)
        if list(outer.powers.values()) != [1.0] or outer.factor <= 0 or not outer.nodes:
            return None
        inside = next(iter(outer.powers))
        tanh = producer(inside, "Tanh")
        if tanh is None:
            inner = self.scores(inside, depth - 1)
            return inner.with_nodes(*outer.nodes, scale=inner.scale * outer.factor) if inner is not None and inner.is_bare else None
        bare = self.scores(tanh.inputs[0], depth - 1)
        if bare is None or not bare.is_bare:
            return None
        # c · tanh(s / c): the division is part of the scale that was found inside.
        return bare.with_nodes(*outer.nodes, tanh, scale=bare.scale * outer.factor, softcap=outer.factor)

    def ending(self, softmax: ir.Node) -> tuple[ir.Node, frozenset[ir.Node]] | None:
        """The product with the values, and the nodes between it and the softmax: casts, reshapes, and a guard that makes NaN 0."""
        value, nodes = softmax.outputs[0], frozenset[ir.Node]()
        self.table.follow(softmax)
        while True:
            guard = next(consumers(value, "IsNaN"), None)
            if guard is not None:
                where = next(consumers(guard.outputs[0], "Where"), None)
                if where is None or where.inputs[2] is not value or scalar(where.inputs[1], self.context.weights) != 0:
                    return None
                self._follow(where, value)
                nodes, value = nodes | {guard, where}, where.outputs[0]
                continue
            step = next(consumers(value, "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze"), None)
            if step is None:
                break
            self.table.follow(step)
            if not is_float(step.outputs[0]) or (step.op_type not in ("Cast", "Identity") and not self.keeps_rows(step)):
                return None
            nodes, value = nodes | {step}, step.outputs[0]
        last = next(consumers(value, "MatMul"), None)
        return None if last is None or last.inputs[0] is not value else (last, nodes)


def _with(scores: Scores | None, *nodes: ir.Node) -> Scores | None:
    return None if scores is None else scores.with_nodes(*nodes)
