"""Ops of com.microsoft from 8-bit integers to 8-bit integers: QLinearAdd and its kin.

A function of one quantized number has 256 values: it's computed for those, and looked up for each element.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.types import Array, DType
from miniort_cpu.axes import normalize_axis
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import FLOAT32
from miniort_cpu.kernels.contrib_activation import CONTRIB
from miniort_cpu.kernels.quantization import dequantize, quantize
from miniort_cpu.kernels.softmax import softmax

kernels = KernelTable("cpu")

BYTES = np.arange(256, dtype=np.uint8)


def dequantized_bytes(dtype: DType, scale: Array, zero_point: Array | None) -> Array:
    """What each of the 256 bit patterns of an 8-bit integer type stands for. -> [256] float32."""
    return dequantize(np.empty, BYTES.view(dtype), scale.reshape(()), _scalar(zero_point), FLOAT32)


def _scalar(x: Array | None) -> Array | None:
    return None if x is None else x.reshape(())


def _looked_up(table: Array, x: Array) -> Array:
    """table[bits of x]. table: [256], x: [...], both of 8 bits -> x's shape.

    Python's bytes do that without making an index of 8 bytes from each of one, as NumPy has to.
    """
    found = bytearray(x.tobytes()).translate(table.tobytes())
    return np.frombuffer(found, table.dtype).reshape(x.shape)


def _quantized_like(x: Array, y: Array, scale: Array, zero_point: Array | None, allocate: Allocate) -> Array:
    """`y` quantized to the type of its zero point, or to x's where that's absent."""
    return quantize(allocate, y, scale.reshape(()), _scalar(zero_point), x.dtype if zero_point is None else zero_point.dtype)


def _of_one(function: Callable[[NodeContext], Callable[[Array], Array]]) -> CompileKernel:
    """A kernel for quantize(f(dequantize(x))). x: [...]; scales, zero points: [] -> x's shape."""

    def compile_of_one(node: NodeContext) -> Run:
        compute = function(node)

        def run(x: Array, x_scale: Array, x_zero_point: Array | None, y_scale: Array, y_zero_point: Array | None = None) -> Array:
            values = compute(dequantized_bytes(x.dtype, x_scale, x_zero_point))
            return _looked_up(_quantized_like(x, values, y_scale, y_zero_point, np.empty), x)

        return run

    return compile_of_one


def _sigmoid(node: NodeContext) -> Callable[[Array], Array]:
    return lambda x: 1 / (1 + np.exp(-x))


def _leaky_relu(node: NodeContext) -> Callable[[Array], Array]:
    alpha = np.float32(node.attribute("alpha", 0.01))
    return lambda x: np.where(x < 0, alpha * x, x)


kernels.register("QLinearSigmoid", domain=CONTRIB)(_of_one(_sigmoid))
kernels.register("QLinearLeakyRelu", domain=CONTRIB)(_of_one(_leaky_relu))


def _of_two(ufunc: Callable[..., Array]) -> CompileKernel:
    """A kernel for quantize(f(dequantize(a), dequantize(b))). a, b: any shapes that broadcast -> their common shape."""

    def compile_of_two(node: NodeContext) -> Run:
        allocate = node.provider.allocate

        def run(
            a: Array,
            a_scale: Array,
            a_zero_point: Array | None,
            b: Array,
            b_scale: Array,
            b_zero_point: Array | None,
            y_scale: Array,
            y_zero_point: Array | None = None,
        ) -> Array:
            left = dequantize(allocate, a, a_scale.reshape(()), _scalar(a_zero_point), FLOAT32)
            right = dequantize(allocate, b, b_scale.reshape(()), _scalar(b_zero_point), FLOAT32)
            shape = np.broadcast_shapes(a.shape, b.shape)
            y = ufunc(left, right, out=left if shape == a.shape else allocate(shape, FLOAT32))
            return _quantized_like(a, y, y_scale, y_zero_point, allocate)

        return run

    return compile_of_two


kernels.register("QLinearAdd", domain=CONTRIB)(_of_two(np.add))
kernels.register("QLinearMul", domain=CONTRIB)(_of_two(np.multiply))


