"""Quantization to few bits and back: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType, dtype_from_onnx
from miniort_cpu.axes import normalize_axis
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import FLOAT32, FLOAT64, NARROW_FLOATS, as_dtype, compute_dtype
from miniort_cpu.kernels.cast import convert

kernels = KernelTable("cpu")

UINT8 = np.dtype(np.uint8)
FLOAT8_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def integer_range(dtype: DType) -> tuple[int, int] | None:
    """The smallest and the largest number of an integer type, also of those that NumPy lacks; None for any other type."""
    if dtype.kind not in "iu" and not (dtype.kind == "V" and "int" in dtype.name):
        return None
    limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return int(limits.min), int(limits.max)


def quantize(
    allocate: Allocate,
    x: Array,
    scale: Array,
    zero_point: Array | None,
    dtype: DType,
    precision: DType | None = None,
    saturate: bool = True,
) -> Array:
    """round(x / scale) + zero_point, to the nearest, ties to even, then put into the range of `dtype`.

    x: [...]; scale, zero_point: broadcast to it -> x's shape. `precision` is the type that the quotient is rounded to, scale's own by
    default. NaN becomes the smallest integer.
    """
    return saturated(allocate, _quotient(allocate, x, scale, precision or scale.dtype), zero_point, dtype, saturate)


def saturated(allocate: Allocate, quotient: Array, zero_point: Array | None, dtype: DType, saturate: bool = True) -> Array:
    """What is left to do after the division: rounded, moved by the zero point, and put into the range of `dtype`.

    quotient: [...] float32 or float64, which is written into; zero_point: broadcasts to it -> same shape
    """
    limits = integer_range(dtype)
    if limits is None:
        if zero_point is not None and np.any(zero_point):
            np.add(quotient, zero_point.astype(quotient.dtype), out=quotient)
        return convert(quotient, dtype, saturate, "up", allocate)
    np.rint(quotient, out=quotient)
    if zero_point is not None:
        np.add(quotient, as_dtype(zero_point, quotient.dtype), out=quotient)
    low, high = limits
    np.fmax(quotient, low, out=quotient)  # fmax and not maximum, for NaN has no integer of its own
    np.minimum(quotient, high, out=quotient)
    out = allocate(quotient.shape, dtype)
    np.copyto(out, quotient, casting="unsafe")
    return out


def _quotient(allocate: Allocate, x: Array, scale: Array, precision: DType) -> Array:
    """`x` / scale in a new array of float32 (or float64 for integers by integers), rounded once more where `precision` is narrower."""
    if precision == FLOAT8_E8M0:  # powers of two divide without rounding, so the result keeps all that x has
        precision = FLOAT32
    wide = FLOAT64 if precision.kind in "iu" else compute_dtype(precision)
    out = allocate(x.shape, wide)
    if precision not in NARROW_FLOATS:
        return np.divide(as_dtype(x, wide), as_dtype(scale, wide), out=out)
    np.divide(as_dtype(as_dtype(x, precision), wide), as_dtype(as_dtype(scale, precision), wide), out=out)
    np.copyto(out, out.astype(precision))
    return out


def dequantize(allocate: Allocate, x: Array, scale: Array, zero_point: Array | None, dtype: DType) -> Array:
    """(x - zero_point) · scale, computed in float32 and rounded once. x: [...]; scale, zero_point: broadcast to it -> x's shape."""
    y = allocate(x.shape, FLOAT32)
    if x.dtype.kind in "iu" and x.dtype.itemsize >= 4 and zero_point is not None:
        np.copyto(y, np.subtract(x, zero_point, dtype=np.int64))  # large integers aren't exact in float32, their difference may be
    else:
        np.copyto(y, x, casting="unsafe")
        if zero_point is not None:
            np.subtract(y, as_dtype(zero_point, FLOAT32), out=y)
    np.multiply(y, as_dtype(scale, FLOAT32), out=y)
    return as_dtype(y, dtype)


