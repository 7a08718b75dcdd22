"""Activation functions without a bend: Softplus, Softsign, Mish, and the gate SwiGLU."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import as_dtype, compute_dtype, widen
from miniort_cpu.kernels.activation import BLOCK, Formula, blockwise, sigmoid

kernels = KernelTable("cpu")


def softplus(x: Array, y: Array) -> None:
    """log(1 + exp(x)), as max(x, 0) + log(1 + exp(-|x|)), which can't overflow."""
    np.absolute(x, out=y)
    np.negative(y, out=y)
    np.exp(y, out=y)
    np.log1p(y, out=y)
    np.add(y, np.maximum(x, 0, out=...), out=y)


@kernels.register("Softplus", versions=(1, None))
@blockwise
def softplus_op(node: NodeContext) -> Formula:
    """log(1 + exp(x)) (Softplus)."""
    return softplus


@kernels.register("Softsign", versions=(1, None))
@blockwise
def softsign(node: NodeContext) -> Formula:
    """`x` / (1 + |x|) (Softsign)."""

    def compute(x: Array, y: Array) -> None:
        np.absolute(x, out=y)
        np.add(y, 1, out=y)
        np.divide(x, y, out=y)

    return compute


@kernels.register("Mish", versions=(18, None))
@blockwise
def mish(node: NodeContext) -> Formula:
    """`x` · tanh(softplus(x)) (Mish; Misra 2019, arXiv:1908.08681)."""

    def compute(x: Array, y: Array) -> None:
        softplus(x, y)
        np.tanh(y, out=y)
        np.multiply(x, y, out=y)

    return compute


@kernels.register("SwiGLU", versions=(28, None))
def swiglu(node: NodeContext) -> Run:
    """`a` · sigmoid(alpha · a) · b (Shazeer 2020, arXiv:2002.05202). a, b: one shape, floats -> same shape."""
    alpha = node.attribute("alpha", 1.0)
    allocate = node.provider.allocate

    def run(a: Array, b: Array) -> Array:
        if a.shape != b.shape:
            raise ValueError(f"SwiGLU's inputs must have one shape, found {list(a.shape)} and {list(b.shape)}")
        y: Array = allocate(a.shape, compute_dtype(a.dtype))
        gates, values, results = a.reshape(-1), b.reshape(-1), y.reshape(-1)
        for start in range(0, a.size, BLOCK):
            block = slice(start, start + BLOCK)
            gate, out = widen(gates[block]), results[block]
            sigmoid(gate if alpha == 1.0 else np.multiply(gate, alpha, out=out), out)
            np.multiply(out, gate, out=out)
            np.multiply(out, widen(values[block]), out=out)
        return as_dtype(y, a.dtype)

    return run