@kernels.register("QLinearConcat", domain=CONTRIB)
def quantized_concat(node: NodeContext) -> Run:
    """Inputs one after the other, each brought to one scale. y_scale, y_zero_point: []; then for each its array, scale and zero point."""
    axis = node.attribute("axis")
    allocate = node.provider.allocate

    def run(y_scale: Array, y_zero_point: Array, *inputs: Array) -> Array:
        xs = inputs[0::3]
        along = normalize_axis(axis, xs[0].ndim)
        shape = list(xs[0].shape)
        shape[along] = sum(x.shape[along] for x in xs)
        out: Array = allocate(shape, y_zero_point.dtype)
        start = 0
        for x, scale, zero_point in zip(xs, inputs[1::3], inputs[2::3], strict=True):
            table = _quantized_like(x, dequantized_bytes(x.dtype, scale, zero_point), y_scale, y_zero_point, np.empty)
            end = start + x.shape[along]
            out[(slice(None),) * along + (slice(start, end),)] = _looked_up(table, x)
            start = end
        return out

    return run


@kernels.register("QLinearWhere", domain=CONTRIB)
def quantized_where(node: NodeContext) -> Run:
    """`x` where the condition holds, else y, both brought to one scale. All three of any shapes that broadcast -> their common shape."""

    def run(
        condition: Array,
        x: Array,
        x_scale: Array,
        x_zero_point: Array,
        y: Array,
        y_scale: Array,
        y_zero_point: Array,
        z_scale: Array,
        z_zero_point: Array,
    ) -> Array:
        chosen = []
        for each, scale, zero_point in ((x, x_scale, x_zero_point), (y, y_scale, y_zero_point)):
            table = _quantized_like(each, dequantized_bytes(each.dtype, scale, zero_point), z_scale, z_zero_point, np.empty)
            chosen.append(_looked_up(table, each))
        return np.where(condition, chosen[0], chosen[1])

    return run


@kernels.register("QLinearSoftmax", domain=CONTRIB)
def quantized_softmax(node: NodeContext) -> Run:
    """Softmax along an axis, or, as it was before opset 13, over all axes from there on. x: [...]; scales, zero points: [] -> x's shape."""
    axis, one_axis = node.attribute("axis", -1), node.attribute("opset") >= 13
    allocate = node.provider.allocate

    def run(x: Array, x_scale: Array, x_zero_point: Array | None, y_scale: Array, y_zero_point: Array | None = None) -> Array:
        first = normalize_axis(axis, x.ndim)
        axes = (first,) if one_axis else tuple(range(first, x.ndim))
        values = dequantize(allocate, x, x_scale.reshape(()), _scalar(x_zero_point), FLOAT32)
        y = softmax(allocate, values, axes) if x.size else values
        return _quantized_like(x, y, y_scale, y_zero_point, allocate)

    return run


@kernels.register("QLinearGlobalAveragePool", domain=CONTRIB)
def quantized_global_average_pool(node: NodeContext) -> Run:
    """The mean of each channel. x: [batch, C, spatial...], or [batch, spatial..., C] if channels_last -> its spatial axes of size 1."""
    channels_last = bool(node.attribute("channels_last", 0))
    allocate = node.provider.allocate

    def run(x: Array, x_scale: Array, x_zero_point: Array | None, y_scale: Array, y_zero_point: Array | None = None) -> Array:
        spatial = tuple(range(1, x.ndim - 1) if channels_last else range(2, x.ndim))
        return _mean(allocate, x, spatial, True, x_scale, x_zero_point, y_scale, y_zero_point)

    return run


@kernels.register("QLinearReduceMean", domain=CONTRIB)
def quantized_mean(node: NodeContext) -> Run:
    """The mean over some axes, all of them by default. x: [...] -> without them, or with size 1 if keepdims."""
    axes, keep = node.attribute("axes", None), bool(node.attribute("keepdims", 1))
    allocate = node.provider.allocate

    def run(x: Array, x_scale: Array, x_zero_point: Array | None, y_scale: Array, y_zero_point: Array | None = None) -> Array:
        over = tuple(range(x.ndim)) if axes is None else tuple(normalize_axis(axis, x.ndim) for axis in axes)
        return _mean(allocate, x, over, keep, x_scale, x_zero_point, y_scale, y_zero_point)

    return run


def _mean(
    allocate: Allocate,
    x: Array,
    axes: tuple[int, ...],
    keep: bool,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None,
) -> Array:
    """The mean over some axes, requantized. The sums are whole numbers, so they are exact."""
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    total = x.sum(axes, np.int64, keepdims=keep)
    if x_zero_point is not None:
        total = total - count * int(x_zero_point.reshape(-1)[0])
    mean = np.multiply(total, np.float64(x_scale.reshape(-1)[0]) / count, out=...).astype(FLOAT32)
    return _quantized_like(x, mean, y_scale, y_zero_point, allocate)
