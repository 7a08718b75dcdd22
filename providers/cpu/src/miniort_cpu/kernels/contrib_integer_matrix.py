"""Matrix products of com.microsoft on 8-bit integers: MatMulIntegerToFloat, DynamicQuantizeMatMul, QGemm."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT32, as_dtype, widen
from miniort_cpu.kernels.contrib_activation import CONTRIB
from miniort_cpu.kernels.integer_matrix import RightMatrix, integer_product, right_matrix
from miniort_cpu.kernels.quantization import UINT8, dynamic_scale, quantize

kernels = KernelTable("cpu")


def _scaled(product: Array, scale: Array, bias: Array | None) -> Array:
    """`product` · scale + bias in float32, in place where it is that already. product: [..., M, N]; scale: [] or [N]; bias: [N]."""
    y = as_dtype(product, FLOAT32)
    np.multiply(y, scale, out=y)
    return y if bias is None else np.add(y, widen(bias), out=y)


@kernels.register("MatMulIntegerToFloat", domain=CONTRIB)
def matmul_integer_to_float(node: NodeContext) -> Run:
    """((a - a_zero_point) · a_scale) · ((b - b_zero_point) · b_scale) + bias.

    a: [..., M, K]; b: [..., K, N]; scales and zero points: [], those of b also [N]; bias: [N] -> [..., M, N] of the scales' type
    """
    constant = right_matrix(node, 1, 5)
    allocate = node.provider.allocate

    def run(
        a: Array,
        b: Array,
        a_scale: Array,
        b_scale: Array,
        a_zero_point: Array | None = None,
        b_zero_point: Array | None = None,
        bias: Array | None = None,
    ) -> Array:
        product = integer_product(allocate, a, a_zero_point, constant or RightMatrix(allocate, b, b_zero_point))
        return as_dtype(_scaled(product, widen(a_scale) * widen(b_scale), bias), a_scale.dtype)

    return run


@kernels.register("DynamicQuantizeMatMul", domain=CONTRIB)
def dynamic_quantize_matmul(node: NodeContext) -> Run:
    """`a` · ((b - b_zero_point) · b_scale) + bias, a rounded to 8 bits by its own range (DynamicQuantizeLinear).

    a: [..., M, K] float32; b: [K, N] of 8 bits; b_scale, b_zero_point: [] or [N]; bias: [N] -> [..., M, N] float32
    """
    constant = right_matrix(node, 1, 3)
    allocate = node.provider.allocate

    def run(a: Array, b: Array, b_scale: Array, b_zero_point: Array | None = None, bias: Array | None = None) -> Array:
        scale, zero_point = dynamic_scale(a)
        rounded = quantize(allocate, a, scale, zero_point, UINT8)
        product = integer_product(allocate, rounded, zero_point, constant or RightMatrix(allocate, b, b_zero_point))
        return _scaled(product, scale * b_scale, bias)

    return run


@kernels.register("QGemm", domain=CONTRIB)
def quantized_gemm(node: NodeContext) -> Run:
    """(alpha · a_scale · b_scale) · ((a - a_zero_point) · (b - b_zero_point) + c), quantized where y's scale is there.

    a: [M, K], b: [K, N], each transposed if its attribute says so; b_scale, b_zero_point: [] or [N]; c: broadcasts to [M, N], int32
    -> [M, N] of y_zero_point's type, or float32
    """
    alpha = np.float32(node.attribute("alpha", 1.0))
    transpose_a, transpose_b = bool(node.attribute("transA", 0)), bool(node.attribute("transB", 0))
    allocate = node.provider.allocate

    constant = right_matrix(node, 3, 5, transpose_b)

    def run(
        a: Array,
        a_scale: Array,
        a_zero_point: Array | None,
        b: Array,
        b_scale: Array,
        b_zero_point: Array | None = None,
        c: Array | None = None,
        y_scale: Array | None = None,
        y_zero_point: Array | None = None,
    ) -> Array:
        left = a.T if transpose_a else a
        right = constant or RightMatrix(allocate, b.T if transpose_b else b, b_zero_point)
        product = integer_product(allocate, left, a_zero_point, right)
        if c is not None:
            product = np.add(product, c)  # float64, as int32 has more digits than float32
        y = as_dtype(product, FLOAT32)
        np.multiply(y, alpha * a_scale * b_scale, out=y)
        if y_scale is None or y_zero_point is None:
            return y
        return quantize(allocate, y, y_scale, y_zero_point, y_zero_point.dtype)

    return run
