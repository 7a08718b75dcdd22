"""Builders of quantisation, and of products of quantised matrices."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse, is_float
from miniort.testing.operators.convolution import scales
from miniort.types import Array, DType, dtype_to_onnx

FLOAT32 = np.dtype(np.float32)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def parameter_shape(d: Draws, operator: Operator, shape: tuple[int, ...]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The shape of scale and zero point for a tensor: of all of it, along an axis from version 13 on, in blocks of one from 21 on."""
    kinds = ["tensor"] + ["axis"] * (operator.version >= 13 and len(shape) > 1) + ["block"] * (operator.version >= 21 and len(shape) > 1)
    kind = d.choice(kinds)
    if kind == "tensor":
        return {}, ()
    axis = d.integer(0, len(shape) - 1)
    attributes = {"axis": axis - len(shape) if d.boolean() else axis} if axis != 1 or d.boolean() else {}
    if kind == "axis":
        return attributes, (shape[axis],)
    size = d.integer(1, max(1, shape[axis]))
    return attributes | {"block_size": size}, (*shape[:axis], -(-shape[axis] // size), *shape[axis + 1 :])


def zero_points(d: Draws, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Of any number for integers; 0 for floats and int32, as their specification has it."""
    if is_float(dtype) or dtype == np.int32:
        return np.zeros(shape, dtype)
    return d.array(dtype, shape, special=False)


@builds("QuantizeLinear")
def quantize_linear(d: Draws, operator: Operator) -> NodeCase:
    """To integers of any width and floats of 8 bits and fewer, out of range too; one off at most where scales aren't powers of two."""
    scale_type, target_type = {10: ("", "T2"), 13: ("", "T2"), 19: ("T1", "T2"), 21: ("T1", "T2")}.get(operator.version, ("T2", "T3"))
    source, target = d.dtype(operator, "T1"), d.dtype(operator, target_type)
    shape = d.shape(0, 3)
    attributes, parameters = parameter_shape(d, operator, shape)
    exact = is_float(target) or d.boolean()
    scale_dtype = FLOAT32 if not scale_type else source if scale_type == "T1" else d.dtype(operator, scale_type)
    scale = d.rng().integers(1, 4, parameters).astype(np.int32) if scale_dtype == np.int32 else scales(d, parameters, scale_dtype, exact)
    most = 40 if exact else 12
    x = d.array(source, shape, -most, most, special=False)
    if source != np.int32 and d.boolean():
        x = (np.rint(x.astype(np.float64) * 4) / 4).astype(source)
    zero = zero_points(d, target, parameters) if target != np.uint8 or d.boolean() else None
    if operator.has_attribute("output_dtype") and d.boolean():
        attributes["output_dtype"] = dtype_to_onnx(target)
        zero = zero if d.boolean() else None
    if operator.has_attribute("saturate") and is_float(target):
        attributes |= d.some(saturate=d.integer(0, 1))
    if operator.has_attribute("precision") and d.integer(0, 2) == 0:
        attributes["precision"] = dtype_to_onnx(d.choice([FLOAT32, np.dtype(np.float16)]))
    inputs = d.trimmed([x, scale, zero])
    return NodeCase(inputs, attributes, constants=d.constants(*range(1, len(inputs))), atol=None if exact else 1)


@builds("DequantizeLinear")
def dequantize_linear(d: Draws, operator: Operator) -> NodeCase:
    """From integers of any width and floats of 8 bits and fewer."""
    source = d.dtype(operator, "T" if operator.version < 19 else "T1")
    scale_dtype = FLOAT32 if operator.version < 19 else d.dtype(operator, "T2")
    shape = d.shape(0, 3)
    attributes, parameters = parameter_shape(d, operator, shape)
    x = np.abs(d.array(source, shape)) if source == E8M0 else d.array(source, shape)
    scale = scales(d, parameters, scale_dtype, exact=scale_dtype == E8M0)
    zero = zero_points(d, source, parameters) if source != np.int32 and d.boolean() else None
    if operator.has_attribute("output_dtype") and (scale_dtype == E8M0 or d.boolean()):
        attributes["output_dtype"] = dtype_to_onnx(d.dtype(operator, "T3"))
    inputs = d.trimmed([x, scale, zero])
    return NodeCase(inputs, attributes, constants=d.constants(*range(1, len(inputs))))


@builds("DynamicQuantizeLinear")
def dynamic_quantize_linear(d: Draws, operator: Operator) -> NodeCase:
    """To uint8 over the range that is there, which may lie on one side of 0."""
    low, high = d.choice([(-4, 4), (1, 5), (-5, -1), (-127, 128)])
    x = d.ordinary(d.dtype(operator, "T1"), d.shape(min_size=1), low, high)
    return NodeCase([x], outputs=3, atol=1 if d.boolean() else None)


def matrix_shapes(d: Draws) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of two matrices, or stacks of them, that can be multiplied."""
    m, k, n = d.integer(1, 4), d.integer(1, 5), d.integer(1, 4)
    stack = d.shape(0, 2)
    a, b = (*stack, m, k), (*d.broadcasting(stack), k, n)
    return a, b


@builds("MatMulInteger")
def mat_mul_integer(d: Draws, operator: Operator) -> NodeCase:
    """8 bits to 32; zero points as scalars, and of b per column."""
    a_shape, b_shape = matrix_shapes(d)
    a, b = d.array(d.dtype(operator, "T1"), a_shape), d.array(d.dtype(operator, "T2"), b_shape)
    a_zero = d.array(a.dtype, ()) if d.boolean() else None
    b_zero = d.array(b.dtype, d.choice([(), b_shape[-1:]])) if d.boolean() else None
    inputs = d.trimmed([a, b, a_zero, b_zero])
    return NodeCase(inputs, constants=d.constants(1, len(inputs) - 1))


@builds("QLinearMatMul")
def qlinear_mat_mul(d: Draws, operator: Operator) -> NodeCase:
    """8 bits to 8 bits, scale and zero point of b also per column. Results may be one off where scales aren't powers of two."""
    a_shape, b_shape = matrix_shapes(d)
    a_type, b_type, y_type = (d.dtype(operator, name) for name in ("T1", "T2", "T3"))
    scale_dtype = FLOAT32 if operator.version < 21 else d.dtype(operator, "TS")
    exact = is_float(y_type) or is_coarse(scale_dtype) or d.boolean()
    parameters: tuple[int, ...] = d.choice([(), b_shape[-1:]])
    a = d.rng().integers(-2, 3, a_shape).astype(a_type) if is_float(a_type) else d.array(a_type, a_shape)
    b = d.rng().integers(-2, 3, b_shape).astype(b_type) if is_float(b_type) else d.array(b_type, b_shape)
    inputs = [
        a,
        scales(d, (), scale_dtype, exact),
        zero_points(d, a_type, ()),
        b,
        scales(d, parameters, scale_dtype, exact),
        zero_points(d, b_type, parameters),
        scales(d, (), scale_dtype, exact),
        zero_points(d, y_type, ()),
    ]
    constants = frozenset(range(1, 8)) if d.boolean() else d.constants(3)
    return NodeCase(inputs, constants=constants, atol=None if exact else 1, expected=lambda inputs: [qlinear_formula(*inputs)])


def qlinear_formula(
    a: Array, a_scale: Array, a_zero: Array, b: Array, b_scale: Array, b_zero: Array, y_scale: Array, y_zero: Array
) -> Array:
    """round((a - a_zero) · a_scale × (b - b_zero) · b_scale / y_scale) + y_zero, within the range of y's type."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, zero = (
        each.astype(np.float64) for each in (a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero)
    )
    quotient = ((a - a_zero) * a_scale) @ ((b - b_zero) * b_scale) / y_scale
    if is_float(y_zero.dtype):
        most = float(ml_dtypes.finfo(y_zero.dtype).max)  # type: ignore[no-untyped-call]
        return quotient.clip(-most, most).astype(y_zero.dtype)
    limits = np.iinfo(y_zero.dtype)
    return (np.rint(quotient) + zero).clip(limits.min, limits.max).astype(y_zero.dtype)
