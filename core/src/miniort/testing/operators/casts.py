"""Builders of casts from one element type to another."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_float
from miniort.types import STRING, Array, DType, dtype_to_onnx

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def castable(d: Draws, source: DType, target: DType) -> Array:
    """Numbers whose cast is defined: in range for integers, literals for text, none below 0 for exponents (E8M0)."""
    shape = d.shape()
    if source == STRING:
        words = ["0", "1", "-1", "12"] if not is_float(target) else ["0", "1.5", "-2.25", "1e2", "INF", "-inf", "NaN", "+INF"]
        if target.kind == "u" or target.name.startswith("uint") or target in (E8M0, np.dtype(bool)):
            words = ["0", "1", "3"]
        return np.asarray(np.array(words, object)[d.rng().integers(0, len(words), shape)], object)
    if target == STRING and is_float(source):
        return np.asarray(d.rng().integers(-9, 9, shape) + 0.5).astype(source)
    if E8M0 in (source, target):
        return d.array(source, shape, low=0.3, high=3)
    if is_float(source) and not is_float(target) and target.kind != "b":
        return d.array(source, shape, low=0 if "uint" in target.name else -2, high=1)
    return d.array(source, shape)


@builds("Cast", "CastLike")
def cast(d: Draws, operator: Operator) -> NodeCase:
    """To any type from any."""
    source, target = d.dtype(operator, "T1"), d.dtype(operator, "T2")
    if source.kind == "b" and target == STRING:
        source = np.dtype(np.int32)  # no text says how truth is spelt
    x = castable(d, source, target)
    attributes: dict[str, Any] = {}
    if operator.has_attribute("saturate"):
        attributes |= d.some(saturate=d.integer(0, 1))
    if operator.has_attribute("round_mode"):
        attributes |= d.some(round_mode=d.choice(["up", "down", "nearest"]))
    if operator.op == "CastLike":
        return NodeCase([x, d.array(target, d.shape(), 0, 1)], attributes)
    return NodeCase([x], attributes | {"to": dtype_to_onnx(target)}, constants=d.constants(0))


def bits(dtype: DType) -> int:
    """Bits of one element; ml_dtypes keeps those of less than 8 in a byte."""
    if is_float(dtype):
        return int(ml_dtypes.finfo(dtype).bits)  # type: ignore[no-untyped-call]
    return dtype.itemsize * 8 if dtype.kind in "biuc" else int(ml_dtypes.iinfo(dtype).bits)  # type: ignore[no-untyped-call]


@builds("BitCast")
def bit_cast(d: Draws, operator: Operator) -> NodeCase:
    """To a type of as many bits."""
    source = d.dtype(operator, "T1")
    target = d.choice(
        [dtype for dtype in operator.dtypes("T2") if bits(dtype) == bits(source) and (dtype.kind == "b") <= (source.kind == "b")]
    )
    return NodeCase([d.array(source, d.shape())], {"to": dtype_to_onnx(target)})
