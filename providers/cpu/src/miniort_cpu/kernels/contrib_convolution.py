"""Convolution of com.microsoft with what comes after it: FusedConv."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.kernels.contrib_activation import CONTRIB, fused_activation
from miniort_cpu.kernels.convolution import conv

kernels = KernelTable("cpu")


@kernels.register("FusedConv", domain=CONTRIB)
def fused_conv(node: NodeContext) -> Run:
    """An activation of Conv + addend. x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M]; addend: [N, M, *counts]

    -> [N, M, *counts]
    """
    parameters = (*(node.attribute("activation_params", None) or ()), None, None)
    activate = fused_activation(node, parameters[0], parameters[1])
    convolve = conv(node)

    def run(x: Array, w: Array, bias: Array | None = None, addend: Array | None = None) -> Array:
        y = widen(convolve(x, w, bias))
        if addend is not None:
            np.add(y, widen(addend), out=y)
        if activate is not None:
            activate(y)
        return as_dtype(y, x.dtype)

    return run
