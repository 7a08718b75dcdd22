"""Pooling of com.microsoft on 8-bit integers: NhwcMaxPool, QLinearAveragePool."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT32
from miniort_cpu.kernels.contrib_activation import CONTRIB
from miniort_cpu.kernels.pooling import average_pool, max_pool
from miniort_cpu.kernels.quantization import dequantize, quantize

kernels = KernelTable("cpu")


@kernels.register("NhwcMaxPool", domain=CONTRIB)
def nhwc_max_pool(node: NodeContext) -> Run:
    """MaxPool with channels last. x: [N, *sizes, C] -> [N, *counts, C]."""
    pooled = max_pool(node)

    def run(x: Array) -> Array:
        return np.ascontiguousarray(np.moveaxis(pooled(np.moveaxis(x, -1, 1)), 1, -1))

    return run


@kernels.register("QLinearAveragePool", domain=CONTRIB)
def quantized_average_pool(node: NodeContext) -> Run:
    """AveragePool of what x stands for, quantized. x: [N, C, *sizes] -> [N, C, *counts]; with channels_last C is the last axis of both."""
    channels_last = bool(node.attribute("channels_last", 0))
    pooled = average_pool(node)
    allocate = node.provider.allocate

    def run(x: Array, x_scale: Array, x_zero_point: Array | None, y_scale: Array, y_zero_point: Array | None = None) -> Array:
        values = dequantize(allocate, x, x_scale, x_zero_point, FLOAT32)
        y = np.moveaxis(pooled(np.moveaxis(values, -1, 1)), 1, -1) if channels_last else pooled(values)
        return quantize(allocate, y, y_scale, y_zero_point, x.dtype)

    return run
