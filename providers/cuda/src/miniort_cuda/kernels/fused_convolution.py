"""FusedConv of the domain miniort: a convolution with what follows it. `miniort.graph.convolution_fusion` says what it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from miniort.errors import KernelError
from miniort.graph.convolution_fusion import PARAMETERS
from miniort.graph.elementwise_body import NUMBER, Body
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort_cuda.chains import in_one_launch, step
from miniort_cuda.element_types import FLOATS, compute_dtype
from miniort_cuda.kernels.activation import sigmoid_of
from miniort_cuda.kernels.convolution import conv
from miniort_cuda.namespace import array_namespace

kernels = KernelTable("cuda")

OPERANDS = ("bias", "addend", "scale", "shift", "mean", "variance")
"""The inputs behind those of the convolution's product."""
STATISTICS = ("scale", "shift", "mean", "variance")
FLOAT = 1
"""The number of float32 in ONNX."""

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
    """activation(batch normalization(Conv(x, w, bias)) + addend), what comes behind the convolution in one launch.

    x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias, scale, shift, mean, variance: [M]; addend: as the result -> [N, M, *counts]
    """
    convolve, finish = conv(node), in_one_launch(node, _behind(node), _formula(node))
    channels = [name != "addend" for name in _operands(node)]

    def run(x: Any, w: Any, *operands: Any) -> Any:
        y = convolve(x, w)
        column = (-1,) + (1,) * (y.ndim - 2)
        given = (operand for operand in operands if operand is not None)
        return finish(y, *(each.reshape(column) if one else each for each, one in zip(given, channels, strict=True)))

    return run


def _formula(node: NodeContext) -> Run:
    """What comes behind the convolution, op by op. y: [N, M, *counts]; operands as `_operands` names them, each fits y -> as y."""
    xp, names = array_namespace(node), _operands(node)
    epsilon = node.attribute("epsilon", 1e-5)
    activate, parameters = ACTIVATIONS[node.attribute("activation", "")], node.attribute("activation_params", ())

    def formula(x: Any, *operands: Any) -> Any:
        given = dict(zip(names, operands, strict=True))
        y = x + given["bias"] if "bias" in given else x
        if "scale" in given:
            scale, shift, mean, variance = (given[name] for name in STATISTICS)
            wide = compute_dtype(y.dtype)
            factor = scale.astype(wide, copy=False) / xp.sqrt(variance.astype(wide, copy=False) + epsilon)
            y = (y * factor + (shift - mean * factor)).astype(x.dtype, copy=False)
        if "addend" in given:
            y = y + given["addend"]
        return activate(xp, y, parameters).astype(x.dtype, copy=False)

    return formula


def _operands(node: NodeContext) -> list[str]:
    """The names of the inputs that are there, behind those of the convolution."""
    present = [name for index, name in enumerate(OPERANDS, 2) if node.has_input(index)]
    if 0 < len(set(STATISTICS) & set(present)) < len(STATISTICS):
        raise KernelError(f"node {node.name!r} (FusedConv): a batch normalization needs scale, bias, mean and variance")
    return present


def _behind(node: NodeContext) -> Body:
    """What comes behind the convolution, as a chain in float32 of its result `x` and the operands, each of which fits it."""
    operands, steps = _operands(node), [step("Cast", ("x",), "x_wide", {"to": FLOAT})]
    steps += [step("Cast", (name,), f"{name}_wide", {"to": FLOAT}) for name in operands]
    last = "x_wide"

    def then(op: str, *inputs: str, **attributes: float) -> str:
        steps.append(step(op, inputs, f"v{len(steps)}", attributes))
        return steps[-1].output

    def number(value: float) -> str:
        return then("Constant", **{NUMBER: value})

    if "bias" in operands:
        last = then("Add", last, "bias_wide")
    if "scale" in operands:
        deviation = then("Sqrt", then("Add", "variance_wide", number(node.attribute("epsilon", 1e-5))))
        factor = then("Div", "scale_wide", deviation)
        last = then("Add", then("Mul", last, factor), then("Sub", "shift_wide", then("Mul", "mean_wide", factor)))
    if "addend" in operands:
        last = then("Add", last, "addend_wide")
    name, parameters = node.attribute("activation", ""), node.attribute("activation_params", ())
    if name == "Clip":
        for op, bound in zip(("Max", "Min"), parameters, strict=True):
            last = then(op, last, number(bound)) if isfinite(bound) else last
    elif name:
        last = then(name, last, **{key: value for (key, _), value in zip(PARAMETERS[name], parameters, strict=True)})
    steps.append(step("CastLike", (last, "x")))
    return Body(("x", *operands), tuple(steps))
