"""8-bit integers: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear, MatMulInteger."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import dtype_from_onnx, type_string
from miniort_cuda.element_types import BYTES, FLOAT32, FLOATS
from miniort_cuda.namespace import CONTRIB, array_namespace

kernels = KernelTable("cuda")

EXACT_IN_FLOAT32 = 1 << 24
LARGEST_BYTE_PRODUCT = 255 * 255


def _along(parameter: Any, x: Any, axis: int) -> Any:
    """A scale or zero point of shape [] or [size of `axis`], in a shape that broadcasts to x's."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter.reshape((-1,) + (1,) * (x.ndim - axis % x.ndim - 1))


def _refuse_blocks(node: NodeView) -> str | None:
    if node.attribute("block_size", 0):
        return "its kernel has one scale per tensor or per element of an axis, not per block"
    target = node.attribute("output_dtype", 0)
    dtype = dtype_from_onnx(target) if target else None
    if dtype is not None and dtype not in BYTES | FLOATS:
        return f"its kernel doesn't give {type_string(dtype)}"
    return None


def _refuse_quotient(node: NodeView) -> str | None:
    """Since version 23 the quotient is rounded to the type of the scale, or to `precision`."""
    if node.attribute("precision", 0) or node.dtype(0) != node.dtype(1):
        return "its kernel divides numbers of one type, in float32"
    return _refuse_blocks(node)


@kernels.register("QuantizeLinear", (10, 22), types={"T1": FLOATS, "T2": BYTES}, refuse=_refuse_blocks)
@kernels.register("QuantizeLinear", (23, None), types={"T1": FLOATS, "T2": FLOATS, "T3": BYTES}, refuse=_refuse_quotient)
@kernels.register("QuantizeLinear", domain=CONTRIB, types={0: FLOATS, 2: BYTES}, refuse=_refuse_blocks)
def quantize_linear(node: NodeContext) -> Run:
    """round(x / scale) + zero point, ties to even, put into the range of 8 bits. x: [...]; scale, zero point: [] or [size of `axis`]."""
    xp, axis = array_namespace(node), node.attribute("axis", 1)
    target = node.attribute("output_dtype", 0)
    without = dtype_from_onnx(target) if target else np.dtype(np.uint8)

    def run(x: Any, scale: Any, zero_point: Any = None) -> Any:
        dtype = without if zero_point is None else zero_point.dtype
        y = xp.rint(x.astype(FLOAT32, copy=False) / _along(scale, x, axis).astype(FLOAT32, copy=False))
        if zero_point is not None:
            y = y + _along(zero_point, x, axis).astype(FLOAT32)
        limits = np.iinfo(dtype)
        return xp.clip(y, float(limits.min), float(limits.max)).astype(dtype)

    return run


@kernels.register("DequantizeLinear", (10, 18), types={"T": BYTES | {np.dtype(np.int32)}}, refuse=_refuse_blocks)
@kernels.register("DequantizeLinear", (19, None), types={"T1": BYTES | {np.dtype(np.int32)}, "T2": FLOATS}, refuse=_refuse_blocks)
@kernels.register("DequantizeLinear", domain=CONTRIB, types={0: BYTES | {np.dtype(np.int32)}}, refuse=_refuse_blocks)
def dequantize_linear(node: NodeContext) -> Run:
    """(x - zero point) · scale, in scale's type or in `output_dtype`. x: [...]; scale, zero point: [] or [size of `axis`]."""
    axis, target = node.attribute("axis", 1), node.attribute("output_dtype", 0)

    def run(x: Any, scale: Any, zero_point: Any = None) -> Any:
        wide = x.astype(FLOAT32)
        if zero_point is not None:
            wide = wide - _along(zero_point, x, axis).astype(FLOAT32)
        y = wide * _along(scale, x, axis).astype(FLOAT32, copy=False)
        return y.astype(dtype_from_onnx(target) if target else scale.dtype, copy=False)

    return run


@kernels.register("DynamicQuantizeLinear", (11, None))
def dynamic_quantize_linear(node: NodeContext) -> Run:
    """`x` in 8 bits over its own range, 0 included. x: [...] float32 -> [...] uint8; scale: [] float32; zero point: [] uint8."""
    xp = array_namespace(node)

    def run(x: Any) -> Any:
        low, high = (xp.minimum(x.min(), 0), xp.maximum(x.max(), 0)) if x.size else (xp.zeros((), FLOAT32), xp.zeros((), FLOAT32))
        scale = ((high - low) / 255).astype(FLOAT32, copy=False)
        steps = xp.where(scale == 0, xp.ones_like(scale), scale)
        point = xp.clip(xp.rint((0 - low) / steps), 0, 255)
        y = xp.clip(xp.rint(x / steps) + point, 0, 255)
        return y.astype(np.uint8), scale, point.astype(np.uint8)

    return run


def integer_product(xp: Any, a: Any, b: Any, a_zero_point: Any, b_zero_point: Any) -> Any:
    """(a - its zero point) · (b - its zero point), exactly. a: [..., M, K]; b: [..., K, N], 8 bits; zero points: [], [M] or [N] -> int32.

    Whole numbers are exact in float32 up to 2^24, which is enough for short sums, and in float64 up to 2^53.
    """
    dtype = FLOAT32 if a.shape[-1] * LARGEST_BYTE_PRODUCT <= EXACT_IN_FLOAT32 else np.dtype(np.float64)
    left, right = a.astype(dtype), b.astype(dtype)
    if a_zero_point is not None:
        point = a_zero_point.astype(dtype)
        left = left - (point.reshape((*point.shape, 1)) if point.ndim == 1 and point.size > 1 else point)
    if b_zero_point is not None:
        point = b_zero_point.astype(dtype)
        right = right - (xp.expand_dims(point, -2) if point.ndim > 1 and point.shape[-2] != 1 else point)
    return xp.matmul(left, right).astype(np.int32)


@kernels.register("MatMulInteger", (10, None), types={"T1": BYTES, "T2": BYTES})
def matmul_integer(node: NodeContext) -> Run:
    """Product of 8-bit matrices less their zero points. a: [..., M, K]; b: [..., K, N] -> [..., M, N] int32."""
    xp = array_namespace(node)
    return lambda a, b, a_zero_point=None, b_zero_point=None: integer_product(xp, a, b, a_zero_point, b_zero_point)
