"""Builders of Fourier transforms, window functions and mel filters."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse, is_float
from miniort.types import dtype_from_onnx, dtype_to_onnx


@builds("DFT")
def dft(d: Draws, operator: Operator) -> NodeCase:
    """Real or complex [..., 1 or 2], padded or cut to a length, one-sided in either direction."""
    dtype = d.dtype(operator, "T1")
    kind = d.choice(
        ["forward", "inverse", "onesided", "onesided inverse"] if operator.version >= 20 else ["forward", "inverse", "onesided"]
    )
    complex_input = kind == "onesided inverse" or (kind != "onesided" and d.boolean())
    shape = (*d.shape(2, 3, min_size=2, max_size=5), 2 if complex_input else 1)
    axis = d.integer(0, len(shape) - 2)
    attributes: dict[str, Any] = {name: 1 for name in ("onesided", "inverse") if name in kind}
    length = np.array(d.integer(2, 7), d.dtype(operator, "T2")) if d.boolean() else None
    written = axis - len(shape) if operator.version >= 20 and d.boolean() else axis
    tolerance: dict[str, Any] = {"tolerance": 0.05, "atol": 0.25} if is_coarse(dtype) else {"atol": 1e-4}
    x = d.ordinary(dtype, shape)
    if operator.has_attribute("axis"):
        if axis != 1 or d.boolean():
            attributes["axis"] = written
        return NodeCase(d.trimmed([x, length]), attributes, constants=d.constants(1) if length is not None else frozenset(), **tolerance)
    given = np.array(written, np.int64) if axis != len(shape) - 2 or d.boolean() else None
    inputs = [x, length] if given is None else [x, length, given]
    inputs = d.trimmed(inputs)
    constants = frozenset([1, 2]) if d.boolean() else d.constants(2)
    return NodeCase(inputs, attributes, constants=constants & frozenset(range(len(inputs))), **tolerance)


@builds("STFT")
def stft(d: Draws, operator: Operator) -> NodeCase:
    """Frames of a signal [batch, length, 1 or 2], with a window, a length, or both."""
    dtype, index = d.dtype(operator, "T1"), d.dtype(operator, "T2")
    signal_length, length = d.integer(8, 12), d.integer(2, 8)
    kind = d.choice(["window", "length", "both"])
    complex_input = d.integer(0, 2) == 0
    onesided = d.some(onesided=d.integer(0, 1))
    if complex_input:
        onesided = {"onesided": 0}
    inputs = [
        d.ordinary(dtype, (d.integer(1, 2), signal_length, 2 if complex_input else 1)),
        np.array(d.integer(1, 4), index),
        d.positive(dtype, (length,), 0.1, 1) if kind != "length" else None,
        np.array(length, index) if kind != "window" else None,
    ]
    tolerance: dict[str, Any] = {"tolerance": 0.05, "atol": 0.25} if is_coarse(dtype) else {"atol": 1e-4}
    inputs = d.trimmed(inputs)
    return NodeCase(inputs, onesided, constants=d.constants(1, len(inputs) - 1), **tolerance)


@builds("HannWindow", "HammingWindow", "BlackmanWindow")
def window_function(d: Draws, operator: Operator) -> NodeCase:
    """Periodic or symmetric, of any type."""
    size = np.array(d.integer(2, 12), d.dtype(operator, "T1"))
    target = d.dtype(operator, "T2")
    attributes = d.some(periodic=d.integer(0, 1), output_datatype=dtype_to_onnx(target))
    coarse = is_coarse(dtype_from_onnx(attributes.get("output_datatype", 1)))
    return NodeCase([size], attributes, constants=d.constants(0), atol=0.01 if coarse else 1e-5 if is_float(target) else None)


@builds("MelWeightMatrix")
def mel_weight_matrix(d: Draws, operator: Operator) -> NodeCase:
    """Triangles on the mel scale, between two frequencies."""
    whole, edge = d.dtype(operator, "T1"), d.dtype(operator, "T2")
    target = d.dtype(operator, "T3")
    rate = 8192
    numbers = [np.array(number, whole) for number in (d.integer(1, 8), d.choice([8, 16, 17]), rate)]
    edges = [np.asarray(hertz).astype(edge) for hertz in (d.choice([0.0, 128.0]), d.choice([2048.0, 4096.0]))]
    attributes = d.some(output_datatype=dtype_to_onnx(target))
    coarse = is_coarse(dtype_from_onnx(attributes.get("output_datatype", 1)))
    return NodeCase(
        [*numbers, *edges], attributes, constants=d.constants(0, 1, 2, 3, 4), atol=0.01 if coarse else 1e-5 if is_float(target) else None
    )
