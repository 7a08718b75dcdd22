"""Builders of ops that sort, count, reverse or select by position."""

from __future__ import annotations

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse
from miniort.types import STRING, Array, DType


def with_ties(d: Draws, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Few different values."""
    if dtype == STRING or dtype.kind in "bc":
        return d.array(dtype, shape)
    return np.asarray(d.rng().integers(0, 4, shape)).astype(dtype)


@builds("TopK")
def top_k(d: Draws, operator: Operator) -> NodeCase:
    """Ties go to the lower index. Unsorted results have no order to compare, but for one of them."""
    x = with_ties(d, d.dtype(operator), d.shape(1))
    axis = d.axis(x.ndim, operator)
    k = d.integer(0, x.shape[axis])
    attributes = {"axis": axis} if (axis != -1 and axis != x.ndim - 1) or d.boolean() else {}
    if operator.version == 1:
        return NodeCase([x], attributes | {"k": max(k, 1)} if x.shape[axis] else {"k": 0}, 2)
    if operator.has_attribute("largest"):
        attributes |= d.some(largest=d.integer(0, 1), sorted=d.integer(0, 1) if k <= 1 else 1)
    return NodeCase([x, np.array([k], np.int64)], attributes, 2, constants=d.constants(1))


@builds("Unique")
def unique(d: Draws, operator: Operator) -> NodeCase:
    """Elements, or slices along an axis; any of the outputs."""
    x = with_ties(d, d.dtype(operator, without=[np.complex64, np.complex128]), d.shape(1, 3, min_size=1, max_size=3))
    outputs = d.integer(1, 4)
    skipped = frozenset(position for position in range(1, outputs - 1) if d.boolean())
    return NodeCase([x], d.some(axis=d.axis(x.ndim), sorted=d.integer(0, 1)), outputs, skipped=skipped)


@builds("Trilu")
def trilu(d: Draws, operator: Operator) -> NodeCase:
    """Triangles of matrices, above or below a diagonal that may lie outside."""
    x = d.array(d.dtype(operator), d.shape(2, 4))
    k = np.asarray(d.integer(-5, 5), np.int64) if d.boolean() else None
    return NodeCase(d.trimmed([x, k]), d.some(upper=d.integer(0, 1)), constants=d.constants(1))


@builds("ReverseSequence")
def reverse_sequence(d: Draws, operator: Operator) -> NodeCase:
    """The first elements of each row: x [time, batch, ...] or [batch, time, ...]."""
    x = d.array(d.dtype(operator), d.shape(2, 4, min_size=1))
    time = d.integer(0, 1)
    lengths = d.array(np.dtype(np.int64), (x.shape[1 - time],), 1, x.shape[time])
    return NodeCase([x, lengths], {"time_axis": time, "batch_axis": 1 - time} if time or d.boolean() else {}, constants=d.constants(1))


@builds("Hardmax")
@builds("Softmax", "LogSoftmax")
def softmax(d: Draws, operator: Operator) -> NodeCase:
    """Along one axis; before version 13 over all axes from that one on, of which the default is the second."""
    dtype = d.dtype(operator)
    x = with_ties(d, dtype, d.shape(1)) if operator.op == "Hardmax" else d.ordinary(dtype, d.shape(1))
    axis = d.axis(x.ndim, operator)
    default = operator.version >= 13 or x.ndim > 1
    return NodeCase([x], {} if default and d.boolean() else {"axis": axis}, atol=0.05 if is_coarse(dtype) else None)
