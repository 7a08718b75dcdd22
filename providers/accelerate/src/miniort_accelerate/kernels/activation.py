"""Activation functions, each a few calls over one vector."""

from __future__ import annotations

from math import pi, sqrt

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_accelerate.kernels.elementwise import apply_binary, apply_unary
from miniort_accelerate.library import Accelerate
from miniort_accelerate.operands import FLOAT32, contiguous, library_of, require_types

kernels = KernelTable("accelerate")


def _sigmoid_in_place(library: Accelerate, x: Array) -> None:
    """1 / (1 + e^-x), written over x. C-contiguous float32; e^-x may become infinite, and its reciprocal then is 0."""
    np.negative(x, out=x)
    apply_unary(library.vexpf, x, x)
    x += 1
    apply_unary(library.vrecf, x, x)


@kernels.register("Sigmoid", (6, None), types={"T": FLOAT32})
def sigmoid(node: NodeContext) -> Run:
    """1 / (1 + e^-x). x: any shape -> same shape."""
    library, allocate = library_of(node), node.provider.allocate

    def run(x: Array) -> Array:
        require_types(node, FLOAT32, x)
        out: Array = allocate(x.shape, x.dtype)
        out[...] = x
        _sigmoid_in_place(library, out)
        return out

    return run


@kernels.register("Swish", (24, None), types={"T": FLOAT32})
def swish(node: NodeContext) -> Run:
    """Sigmoid linear unit x · sigmoid(alpha · x). x: any shape -> same shape."""
    library, allocate = library_of(node), node.provider.allocate
    alpha = node.attribute("alpha", 1.0)

    def run(x: Array) -> Array:
        require_types(node, FLOAT32, x)
        out: Array = allocate(x.shape, x.dtype)
        np.multiply(x, np.float32(alpha), out=out)
        _sigmoid_in_place(library, out)
        apply_binary(library.vmul, contiguous(x), out, out)
        return out

    return run


def refuse_error_function(node: NodeView) -> str | None:
    """Accelerate has no error function on every macOS that we run on."""
    approximate = node.attribute("approximate", "none")
    return None if approximate == "tanh" else f"its kernel takes approximate='tanh', the node has {approximate!r}"


@kernels.register("Gelu", (20, None), types={"T": FLOAT32}, refuse=refuse_error_function)
def gelu(node: NodeContext) -> Run:
    """½ x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (Hendrycks and Gimpel, 2016). x: any shape -> same shape."""
    library, allocate = library_of(node), node.provider.allocate

    def run(x: Array) -> Array:
        require_types(node, FLOAT32, x)
        x = contiguous(x)
        out: Array = allocate(x.shape, x.dtype)
        apply_binary(library.vmul, x, x, out)
        out *= 0.044715
        out += 1
        apply_binary(library.vmul, x, out, out)  # x + 0.044715 x³
        out *= sqrt(2 / pi)
        apply_unary(library.vtanhf, out, out)
        out += 1
        apply_binary(library.vmul, x, out, out)
        out *= 0.5
        return out

    return run
