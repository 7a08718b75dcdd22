"""Ops as they were before opset 7 brought NumPy's broadcasting: the second input is broadcast only where `broadcast` says so.

Its axes are matched with the last ones of the first input, or with those from `axis` on.
"""

from __future__ import annotations

import numpy as np

from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import normalize_axis
from miniort_cpu.integers import truncated_quotient
from miniort_cpu.kernels.comparison import BOOL
from miniort_cpu.kernels.elementwise import power
from miniort_cpu.kernels.matrix import gemm
from miniort_cpu.kernels.rectification import parametric_relu
from miniort_cpu.ufuncs import binary, by_kind

kernels = KernelTable("cpu")


def aligned(compute: CompileKernel) -> CompileKernel:
    """A kernel for f(a, b) with b's axes put where the node's `broadcast` and `axis` want them. a: [...]; b: some of a's axes in a row."""

    def compile_aligned(node: NodeContext) -> Run:
        run = compute(node)
        broadcast, axis = node.attribute("broadcast", 0), node.attribute("axis", None)

        def run_aligned(a: Array, b: Array) -> Array:
            if not broadcast and a.shape != b.shape:
                raise ValueError(f"{node.op} of version {node.version} without broadcast=1 needs one shape, found {a.shape} and {b.shape}")
            if broadcast and axis is not None:
                behind = a.ndim - normalize_axis(axis, a.ndim) - b.ndim
                b = b.reshape(b.shape + (1,) * max(behind, 0))
            y: Array = run(a, b)
            return y

        return run_aligned

    return compile_aligned


def per_channel_slope(node: NodeContext) -> Run:
    """PRelu with one slope for everything, or one for each channel. x: [N, C, ...]; slope: [1] or [C] -> x's shape."""
    run = parametric_relu(node)
    return lambda x, slope: run(x, slope.reshape(-1, *(1,) * (x.ndim - 2)) if slope.size > 1 and x.ndim > 2 else slope)


BINARY: dict[str, CompileKernel] = {
    "Add": binary(np.add),
    "Sub": binary(np.subtract),
    "Mul": binary(np.multiply),
    "Div": by_kind(integer=binary(truncated_quotient), floating=binary(np.divide)),
    "Pow": power,
    "And": binary(np.logical_and),
    "Or": binary(np.logical_or),
    "Xor": binary(np.logical_xor),
    "Equal": binary(np.equal, BOOL),
    "Less": binary(np.less, BOOL),
    "Greater": binary(np.greater, BOOL),
}

for op, compute in BINARY.items():
    kernels.register(op, versions=(1, 6))(aligned(compute))

kernels.register("Gemm", versions=(1, 6))(gemm)
kernels.register("PRelu", versions=(1, 6))(per_channel_slope)
