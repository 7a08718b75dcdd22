"""Builders of ops that draw at random: their shapes and types are compared, and values where no chance is left."""

from __future__ import annotations

import numpy as np
import onnx

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds
from miniort.types import STRING, dtype_from_onnx, dtype_to_onnx


@builds("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike")
def random_tensor(d: Draws, operator: Operator) -> NodeCase:
    """Of a shape that is given, or that of the input."""
    numbers = (
        {"mean": d.number(-2, 2), "scale": d.number(0.5, 2)}
        if "Normal" in operator.op
        else {"low": d.number(-2, 0), "high": d.number(0.5, 2)}
    )
    result = operator.schema.outputs[0].type_str
    attributes = d.some(seed=d.number(0, 9), dtype=dtype_to_onnx(d.dtype(operator, result)), **numbers)
    if not operator.op.endswith("Like"):
        return NodeCase([], attributes | {"shape": list(d.shape())}, shapes_only=True)
    source = d.dtype(operator, "T1")
    if source not in operator.dtypes(result):
        attributes["dtype"] = dtype_to_onnx(d.dtype(operator, result))
    return NodeCase([d.array(source, d.shape())], attributes, shapes_only=True)


@builds("Bernoulli")
def bernoulli(d: Draws, operator: Operator) -> NodeCase:
    """Chances between 0 and 1, or only these two, which leave no choice."""
    dtype, shape = d.dtype(operator, "T1"), d.shape()
    certain = d.boolean()
    chances = d.rng().integers(0, 2, shape).astype(dtype) if certain else d.ordinary(dtype, shape, 0, 1)
    target = dtype_to_onnx(d.dtype(operator, "T2", without=[STRING]))
    return NodeCase([chances], d.some(seed=d.number(0, 9), dtype=target), shapes_only=not certain)


@builds("Multinomial")
def multinomial(d: Draws, operator: Operator) -> NodeCase:
    """Classes by unnormalised log-probabilities: input [batch, classes]."""
    scores = d.ordinary(d.dtype(operator, "T1"), d.shape(2, 2, min_size=1))
    certain = d.boolean()
    if certain:
        scores = np.where(np.arange(scores.shape[1]) == 0, 0, -1e4).astype(scores.dtype) + np.zeros_like(scores[:, :1])
    attributes = d.some(sample_size=d.integer(1, 5), seed=d.number(0, 9), dtype=dtype_to_onnx(d.dtype(operator, "T2")))
    target = dtype_from_onnx(attributes.get("dtype", onnx.TensorProto.INT32))
    first_class = np.zeros((len(scores), attributes.get("sample_size", 1)), target)
    return NodeCase([scores], attributes, shapes_only=not certain, expected=lambda inputs: [first_class])
