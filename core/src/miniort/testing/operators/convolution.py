"""Builders of convolutions, float and quantised."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse
from miniort.types import Array, DType

AUTO_PADS = ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]


def summable(d: Draws, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Numbers whose products can be added up: small whole ones in 16 bits, so that it doesn't matter how sums are rounded on the way."""
    if is_coarse(dtype):
        return d.rng().integers(-2, 3, shape).astype(dtype)
    return d.ordinary(dtype, shape, -2, 2)


def window_attributes(d: Draws, operator: Operator, kernel: tuple[int, ...], padded: bool = True) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Strides, dilations and padding of a window, each there or left to its default, and sizes of an input that it fits on.

    padded: whether explicit padding is drawn; it's smaller than the kernel, as pools ask for.
    """
    rank = len(kernel)
    attributes: dict[str, Any] = d.some(strides=[d.integer(1, 3) for _ in kernel])
    if operator.has_attribute("dilations"):
        attributes |= d.some(dilations=[d.integer(1, 2) for _ in kernel])
    dilations = attributes.get("dilations", [1] * rank)
    pads = [0] * (2 * rank)
    if operator.has_attribute("auto_pad") and d.boolean():
        attributes["auto_pad"] = d.choice(AUTO_PADS)
    if attributes.get("auto_pad", "NOTSET") == "NOTSET" and padded and d.boolean():
        pads = attributes["pads"] = [d.integer(0, size - 1) for size in (*kernel, *kernel)]
    same = attributes.get("auto_pad", "").startswith("SAME")
    sizes = []
    for axis, (size, dilation) in enumerate(zip(kernel, dilations, strict=True)):
        least = 1 if same else max(1, (size - 1) * dilation + 1 - pads[axis] - pads[axis + rank])
        sizes.append(d.integer(least, least + 3))
    return attributes, tuple(sizes)


def kernel_sizes(d: Draws) -> tuple[int, ...]:
    """Of one to three axes."""
    return d.shape(1, 3, min_size=1, max_size=3)


def convolution_shapes(d: Draws, operator: Operator) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Attributes, the input's shape [N, C, *sizes] and the weights' [M, C / group, *kernel]."""
    kernel = kernel_sizes(d)
    attributes, sizes = window_attributes(d, operator, kernel)
    attributes |= d.some(kernel_shape=list(kernel))
    group = d.integer(1, 3)
    if group > 1 or d.boolean():
        attributes["group"] = group
    channels, features = d.integer(1, 2), d.integer(1, 2)
    return attributes, (d.choice([1, 2, 2, 0]), channels * group, *sizes), (features * group, channels, *kernel)


@builds("Conv")
def conv(d: Draws, operator: Operator) -> NodeCase:
    """One to three axes: x [N, C, *sizes], w [M, C / group, *kernel], bias [M]."""
    dtype = d.dtype(operator)
    attributes, x_shape, w_shape = convolution_shapes(d, operator)
    bias = summable(d, dtype, w_shape[:1]) if d.boolean() else None
    inputs = d.trimmed([summable(d, dtype, x_shape), summable(d, dtype, w_shape), bias])
    return NodeCase(inputs, attributes, constants=d.constants(1, len(inputs) - 1))


@builds("ConvTranspose")
def conv_transpose(d: Draws, operator: Operator) -> NodeCase:
    """The gradient of a convolution: x [N, C, *sizes], w [C, M / group, *kernel], bias [M]. The output's shape is given or follows."""
    dtype, kernel = d.dtype(operator), kernel_sizes(d)
    rank = len(kernel)
    attributes: dict[str, Any] = d.some(
        strides=[d.integer(1, 3) for _ in kernel], dilations=[d.integer(1, 2) for _ in kernel], kernel_shape=list(kernel)
    )
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    sizes = [d.integer(1, 4) for _ in kernel]
    if d.boolean():
        attributes["output_padding"] = [
            d.integer(0, max(stride, dilation) - 1) for stride, dilation in zip(strides, dilations, strict=True)
        ]
    more = attributes.get("output_padding", [0] * rank)
    full = [
        stride * (size - 1) + (width - 1) * dilation + 1 + extra
        for stride, size, width, dilation, extra in zip(strides, sizes, kernel, dilations, more, strict=True)
    ]
    kind = d.choice(["none", "pads", "auto_pad", "output_shape"])
    if kind == "pads":
        begins = [d.integer(0, min(2, size - 1)) for size in full]
        attributes["pads"] = begins + [d.integer(0, min(2, size - 1 - begin)) for size, begin in zip(full, begins, strict=True)]
    if kind == "auto_pad" or (kind == "output_shape" and d.boolean()):
        attributes["auto_pad"] = d.choice(AUTO_PADS)
    if kind == "output_shape":
        attributes["output_shape"] = [d.integer(max(1, size - 3), size) for size in full]
    group = d.integer(1, 2)
    if group > 1 or d.boolean():
        attributes["group"] = group
    channels, features = d.integer(1, 2), d.integer(1, 2)
    x = summable(d, dtype, (d.integer(1, 2), channels * group, *sizes))
    w = summable(d, dtype, (channels * group, features, *kernel))
    bias = summable(d, dtype, (features * group,)) if d.boolean() else None
    inputs = d.trimmed([x, w, bias])
    return NodeCase(inputs, attributes, constants=d.constants(1, len(inputs) - 1))


