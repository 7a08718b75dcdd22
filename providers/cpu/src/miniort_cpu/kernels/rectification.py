"""Activation functions that are linear on one side, and bounded, bent or zero on the other."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT64, as_dtype, widen
from miniort_cpu.integers import is_integer
from miniort_cpu.kernels.activation import Formula, blockwise

kernels = KernelTable("cpu")


@kernels.register("Elu", versions=(6, None))
@blockwise
def elu(node: NodeContext) -> Formula:
    """`x` for x ≥ 0, alpha · (exp(x) - 1) below (Elu; Clevert et al. 2015, arXiv:1511.07289)."""
    alpha = node.attribute("alpha", 1.0)

    def compute(x: Array, y: Array) -> None:
        np.minimum(x, 0, out=y)
        np.expm1(y, out=y)
        np.multiply(y, alpha, out=y)
        np.copyto(y, x, where=x >= 0)

    return compute


@kernels.register("Selu", versions=(6, None))
@blockwise
def selu(node: NodeContext) -> Formula:
    """`gamma` · x for x > 0, gamma · alpha · (exp(x) - 1) below (Selu; Klambauer et al. 2017, arXiv:1706.02515)."""
    alpha, gamma = node.attribute("alpha", 1.67326319217681884765625), node.attribute("gamma", 1.05070102214813232421875)

    def compute(x: Array, y: Array) -> None:
        np.minimum(x, 0, out=y)
        np.expm1(y, out=y)
        np.multiply(y, alpha, out=y)
        np.copyto(y, x, where=x > 0)
        np.multiply(y, gamma, out=y)

    return compute


@kernels.register("Celu", versions=(12, None))
@blockwise
def celu(node: NodeContext) -> Formula:
    """max(0, x) + min(0, alpha · (exp(x / alpha) - 1)) (Celu; Barron 2017, arXiv:1704.07483)."""
    alpha = node.attribute("alpha", 1.0)

    def compute(x: Array, y: Array) -> None:
        np.divide(x, alpha, out=y)
        np.expm1(y, out=y)
        np.multiply(y, alpha, out=y)
        np.minimum(y, 0, out=y)
        np.add(y, np.maximum(x, 0, out=...), out=y)

    return compute


@kernels.register("LeakyRelu", versions=(6, None))
@blockwise
def leaky_relu(node: NodeContext) -> Formula:
    """`x` for x ≥ 0, alpha · x below (LeakyRelu)."""
    alpha = node.attribute("alpha", 0.01)

    def compute(x: Array, y: Array) -> None:
        np.multiply(x, alpha, out=y)
        np.copyto(y, x, where=x >= 0)

    return compute


@kernels.register("ThresholdedRelu", versions=(10, None))
@blockwise
def thresholded_relu(node: NodeContext) -> Formula:
    """`x` for x > alpha, else 0 (ThresholdedRelu)."""
    alpha = node.attribute("alpha", 1.0)

    def compute(x: Array, y: Array) -> None:
        y.fill(0)
        np.copyto(y, x, where=x > alpha)

    return compute


@kernels.register("HardSigmoid", versions=(6, None))
@blockwise
def hard_sigmoid(node: NodeContext) -> Formula:
    """max(0, min(1, alpha · x + beta)) (HardSigmoid)."""
    alpha, beta = node.attribute("alpha", 0.2), node.attribute("beta", 0.5)

    def compute(x: Array, y: Array) -> None:
        np.multiply(x, alpha, out=y)
        np.add(y, beta, out=y)
        np.minimum(y, 1, out=y)
        np.maximum(y, 0, out=y)

    return compute


@kernels.register("PRelu", versions=(7, None))
def parametric_relu(node: NodeContext) -> Run:
    """`x` for x ≥ 0, slope · x below. x: [...] floats or integers; slope: broadcasts to x's shape -> same shape as x."""
    allocate = node.provider.allocate

    def run(x: Array, slope: Array) -> Array:
        y: Array = np.multiply(x, slope, out=allocate(x.shape, x.dtype))
        np.copyto(y, x, where=np.logical_not(x < x.dtype.type(0)))
        return y

    return run


@kernels.register("Shrink", versions=(9, None))
def shrink(node: NodeContext) -> Run:
    """`x` + bias for x < -lambd, x - bias for x > lambd, else 0. x: [...] any number -> same shape, dtype."""
    bias, threshold = node.attribute("bias", 0.0), node.attribute("lambd", 0.5)
    allocate = node.provider.allocate

    def run(x: Array) -> Array:
        wide = widen(x)
        shift = bias
        if is_integer(x.dtype):
            # A whole bias keeps integers exact; another one needs fractions, which are cut off at the end.
            shift = int(bias) if bias == int(bias) else bias
            wide = x if isinstance(shift, int) else x.astype(FLOAT64)
        y: Array = allocate(x.shape, wide.dtype)
        y.fill(0)
        np.add(wide, shift, out=y, where=x < -threshold)
        np.subtract(wide, shift, out=y, where=x > threshold)
        return as_dtype(y, x.dtype)

    return run