def along(parameter: Array, x: Array, axis: int, block_size: int) -> Array:
    """A scale or zero point in a shape that broadcasts to x's.

    parameter: [] for all of x; [N] along `axis`, N its size; or x's shape with ⌈N / block_size⌉ for N, each for one block of the axis.
    """
    if parameter.ndim == 0 or parameter.size == 1:
        return parameter.reshape(())
    axis = normalize_axis(axis, x.ndim)
    if parameter.ndim == 1 and not block_size:
        return parameter.reshape((-1,) + (1,) * (x.ndim - axis - 1))
    length = x.shape[axis]
    block_size = block_size or -(-length // parameter.shape[axis])
    return parameter.repeat(block_size, axis)[(slice(None),) * axis + (slice(length),)]


@kernels.register("QuantizeLinear", versions=(10, None))
@kernels.register("QuantizeLinear", domain="com.microsoft")
def quantize_linear(node: NodeContext) -> Run:
    """saturate(round(x / scale) + zero_point), in the zero point's type, in `output_dtype`, or in uint8.

    x: [...]; scale, zero_point: [], [size of `axis`], or x's shape with one element per block of the axis -> x's shape
    """
    axis, block_size = node.attribute("axis", 1), node.attribute("block_size", 0)
    target, precision = node.attribute("output_dtype", 0), node.attribute("precision", 0)
    saturate = bool(node.attribute("saturate", 1))
    dtype = dtype_from_onnx(target) if target else UINT8
    rounded = dtype_from_onnx(precision) if precision else None
    allocate = node.provider.allocate

    def run(x: Array, scale: Array, zero_point: Array | None = None) -> Array:
        steps = along(scale, x, axis, block_size)
        if zero_point is None:
            return quantize(allocate, x, steps, None, dtype, rounded, saturate)
        return quantize(allocate, x, steps, along(zero_point, x, axis, block_size), zero_point.dtype, rounded, saturate)

    return run


@kernels.register("DequantizeLinear", versions=(10, None))
@kernels.register("DequantizeLinear", domain="com.microsoft")
def dequantize_linear(node: NodeContext) -> Run:
    """(x - zero_point) · scale, in scale's type or in `output_dtype`.

    x: [...]; scale, zero_point: [], [size of `axis`], or x's shape with one element per block of the axis -> x's shape
    """
    axis, block_size, target = node.attribute("axis", 1), node.attribute("block_size", 0), node.attribute("output_dtype", 0)
    dtype = dtype_from_onnx(target) if target else None
    allocate = node.provider.allocate

    def run(x: Array, scale: Array, zero_point: Array | None = None) -> Array:
        if dtype is None and scale.dtype == FLOAT8_E8M0:
            raise KernelError(f"node {node.name!r} (DequantizeLinear): a scale of type float8e8m0 needs the attribute output_dtype")
        shift = None if zero_point is None else along(zero_point, x, axis, block_size)
        return dequantize(allocate, x, along(scale, x, axis, block_size), shift, dtype or scale.dtype)

    return run


def dynamic_scale(x: Array) -> tuple[Array, Array]:
    """The scale and the zero point that spread x's values, and 0, over all of uint8. x: [...] float32 -> [] float32, [] uint8.

    The specification's formula divides 0 by 0 where x has no value but 0 (or none at all); the scale is 1 then, as in onnxruntime.
    """
    low, high = np.minimum.reduce(x, None, initial=0), np.maximum.reduce(x, None, initial=0)
    scale = np.float32(1) if high == low else np.float32(high - low) / np.float32(255)
    place = float(-low / scale)
    zero_point = round(min(place, 255.0)) if place > 0 else 0  # to even, as numpy.rint; 0 for NaN
    return np.array(scale, np.float32), np.array(zero_point, np.uint8)


BLOCK = 64 * 1024
"""Elements that are quantized at a time, so that all steps but the first find them in the cache."""


def quantize_by_range(allocate: Allocate, x: Array, scale: Array, zero_point: Array) -> Array:
    """`x` in uint8 with its own `dynamic_scale`. x: [...] float32; scale, zero_point: [] -> same shape.

    Of finite numbers none comes out below 0, as the smallest and the zero point are rounded alike, but the largest may be 256.
    """
    if not np.isfinite(scale) or not x.flags.c_contiguous:
        return quantize(allocate, x, scale, zero_point, UINT8)
    y = allocate(x.shape, UINT8)
    flat_x, flat_y, shift = x.reshape(-1), y.reshape(-1), zero_point.astype(FLOAT32)
    space = np.empty(min(x.size, BLOCK), FLOAT32)
    for start in range(0, x.size, BLOCK):
        block = flat_x[start : start + BLOCK]
        quotient = space[: len(block)]
        np.divide(block, scale, out=quotient)
        np.rint(quotient, out=quotient)
        np.add(quotient, shift, out=quotient)
        np.minimum(quotient, 255, out=quotient)
        np.copyto(flat_y[start : start + BLOCK], quotient, casting="unsafe")
    return y


@kernels.register("DynamicQuantizeLinear", versions=(11, None))
def dynamic_quantize_linear(node: NodeContext) -> Run:
    """`x` in uint8, with the scale and the zero point that its own range gives. x: [...] float32 -> same shape, [] float32, [] uint8."""
    allocate = node.provider.allocate

    def run(x: Array) -> tuple[Array, Array, Array]:
        scale, zero_point = dynamic_scale(x)
        return quantize_by_range(allocate, x, scale, zero_point), scale, zero_point

    return run
