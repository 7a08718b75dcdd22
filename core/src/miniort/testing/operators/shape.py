"""Builders of ops that look at shapes, or give elements another one."""

from __future__ import annotations

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds


@builds("Shape", "Size")
def shape_of(d: Draws, operator: Operator) -> NodeCase:
    """All sizes or a slice of them, whose ends may lie outside."""
    attributes = d.some(start=d.integer(-6, 6), end=d.integer(-6, 6)) if operator.has_attribute("start") else {}
    return NodeCase([d.array(d.dtype(operator), d.shape())], attributes, constants=d.constants(0))


@builds("Reshape")
def reshape(d: Draws, operator: Operator) -> NodeCase:
    """Axes split, joined and reordered; sizes that are copied (0), inferred (-1), or 0 themselves."""
    shape = list(d.shape())
    target = list(shape)
    literal = operator.has_attribute("allowzero") and d.boolean()
    if literal or 0 not in shape:
        target = d.permutation(shape)
        if len(target) > 1 and d.boolean():
            target = [target[0] * target[1], *target[2:]]
        target = target + [1] * d.integer(0, 1)
    written = list(target)
    if not literal:
        written = [0 if position < len(shape) and shape[position] == size and d.boolean() else size for position, size in enumerate(target)]
    if written and d.boolean() and not (literal and 0 in target):
        position = d.integer(0, len(written) - 1)
        if np.prod(target[:position] + target[position + 1 :]) > 0:
            written[position] = -1
    attributes = {"allowzero": 1} if literal else d.some(allowzero=0) if operator.has_attribute("allowzero") else {}
    return NodeCase([d.array(d.dtype(operator), shape), np.array(written, np.int64)], attributes, constants=d.constants(1))


@builds("Flatten")
def flatten(d: Draws, operator: Operator) -> NodeCase:
    """To a matrix, before any axis."""
    x = d.array(d.dtype(operator), d.shape(1))
    return NodeCase([x], d.some(axis=d.integer(-x.ndim if operator.version >= 11 else 0, x.ndim)))


@builds("Squeeze", "Unsqueeze")
def squeeze(d: Draws, operator: Operator) -> NodeCase:
    """Axes of size 1 go or come; the axes are an attribute, then an input, and Squeeze takes all of them where there are none."""
    shape = list(d.shape(max_rank=3))
    count = d.integer(0 if operator.op == "Squeeze" else 1, 2)
    rank = len(shape) + count
    places = sorted(d.permutation(range(rank))[:count])
    longer = list(shape)
    for place in places:
        longer.insert(place, 1)
    axes = [place - rank if operator.version >= 11 and d.boolean() else place for place in d.permutation(places)]
    x = d.array(d.dtype(operator), longer if operator.op == "Squeeze" else shape)
    given = operator.op == "Unsqueeze" or bool(axes)
    if operator.has_attribute("axes"):
        return NodeCase([x], {"axes": axes} if given else {})
    return NodeCase(d.trimmed([x, np.array(axes, np.int64) if given else None]), constants=d.constants(1) if given else frozenset())


@builds("Transpose")
def transpose(d: Draws, operator: Operator) -> NodeCase:
    """Axes in any order, reversed by default."""
    x = d.array(d.dtype(operator), d.shape())
    return NodeCase([x], d.some(perm=d.permutation(range(x.ndim))) if x.ndim else {})


@builds("Expand")
def expand(d: Draws, operator: Operator) -> NodeCase:
    """Both ways: the shape broadcasts to the input's, or the input to the shape."""
    shape = d.shape()
    small = d.broadcasting(shape)
    given, target = (shape, small) if d.boolean() else (small, shape)
    return NodeCase([d.array(d.dtype(operator), given), np.array(target, np.int64)], constants=d.constants(1))


@builds("Tile")
def tile(d: Draws, operator: Operator) -> NodeCase:
    """Repeats of 0 to 3."""
    x = d.array(d.dtype(operator), d.shape(max_rank=3))
    return NodeCase([x, np.array([d.integer(0, 3) for _ in range(x.ndim)], np.int64)], constants=d.constants(1))


@builds("DepthToSpace", "SpaceToDepth")
def blocks(d: Draws, operator: Operator) -> NodeCase:
    """Blocks between depth and space, in either order of depth: x [N, C, H, W]."""
    block = d.integer(1, 3)
    n, c, h, w = (d.integer(1, 3) for _ in range(4))
    shape = (n, c * block * block, h, w) if operator.op == "DepthToSpace" else (n, c, h * block, w * block)
    attributes = {"blocksize": block} | (d.some(mode=d.choice(["DCR", "CRD"])) if operator.has_attribute("mode") else {})
    return NodeCase([d.array(d.dtype(operator), shape)], attributes)
