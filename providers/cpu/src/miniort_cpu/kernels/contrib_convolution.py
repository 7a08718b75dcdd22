"""Convolution of com.microsoft with what comes after it: FusedConv."""

from __future__ import annotations

from miniort.kernels import KernelTable, NodeContext, Run
from miniort_cpu.kernels.contrib_activation import CONTRIB, fused_activation
from miniort_cpu.kernels.convolution import convolution

kernels = KernelTable("cpu")


@kernels.register("FusedConv", domain=CONTRIB)
def fused_conv(node: NodeContext) -> Run:
    """An activation of Conv + addend. x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M]; addend: [N, M, *counts]

    -> [N, M, *counts]
    """
    parameters = (*(node.attribute("activation_params", None) or ()), None, None)
    return convolution(node, fused_activation(node, parameters[0], parameters[1]))
