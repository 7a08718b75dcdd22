"""Activation functions that are ops of their own."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

from miniort.errors import KernelError
from miniort.graph.elementwise_body import Body
from miniort.kernels import KernelTable, NodeContext, Run
from miniort_cuda.chains import in_one_launch, step
from miniort_cuda.element_types import FLOATS, NUMBERS, compute_dtype
from miniort_cuda.namespace import CONTRIB, array_namespace, special_functions

kernels = KernelTable("cuda")


@kernels.register("Relu", (6, None), types={"T": NUMBERS})
def relu(node: NodeContext) -> Run:
    """The larger of x and 0. x: any shape -> same shape."""
    xp = array_namespace(node)
    return lambda x: xp.maximum(x, 0)


def _in_one_launch(node: NodeContext, formula: Run) -> Run:
    """The node's op as a chain of one step; the formula where there is no kernel for that."""
    inputs = tuple(f"x{index}" for index in range(len(node.inputs)))
    own = step(node.op, inputs, attributes={name: value for name, value in node.attributes.items() if isinstance(value, int | float | str)})
    return in_one_launch(node, Body(inputs, (own,)), formula)


@kernels.register("LeakyRelu", (6, None), types={"T": FLOATS})
def leaky_relu(node: NodeContext) -> Run:
    """`x` where it's positive, else alpha · x."""
    xp, alpha = array_namespace(node), node.attribute("alpha", 0.01)
    return _in_one_launch(node, lambda x: xp.where(x < 0, alpha * x, x))


@kernels.register("PRelu", (7, None), types={"T": FLOATS})
def parametric_relu(node: NodeContext) -> Run:
    """`x` where it's positive, else slope · x. slope: broadcasts to x."""
    xp = array_namespace(node)
    return _in_one_launch(node, lambda x, slope: xp.where(x < 0, slope * x, x))


@kernels.register("Elu", (6, None), types={"T": FLOATS})
def elu(node: NodeContext) -> Run:
    """`x` where it's positive, else alpha · (e^x - 1)."""
    xp, alpha = array_namespace(node), node.attribute("alpha", 1.0)
    return _in_one_launch(node, lambda x: xp.where(x < 0, alpha * xp.expm1(xp.minimum(x, 0)), x))


@kernels.register("Softplus", (1, None), types={"T": FLOATS})
def softplus(node: NodeContext) -> Run:
    """ln(1 + e^x), as max(x, 0) + ln(1 + e^-|x|), in which no power grows."""
    xp = array_namespace(node)
    return _in_one_launch(node, lambda x: xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x))))


@kernels.register("HardSigmoid", (6, None), types={"T": FLOATS})
def hard_sigmoid(node: NodeContext) -> Run:
    """alpha · x + beta, put into [0, 1]."""
    xp = array_namespace(node)
    alpha, beta = node.attribute("alpha", 0.2), node.attribute("beta", 0.5)
    return _in_one_launch(node, lambda x: xp.minimum(xp.maximum(alpha * x + beta, 0), 1))


@kernels.register("HardSwish", (14, None), types={"T": FLOATS})
def hard_swish(node: NodeContext) -> Run:
    """`x` times x / 6 + 1/2, the latter put into [0, 1]."""
    xp = array_namespace(node)
    return _in_one_launch(node, lambda x: x * xp.minimum(xp.maximum(x * (1 / 6) + 0.5, 0), 1))


