"""What the normalisations have in common: a power of a mean of squares, and what it's multiplied with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose

import onnx_ir as ir

from miniort.graph.matching import (
    Algebra,
    consumers,
    downstream,
    equals,
    integers,
    is_enclosed,
    is_float,
    other_input,
    product,
    scalar,
    upstream,
)
from miniort.graph.passes import PassContext
from miniort.model.constants import is_constant, shape_of


@dataclass(frozen=True)
class Normalized:
    """`x` / √(mean of x² over the last `count` axes + epsilon) · scale; `root` is the value that holds it, `nodes` those that compute it.

    x: [..., after...]; scale: broadcasts to [after...], None where there is none -> x's shape
    narrow: the value that x was widened from, where the result is narrowed to its type again before it's multiplied with the scale. The
    scale may be of a narrower type than x also where x wasn't widened.
    """

    x: ir.Value
    narrow: ir.Value | None
    scale: ir.Value | None
    epsilon: float
    count: int
    root: ir.Value
    nodes: frozenset[ir.Node]


def reduced_axes(node: ir.Node, context: PassContext) -> int | None:
    """Over how many of the last axes a reduction goes; None if it doesn't keep them as 1, or goes over others."""
    keepdims = node.attributes.get("keepdims")
    x = node.inputs[0]
    shape = None if x is None else shape_of(x)
    if shape is None or (keepdims is not None and not keepdims.as_int()):
        return None
    given = node.attributes.get("axes")
    axes = tuple(given.as_ints()) if given is not None else integers(node.inputs[1], context.weights) if len(node.inputs) > 1 else None
    if not axes:
        return None
    rank = len(shape)
    positions = sorted({axis % rank for axis in axes})
    return len(positions) if positions == list(range(rank - len(positions), rank)) else None


def normalized_values(graph: ir.Graph, context: PassContext) -> Iterator[Normalized]:
    """Every x / √(mean of x² + epsilon) of a graph, in whatever way it's written, the longest form of each."""
    for mean in list(graph):
        if mean.graph is None or mean.domain != "" or mean.op_type != "ReduceMean" or not is_float(mean.outputs[0]):
            continue
        count = reduced_axes(mean, context)
        squares = mean.inputs[0]
        if count is None or squares is None:
            continue
        for x in upstream(squares):
            inside = Algebra([x], context.weights)
            if not is_constant(x) and shape_of(x) is not None and equals(inside.polynomial(squares), {(2.0,): 1.0}, 1e-6):
                found = _from_mean(x, mean, count, frozenset({*inside.nodes, mean}), context)
                if found is not None:
                    yield found
                break


def _from_mean(x: ir.Value, mean: ir.Node, count: int, before: frozenset[ir.Node], context: PassContext) -> Normalized | None:
    for add in consumers(mean.outputs[0], "Add"):
        epsilon = scalar(other_input(add, mean.outputs[0]), context.weights)
        if epsilon is not None and 0 < epsilon < 1:
            return _longest(x, add, epsilon, count, before | {add}, context)
    return None


def _longest(x: ir.Value, add: ir.Node, epsilon: float, count: int, before: frozenset[ir.Node], context: PassContext) -> Normalized | None:
    variance = add.outputs[0]
    best: Normalized | None = None
    for root in downstream(variance):
        found = product(root, {x, variance}, context.weights)
        powers = dict(found.powers)
        if powers.pop(x, 0) != 1.0 or powers.pop(variance, 0) != -0.5 or not isclose(found.factor, 1.0, rel_tol=1e-6):
            continue
        nodes = before | found.nodes
        last = root.producer()
        if last is None or last.graph is not add.graph or not is_enclosed(nodes, root):
            continue
        if not powers:
            best = Normalized(x, None, None, epsilon, count, root, nodes)
        elif list(powers.values()) == [1.0] and is_scale(scale := next(iter(powers)), x, count):
            best = Normalized(x, None, scale, epsilon, count, root, nodes)
    if best is None or best.scale is not None:
        return best
    return _with_narrow_scale(best) or best


def _with_narrow_scale(found: Normalized) -> Normalized | None:
    """The form that computes in float32 what goes on in another type: (Cast,) normalise, Cast, multiply with the scale."""
    if found.x.dtype != ir.DataType.FLOAT:
        return None
    widening = found.x.producer()
    widened = widening.inputs[0] if widening is not None and widening.domain == "" and widening.op_type == "Cast" else None
    for cast in consumers(found.root, "Cast"):
        back = cast.outputs[0]
        if back.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            continue
        narrow = widened if widened is not None and widened.dtype == back.dtype else None
        for multiply in consumers(back, "Mul"):
            scale, root = other_input(multiply, back), multiply.outputs[0]
            nodes = found.nodes | {cast, multiply}
            if scale is not None and scale.dtype == back.dtype and is_scale(scale, found.x, found.count) and is_enclosed(nodes, root):
                return Normalized(found.x, narrow, scale, found.epsilon, found.count, root, nodes)
    return None


def is_scale(value: ir.Value, x: ir.Value, count: int) -> bool:
    """Whether a value has the shape of a scale or bias: [after...], the last `count` sizes of x, or fewer of them."""
    own, whole = shape_of(value), shape_of(x)
    if not own or whole is None or len(own) > count or not all(isinstance(size, int) for size in own):
        return False
    return tuple(own) == tuple(whole[len(whole) - len(own) :])
