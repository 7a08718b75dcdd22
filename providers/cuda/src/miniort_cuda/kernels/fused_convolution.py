"""FusedConv of the domain miniort: a convolution with what follows it. `miniort.graph.convolution_fusion` says what it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort_cuda.element_types import FLOATS, compute_dtype
from miniort_cuda.kernels.activation import sigmoid_of
from miniort_cuda.kernels.convolution import conv
from miniort_cuda.namespace import array_namespace

kernels = KernelTable("cuda")

Activation = Callable[[Any, Any, Sequence[float]], Any]

ACTIVATIONS: dict[str, Activation] = {
    "": lambda xp, x, _: x,
    "Relu": lambda xp, x, _: xp.maximum(x, 0),
    "Sigmoid": lambda xp, x, _: sigmoid_of(xp, x),
    "Tanh": lambda xp, x, _: xp.tanh(x),
    "HardSwish": lambda xp, x, _: x * xp.minimum(xp.maximum(x * (1 / 6) + 0.5, 0), 1),
    "LeakyRelu": lambda xp, x, p: xp.where(x < 0, p[0] * x, x),
    "HardSigmoid": lambda xp, x, p: xp.minimum(xp.maximum(p[0] * x + p[1], 0), 1),
    "Swish": lambda xp, x, p: x * sigmoid_of(xp, p[0] * x),
    "Clip": lambda xp, x, p: xp.minimum(xp.maximum(x, p[0]), p[1]),
}
"""Each activation of an array, with its parameters in the op's order."""


def _refuse(node: NodeView) -> str | None:
    name = node.attribute("activation", "")
    return None if name in ACTIVATIONS else f"its kernel has no activation {name!r}"


@kernels.register("FusedConv", domain="miniort", types={0: FLOATS}, refuse=_refuse)
def fused_conv(node: NodeContext) -> Run:
    """activation(batch normalization(Conv(x, w, bias)) + addend).

    x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias, scale, shift, mean, variance: [M]; addend: as the result -> [N, M, *counts]
    """
    xp, convolve = array_namespace(node), conv(node)
    epsilon = node.attribute("epsilon", 1e-5)
    activate, parameters = ACTIVATIONS[node.attribute("activation", "")], node.attribute("activation_params", ())

    def run(
        x: Any,
        w: Any,
        bias: Any = None,
        addend: Any = None,
        scale: Any = None,
        shift: Any = None,
        mean: Any = None,
        variance: Any = None,
    ) -> Any:
        y = convolve(x, w, bias)
        if scale is not None:
            if shift is None or mean is None or variance is None:
                raise KernelError(f"node {node.name!r} (FusedConv): a batch normalization needs scale, bias, mean and variance")
            wide, shape = compute_dtype(y.dtype), (-1,) + (1,) * (y.ndim - 2)
            factor = scale.astype(wide, copy=False) / xp.sqrt(variance.astype(wide, copy=False) + epsilon)
            y = (y * factor.reshape(shape) + (shift - mean * factor).reshape(shape)).astype(x.dtype, copy=False)
        if addend is not None:
            y = y + addend
        return activate(xp, y, parameters).astype(x.dtype, copy=False)

    return run
