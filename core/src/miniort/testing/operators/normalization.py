"""Builders of normalizations."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse
from miniort.types import DType


def tolerances(dtype: DType) -> dict[str, Any]:
    """Sums of 16-bit floats may be rounded at each step, or at the end."""
    return {"tolerance": 2**-5, "atol": 0.05} if is_coarse(dtype) else {"atol": 1e-4}


def epsilon(d: Draws) -> dict[str, float]:
    """One that is seen in the results, or the default."""
    return d.some(epsilon=d.number(0.0078125, 0.5))


@builds("LayerNormalization", "RMSNormalization")
def layer_normalization(d: Draws, operator: Operator) -> NodeCase:
    """Over all axes from one on; scale and bias broadcast to these."""
    dtype = d.dtype(operator)
    shape = d.shape(1, min_size=1)
    axis = d.axis(len(shape))
    inner = shape[axis:] if d.boolean() else tuple(size if d.boolean() else 1 for size in shape[axis:])
    attributes = epsilon(d) | d.some(stash_type=1) | ({"axis": axis} if axis != -1 or d.boolean() else {})
    scale_type = d.choice([dtype, d.dtype(operator, "V")]) if operator.op == "RMSNormalization" else dtype
    inputs: list[Any] = [d.ordinary(dtype, shape), d.ordinary(scale_type, inner)]
    if operator.op == "RMSNormalization":
        return NodeCase(inputs, attributes, constants=d.constants(1), **tolerances(min(dtype, scale_type, key=lambda each: each.itemsize)))
    inputs.append(d.ordinary(dtype, inner) if d.boolean() else None)
    outputs = d.integer(1, 3)
    skipped = frozenset([1]) if outputs == 3 and d.boolean() else frozenset()
    return NodeCase(d.trimmed(inputs), attributes, outputs, d.constants(1, 2), skipped=skipped, **tolerances(dtype))


@builds("BatchNormalization")
def batch_normalization(d: Draws, operator: Operator) -> NodeCase:
    """x [N, C, ...] with the statistics given, or in training mode those of x, which then are outputs too."""
    dtype = d.dtype(operator)
    shape = d.shape(2, 4, min_size=1)
    parameters: tuple[int, ...] = shape[1:2]
    attributes = epsilon(d)
    outputs = 1
    if operator.version == 7:
        spatial = d.choice([None, 0, 1])
        attributes |= {} if spatial is None else {"spatial": spatial}
        parameters = shape[1:] if spatial == 0 else parameters
    elif operator.version >= 14:
        training = d.boolean()
        attributes |= d.some(momentum=d.number(0.125, 0.875)) | ({"training_mode": 1} if training else d.some(training_mode=0))
        outputs = d.integer(1, 3) if training else 1
    scale_type = d.dtype(operator, "T1") if operator.version >= 15 and d.boolean() else dtype
    statistics_type = d.dtype(operator, "U" if operator.version == 14 else "T2") if operator.version >= 14 and d.boolean() else dtype
    inputs = [
        d.ordinary(dtype, shape),
        d.ordinary(scale_type, parameters),
        d.ordinary(scale_type, parameters),
        d.ordinary(statistics_type, parameters),
        d.positive(statistics_type, parameters),
    ]
    coarsest = min(dtype, scale_type, statistics_type, key=lambda each: (each.itemsize, each != ml_dtypes.bfloat16))
    return NodeCase(inputs, attributes, outputs, d.constants(1, 2, 3, 4), **tolerances(coarsest))


@builds("InstanceNormalization", "GroupNormalization")
def instance_normalization(d: Draws, operator: Operator) -> NodeCase:
    """x [N, C, ...]; scale and bias per channel."""
    dtype = d.dtype(operator)
    groups = d.integer(1, 3)
    grouped = operator.op == "GroupNormalization"
    channels = groups * d.integer(1, 2)
    x = d.ordinary(dtype, (d.integer(1, 2), channels, *d.shape(1, 3, min_size=2)))
    attributes = epsilon(d) | ({"num_groups": groups} | d.some(stash_type=1) if grouped else {})
    return NodeCase(
        [x, d.ordinary(dtype, (channels,)), d.ordinary(dtype, (channels,))], attributes, constants=d.constants(1, 2), **tolerances(dtype)
    )


@builds("LpNormalization")
def lp_normalization(d: Draws, operator: Operator) -> NodeCase:
    """By the sum of magnitudes, or by the length. Version 22 says that nothing but zeros stays so."""
    x = d.ordinary(d.dtype(operator), d.shape(1, min_size=1))
    if operator.version >= 22 and d.integer(0, 3) == 0:
        x = np.zeros_like(x)
    return NodeCase([x], d.some(axis=d.axis(x.ndim), p=d.integer(1, 2)), **tolerances(x.dtype))


@builds("LRN")
def local_response_normalization(d: Draws, operator: Operator) -> NodeCase:
    """Across neighbouring channels: x [N, C, H, W]."""
    x = d.ordinary(d.dtype(operator), d.shape(4, 4, min_size=1))
    attributes = d.some(alpha=d.number(0.0078125, 1), beta=d.number(0.25, 1), bias=d.number(0.5, 2))
    return NodeCase([x], attributes | {"size": d.choice([1, 3, 5])}, **tolerances(x.dtype))


@builds("MeanVarianceNormalization")
def mean_variance_normalization(d: Draws, operator: Operator) -> NodeCase:
    """Over batch and space, or over the axes named."""
    x = d.ordinary(d.dtype(operator), (*d.shape(3, 3, min_size=2), d.integer(2, 4)))
    return NodeCase([x], d.some(axes=d.axes(4, operator, 1) or [0]), **tolerances(x.dtype))
