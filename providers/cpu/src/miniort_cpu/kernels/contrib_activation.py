"""Activation functions of com.microsoft, alone, after a bias, or as the end of another op."""

from __future__ import annotations

from functools import wraps

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.kernels.activation import Formula, blockwise, gelu, gelu_tanh, sigmoid
from miniort_cpu.kernels.recurrent import PLAIN, SCALED, Activation

kernels = KernelTable("cpu")

CONTRIB = "com.microsoft"

kernels.register("Gelu", domain=CONTRIB)(gelu)


def after_bias(compile_activation: CompileKernel) -> CompileKernel:
    """A kernel for activation(x + bias), the bias absent for none. x: [..., N]; bias: [N] -> x's shape."""

    @wraps(compile_activation)
    def compile_after_bias(node: NodeContext) -> Run:
        activate = compile_activation(node)
        allocate = node.provider.allocate

        def run(x: Array, bias: Array | None = None) -> Array:
            if bias is None:
                return activate(x)  # type: ignore[no-any-return]
            wide = widen(x)
            total = np.add(wide, widen(bias), out=allocate(x.shape, wide.dtype))
            return as_dtype(activate(total), x.dtype)

        return run

    return compile_after_bias


@kernels.register("FastGelu", domain=CONTRIB)
@after_bias
@blockwise
def fast_gelu(node: NodeContext) -> Formula:
    """(x + bias)/2 · (1 + tanh(0.7978845608 (x + bias) + 0.0356774081 (x + bias)³)) (FastGelu)."""
    return gelu_tanh


kernels.register("BiasGelu", domain=CONTRIB)(after_bias(gelu))


@kernels.register("QuickGelu", domain=CONTRIB)
@blockwise
def quick_gelu(node: NodeContext) -> Formula:
    """`x` · sigmoid(alpha · x) (QuickGelu)."""
    alpha = node.attribute("alpha", 1.702)

    def compute(x: Array, y: Array) -> None:
        sigmoid(np.multiply(x, alpha, out=y), y)
        np.multiply(x, y, out=y)

    return compute


@kernels.register("BiasSplitGelu", domain=CONTRIB)
def bias_split_gelu(node: NodeContext) -> Run:
    """`left` · gelu(right), left and right the halves of x + bias. x: [batch, N, 2 D]; bias: [2 D] -> [batch, N, D]."""
    activate = gelu(node)

    def run(x: Array, bias: Array) -> Array:
        left, right = np.split(widen(x) + widen(bias), 2, axis=-1)
        gate: Array = activate(np.ascontiguousarray(right))
        return as_dtype(np.multiply(left, gate, out=gate), x.dtype)

    return run


def fused_activation(node: NodeContext, alpha: float | None, beta: float | None) -> Activation | None:
    """The function that the attribute `activation` names, None where there is none. KernelError for one that isn't known.

    Those that recurrent layers have, and Clip, whose alpha and beta are its bounds.
    """
    name = node.attribute("activation", "")
    if not name:
        return None
    if name.lower() in PLAIN:
        return PLAIN[name.lower()]
    if name.lower() in SCALED:
        make, first, second = SCALED[name.lower()]
        return make(first if alpha is None else alpha, (second or 0.0) if beta is None else beta)
    if name == "Clip":
        low, high = -np.inf if alpha is None else alpha, np.inf if beta is None else beta
        return lambda x: np.copyto(x, np.clip(x, low, high))
    raise KernelError(f"node {node.name!r} ({node.op}) has activation {name!r}; known are {', '.join([*PLAIN, *SCALED])} and Clip")
