"""Builders of reductions."""

from __future__ import annotations

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse, is_float
from miniort.types import DType

REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]


def defines_empty_sets(operator: Operator, dtype: DType) -> bool:
    """Whether the specification says what a reduction over nothing gives; some texts do so for types that have an infinity."""
    text = operator.schema.doc
    return "empty set" in text and ("undefined" not in text or ("infinity" in text and is_float(dtype)))


@builds(*[f"Reduce{kind}" for kind in REDUCTIONS])
def reduction(d: Draws, operator: Operator) -> NodeCase:
    """Over axes that are an attribute, then an input; over all or none where there are none."""
    dtype = d.dtype(operator)
    shape = list(d.shape(min_size=1))
    axes = d.axes(len(shape), operator)
    if shape and defines_empty_sets(operator, dtype) and d.integer(0, 3) == 0:
        shape[axes[0] if axes else 0] = 0
    x = d.positive(dtype, shape) if operator.op == "ReduceLogSum" else d.ordinary(dtype, shape, -3, 3)
    attributes = d.some(keepdims=d.integer(0, 1))
    case = NodeCase([x], attributes, tolerance=2**-5 if is_coarse(dtype) else None, atol=0.1 if is_coarse(dtype) else None)
    if operator.has_attribute("axes"):
        if axes:
            attributes["axes"] = axes
        return case
    attributes |= d.some(noop_with_empty_axes=d.integer(0, 1))
    case.inputs = d.trimmed([x, np.array(axes, np.int64) if axes or d.boolean() else None])
    case.constants = d.constants(1) & frozenset(range(len(case.inputs)))
    return case


@builds("ArgMax", "ArgMin")
def arg_extremum(d: Draws, operator: Operator) -> NodeCase:
    """The first or last place of the extremum: whole numbers, so that there are ties."""
    dtype = d.dtype(operator)
    shape = d.shape(1)
    axis = d.choice([axis for axis in range(len(shape)) if shape[axis]] or [None])
    if axis is None:
        shape, axis = (2,), 0
    x = d.rng().integers(0, 3, shape).astype(dtype)
    attributes = d.some(keepdims=d.integer(0, 1))
    if operator.has_attribute("select_last_index"):
        attributes |= d.some(select_last_index=d.integer(0, 1))
    if axis or d.boolean():
        attributes["axis"] = axis - len(shape) if operator.version >= 11 and d.boolean() else axis
    return NodeCase([x], attributes)