def sigmoid_of(xp: Any, x: Any) -> Any:
    """1 / (1 + e^-x), written so that no power of e grows: with e = e^-|x| it is 1/(1+e) for x ≥ 0 and e/(1+e) below."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, xp.ones_like(e), e) / (1 + e)


@kernels.register("Sigmoid", (6, None), types={"T": FLOATS})
def sigmoid(node: NodeContext) -> Run:
    """1 / (1 + e^-x). x: any shape -> same shape."""
    xp = array_namespace(node)
    return _in_one_launch(node, lambda x: sigmoid_of(xp, x))


@kernels.register("Swish", (24, None), types={"T": FLOATS})
def swish(node: NodeContext) -> Run:
    """Sigmoid linear unit x · sigmoid(alpha · x) (Ramachandran et al. 2017, arXiv:1710.05941)."""
    xp, alpha = array_namespace(node), node.attribute("alpha", 1.0)
    return _in_one_launch(node, lambda x: x * sigmoid_of(xp, x if alpha == 1 else alpha * x))


@kernels.register("QuickGelu", domain=CONTRIB)
def quick_gelu(node: NodeContext) -> Run:
    """`x` · sigmoid(alpha · x)."""
    xp, alpha = array_namespace(node), node.attribute("alpha", 1.702)
    body = Body(("x",), (step("Swish", ("x",), attributes={"alpha": alpha}),))
    return in_one_launch(node, body, lambda x: x * sigmoid_of(xp, alpha * x))


def gelu_exact(special: Any, x: Any) -> Any:
    """Gaussian error linear unit x · Φ(x) (Hendrycks and Gimpel, 2016), Φ by the error function."""
    return 0.5 * x * (1 + special.erf(x * (1 / sqrt(2))).astype(x.dtype, copy=False))


def gelu_by_tanh(xp: Any, x: Any) -> Any:
    """The same, Φ by tanh."""
    return 0.5 * x * (1 + xp.tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)))


@kernels.register("Gelu", (20, None), types={"T": FLOATS})
def gelu(node: NodeContext) -> Run:
    """Gaussian error linear unit, by tanh if `approximate` says so."""
    xp, special = array_namespace(node), special_functions(node)
    formulas: dict[str, Run] = {"none": lambda x: gelu_exact(special, x), "tanh": lambda x: gelu_by_tanh(xp, x)}
    approximate = node.attribute("approximate", "none")
    if approximate not in formulas:
        raise KernelError(f"node {node.name!r} (Gelu): approximate must be 'none' or 'tanh', found {approximate!r}")
    return _in_one_launch(node, formulas[approximate])


@kernels.register("Gelu", domain=CONTRIB)
@kernels.register("BiasGelu", domain=CONTRIB)
def bias_gelu(node: NodeContext) -> Run:
    """Gelu of x + bias, by the error function. x: [..., N]; bias: [N], absent in Gelu."""
    special = special_functions(node)
    return _gelu_of_sum(node, "none", lambda x, bias=None: gelu_exact(special, x if bias is None else x + bias))


@kernels.register("FastGelu", domain=CONTRIB)
def fast_gelu(node: NodeContext) -> Run:
    """Gelu of x + bias, by tanh. x: [..., N]; bias: [N], may be absent."""
    xp = array_namespace(node)
    return _gelu_of_sum(node, "tanh", lambda x, bias=None: gelu_by_tanh(xp, x if bias is None else x + bias))


def _gelu_of_sum(node: NodeContext, approximate: str, formula: Run) -> Run:
    attributes = {"approximate": approximate}
    if not node.has_input(1):
        alone = in_one_launch(node, Body(("x",), (step("Gelu", ("x",), attributes=attributes),)), formula)
        return lambda x, bias=None: alone(x)
    steps = (step("Add", ("x", "bias"), "sum"), step("Gelu", ("sum",), attributes=attributes))
    return in_one_launch(node, Body(("x", "bias"), steps), formula)


@kernels.register("Clip", (6, 10), types={"T": FLOATS})
def clip_by_attributes(node: NodeContext) -> Run:
    """`x` put into [min, max], which are attributes."""
    xp = array_namespace(node)
    low, high = node.attribute("min", None), node.attribute("max", None)
    return lambda x: _clipped(xp, x, low, high)


@kernels.register("Clip", (11, None), types={"T": NUMBERS})
def clip(node: NodeContext) -> Run:
    """`x` put into [min, max]; max where min is the larger. min, max: [], either may be absent."""
    xp = array_namespace(node)
    return lambda x, low=None, high=None: _clipped(xp, x, low, high)


def _clipped(xp: Any, x: Any, low: Any, high: Any) -> Any:
    if low is None and high is None:
        return x.copy()
    y = x if low is None else xp.maximum(x, low)
    return y if high is None else xp.minimum(y, high)


def softmax_of(xp: Any, x: Any, axis: int) -> Any:
    """e^(x - max x) / Σ e^(x - max x) along `axis`, summed in float32 at least. x: any shape -> same shape, dtype."""
    if x.size == 0:
        return xp.empty_like(x)
    wide = x.astype(compute_dtype(x.dtype), copy=False)
    e = xp.exp(wide - wide.max(axis=axis, keepdims=True))
    e /= e.sum(axis=axis, keepdims=True)
    return e.astype(x.dtype, copy=False)
