"""Builders of ops that join tensors along an axis, and cut them."""

from __future__ import annotations

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds


@builds("Concat")
def concat(d: Draws, operator: Operator) -> NodeCase:
    """One to four tensors, some of them of size 0."""
    dtype, shape = d.dtype(operator), list(d.shape(1))
    axis = d.axis(len(shape), operator)
    arrays = []
    for _ in range(d.integer(1, 4)):
        shape[axis] = d.integer(0, 3)
        arrays.append(d.array(dtype, shape))
    return NodeCase(arrays, {"axis": axis}, constants=d.constants(0, len(arrays) - 1))


@builds("Split")
def split(d: Draws, operator: Operator) -> NodeCase:
    """Into sizes that are given, or into equal parts; from version 18 on the last may be smaller."""
    shape = list(d.shape(1))
    axis = d.axis(len(shape), operator)
    count = d.integer(1, 3)
    attributes = {"axis": axis} if axis or d.boolean() else {}
    if d.boolean():
        sizes = [d.integer(0, 3) for _ in range(count)]
        shape[axis] = sum(sizes)
        x = d.array(d.dtype(operator), shape)
        if operator.has_attribute("split"):
            return NodeCase([x], attributes | {"split": sizes}, count)
        return NodeCase([x, np.array(sizes, np.int64)], attributes, count, constants=d.constants(1))
    part = d.integer(1, 3)
    shape[axis] = part * count - (d.integer(0, part - 1) if operator.has_attribute("num_outputs") else 0)
    inputs = [d.array(d.dtype(operator), shape)] + ([] if operator.has_attribute("split") else [None])
    return NodeCase(d.trimmed(inputs), attributes | ({"num_outputs": count} if operator.has_attribute("num_outputs") else {}), count)


@builds("Slice")
def slice_tensor(d: Draws, operator: Operator) -> NodeCase:
    """Starts and ends that may lie outside and count from either end; from version 10 on they're inputs, with steps."""
    shape = d.shape(1)
    x = d.array(d.dtype(operator), shape)
    axes = d.axes(len(shape), operator, at_least=1)
    given = d.boolean()
    if not given:
        axes = list(range(len(axes)))
    steps = [d.choice([1, 2, -1, -2]) for _ in axes] if operator.version >= 10 and d.boolean() else None
    far = [-(2**31) if step < 0 else 2**31 - 1 for step in steps or [1] * len(axes)]
    starts = [d.choice([d.integer(-5, 5), d.integer(0, 2), -(2**31)]) for _ in axes]
    ends = [d.choice([d.integer(-5, 5), d.integer(2, 5), end]) for end in far]
    if operator.has_attribute("starts"):
        return NodeCase([x], {"starts": starts, "ends": ends} | ({"axes": axes} if given else {}))
    dtype = d.dtype(operator, "Tind")
    numbers = [None if each is None else np.array(each, dtype) for each in (starts, ends, axes if given else None, steps)]
    inputs = d.trimmed([x, *numbers])
    constants = frozenset(range(1, 5)) if d.boolean() else d.constants(1, 2, 3, 4)
    return NodeCase(inputs, constants=constants & frozenset(range(len(inputs))))
