"""FusedConv of the domain miniort: a convolution with what follows it. `miniort.graph.convolution_fusion` says what it means."""

from __future__ import annotations

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.epilogue import Activation, clip, hard_swish, relu, swish
from miniort_cpu.kernels.convolution import convolution
from miniort_cpu.kernels.recurrent import PLAIN, SCALED

kernels = KernelTable("cpu")


def _activation(node: NodeContext) -> Activation | None:
    """What the attributes `activation` and `activation_params` name. KernelError for what isn't known."""
    name, numbers = node.attribute("activation", ""), node.attribute("activation_params", ())
    match name, len(numbers):
        case "", _:
            return None
        case "Relu", 0:
            return relu
        case "HardSwish", 0:
            return hard_swish
        case "Swish", 1:
            return swish(numbers[0])
        case "Clip", 2:
            return clip(*numbers)
        case (("Sigmoid" | "Tanh"), 0):
            return PLAIN[name.lower()]
        case "LeakyRelu", 1:
            return SCALED["leakyrelu"][0](numbers[0], 0.0)
        case "HardSigmoid", 2:
            return SCALED["hardsigmoid"][0](*numbers)
    raise KernelError(f"node {node.name!r} (miniort.FusedConv) has activation {name!r} with {len(numbers)} parameters, which isn't known")


@kernels.register("FusedConv", domain="miniort")
def fused_conv(node: NodeContext) -> Run:
    """activation(BatchNormalization(Conv) + addend). x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M]; addend: [N, M, *counts];
    scale, shift, mean, variance: [M] -> [N, M, *counts].
    """
    if not node.has_input(4):
        return convolution(node, _activation(node))
    epsilon = node.attribute("epsilon", 1e-5)
    normalized = convolution(node, _activation(node), scaled=True)

    def run(
        x: Array,
        w: Array,
        bias: Array | None,
        addend: Array | None,
        scale: Array,
        shift: Array,
        mean: Array,
        variance: Array,
    ) -> Array:
        factor = scale.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
        term = ((0 if bias is None else bias) - mean.astype(np.float64)) * factor + shift
        return normalized(x, w, term, addend, factor)  # type: ignore[no-any-return]

    return run