@builds("ConvInteger")
def conv_integer(d: Draws, operator: Operator) -> NodeCase:
    """8 bits to 32; zero points of the input, and of the weights as a scalar or per feature."""
    attributes, x_shape, w_shape = convolution_shapes(d, operator)
    x, w = d.array(d.dtype(operator, "T1"), x_shape), d.array(d.dtype(operator, "T2"), w_shape)
    x_zero = d.array(x.dtype, ()) if d.boolean() else None
    w_zero = d.array(w.dtype, d.choice([(), w_shape[:1]])) if d.boolean() else None
    inputs = d.trimmed([x, w, x_zero, w_zero])
    return NodeCase(inputs, attributes, constants=d.constants(1, len(inputs) - 1))


def scales(d: Draws, shape: tuple[int, ...], dtype: DType, exact: bool) -> Array:
    """Quantisation scales: powers of two where everything that is divided by them must be exact."""
    if exact:
        return np.asarray(2.0 ** d.rng().integers(-3, 1, shape)).astype(dtype)
    return d.positive(dtype, shape, 0.02, 1)


@builds("QLinearConv")
def qlinear_conv(d: Draws, operator: Operator) -> NodeCase:
    """8 bits to 8 bits. Where scales aren't powers of two, a result may be one off: ties depend on how scales are multiplied."""
    attributes, x_shape, w_shape = convolution_shapes(d, operator)
    exact, single = d.boolean(), np.dtype(np.float32)
    per_feature: tuple[int, ...] = d.choice([(), w_shape[:1]])
    source, target = d.dtype(operator, "T1"), d.dtype(operator, "T3")
    if d.integer(0, 3):
        source = target  # which is all that onnxruntime runs
    x, w = d.array(source, x_shape), d.array(d.dtype(operator, "T2"), w_shape)
    inputs = [
        x,
        scales(d, (), single, exact),
        d.array(x.dtype, ()),
        w,
        scales(d, per_feature, single, exact),
        d.array(w.dtype, per_feature),
        scales(d, (), single, exact),
        d.array(target, ()),
        d.array(np.dtype(np.int32), w_shape[:1]) if d.boolean() else None,
    ]
    constants = frozenset(range(1, 9)) if d.boolean() else d.constants(3, 4)
    return NodeCase(d.trimmed(inputs), attributes, constants=constants, atol=None if exact else 1)


@builds("DeformConv")
def deform_conv(d: Draws, operator: Operator) -> NodeCase:
    """Offsets that move the taps, also past the border, and a mask that weighs them: x [N, C, H, W], w [M, C / group, kH, kW]."""
    dtype, kernel = d.dtype(operator), d.shape(2, 2, min_size=1, max_size=3)
    attributes, sizes = window_attributes(d, operator, kernel)
    attributes |= d.some(kernel_shape=list(kernel))
    group, offset_group = d.integer(1, 2), d.integer(1, 2)
    attributes |= {"group": group} if group > 1 else {}
    attributes |= {"offset_group": offset_group} if offset_group > 1 else {}
    begins, ends = np.reshape(attributes.get("pads", [0] * 4), (2, 2))
    steps, widths = np.array(attributes.get("strides", [1, 1])), np.array(attributes.get("dilations", [1, 1]))
    counts = (np.array(sizes) + begins + ends - (np.array(kernel) - 1) * widths - 1) // steps + 1
    batch, channels, features = d.integer(1, 2), 2, d.integer(1, 2)
    taps = offset_group * kernel[0] * kernel[1]
    x = summable(d, dtype, (batch, channels, *sizes))
    w = summable(d, dtype, (features * group, channels // group, *kernel))
    offset = (d.rng().integers(-8, 9, (batch, taps * 2, *counts)) / 4 + (0 if is_coarse(dtype) else 0.03)).astype(dtype)
    bias = summable(d, dtype, w.shape[:1]) if d.boolean() else None
    mask = (d.rng().integers(0, 5, (batch, taps, *counts)) / 4).astype(dtype) if d.boolean() else None
    return NodeCase(d.trimmed([x, w, offset, bias, mask]), attributes, atol=0.25 if is_coarse(dtype) else None)


@builds("CausalConvWithState")
def causal_conv_with_state(d: Draws, operator: Operator) -> NodeCase:
    """Each channel by itself, over what came before: x [batch, channels, length], w [channels, 1, k], state [batch, channels, k - 1]."""
    dtype = d.dtype(operator)
    batch, channels, length, size = d.integer(1, 2), d.integer(1, 3), d.integer(1, 5), d.integer(1, 4)
    inputs = [
        summable(d, dtype, (batch, channels, length)),
        summable(d, dtype, (channels, 1, size)),
        summable(d, dtype, (channels,)) if d.boolean() else None,
        summable(d, dtype, (batch, channels, size - 1)) if d.boolean() else None,
    ]
    attributes = d.some(activation=d.choice(["silu", "swish", "none"]))
    return NodeCase(d.trimmed(inputs), attributes, 2, d.constants(1), atol=0.05 if is_coarse(dtype) else None)
