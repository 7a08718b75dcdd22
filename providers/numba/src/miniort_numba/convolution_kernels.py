"""Convolutions of rows and of images: Conv, the domain miniort's FusedConv, and ConvInteger, all computed in float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort.windows import SlidingWindow
from miniort_numba.integer_kernels import INT32, to_floats
from miniort_numba.kernels import FLOAT32, NO_VECTOR, crew_of
from miniort_numba.windows import Layout, layout_of, window_of

KERNELS = KernelTable("numba")

STEPS_PER_CHUNK = 1 << 20
"""Multiplications that a chunk should have at least: some 10 µs."""

CHUNKS_PER_THREAD = 3
"""More chunks than threads, so that one that's slower than the others takes fewer of them."""

WEIGHTS_PER_CHUNK = 1 << 16
"""Weights that a chunk should have at least, where each is multiplied once."""

WINDOWS_PER_CHUNK = 1 << 12
"""Windows that a chunk should have at least, where each channel is seen by itself."""

LARGEST_BYTE, LARGEST_WHOLE_FLOAT = 255, 1 << 24
"""The largest difference of two 8-bit numbers; a float32 holds all whole numbers up to the other."""

ACTIVATIONS = {"": 0, "Relu": 0, "Clip": 2, "LeakyRelu": 1, "Sigmoid": 0, "Swish": 1, "HardSigmoid": 2, "HardSwish": 0}
"""What may follow a convolution, and how many parameters it has."""


def _refuse_convolution(node: NodeView) -> str | None:
    weights = node.inputs[1]
    if weights is None or weights.shape is None or len(weights.shape) not in (3, 4):
        return "it convolves rows and images only"
    return None


def _refuse_fused(node: NodeView) -> str | None:
    if any(node.has_input(index) for index in range(4, 8)):
        return "it has no batch normalization in a convolution"
    name = node.attribute("activation", "")
    if name not in ACTIVATIONS:
        return f"it has no activation {name}"
    return _refuse_convolution(node)


@KERNELS.register("Conv", types={"T": [FLOAT32]}, refuse=_refuse_convolution)
def conv(node: NodeContext) -> Run:
    """A convolution. x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M] -> [N, M, *counts]."""
    return _convolution(node, "", ())


@KERNELS.register("FusedConv", domain="miniort", types={0: [FLOAT32]}, refuse=_refuse_fused)
def fused_conv(node: NodeContext) -> Run:
    """activation(Conv + addend). x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M]; addend: [N, M, *counts] -> [N, M, *counts]."""
    return _convolution(node, node.attribute("activation", ""), tuple(node.attribute("activation_params", ())))


def _refuse_integers(node: NodeView) -> str | None:
    weights, zero = node.constant(1), node.constant(3)
    if weights is None or (zero is None and node.has_input(3)):
        return "it takes constant weights only"
    largest = np.abs(_without_zero(weights, zero)).reshape(len(weights), -1).sum(axis=1).max(initial=0) * LARGEST_BYTE
    if largest >= LARGEST_WHOLE_FLOAT:
        return "its sums are exact only with smaller weights"
    return _refuse_convolution(node)


@KERNELS.register("ConvInteger", versions=(10, None), refuse=_refuse_integers)
def conv_integer(node: NodeContext) -> Run:
    """A convolution of 8-bit integers. x: [N, C, *sizes]; w: [M, C / group, *kernel] -> [N, M, *counts] int32."""
    from miniort_numba.compiled.integers import NARROW, narrow

    convolve, zero = _convolution(node, "", ()), node.constant(3)
    label = "none" if zero is None else f"{zero.shape}:{zero.tobytes().hex()}"
    weights = node.prepare(1, f"numba.weights_without_zero:{label}", lambda w: _without_zero(w, zero))
    board, helpers = crew_of(node)
    allocate, as_floats = node.provider.allocate, to_floats(node)

    def run(x: Array, w: Array, x_zero: Array | None = None, w_zero: Array | None = None) -> Array:
        exact = convolve(as_floats(x, x_zero), weights)
        y: Array = allocate(exact.shape, INT32)
        narrow(board, helpers, NARROW, exact.reshape(-1), y.reshape(-1))
        return y

    return run


def _without_zero(weights: Array, zero: Array | None) -> Array:
    """Weights minus their zero point, one for all or one for each feature. weights: [M, ...] of 8 bits -> the same of float32."""
    wide = weights.astype(FLOAT32)
    return wide if zero is None else wide - zero.astype(FLOAT32).reshape(-1, *(1,) * (wide.ndim - 1))


def _convolution(node: NodeContext, activation: str, numbers: tuple[float, ...]) -> Run:
    from miniort_numba.compiled.activations import ACTIVATE, KINDS, NOTHING, activate
    from miniort_numba.compiled.convolution import SINGLE_CHANNELS, convolve
    from miniort_numba.compiled.planes import LAY_OUT, lay_out

    if len(numbers) != ACTIVATIONS[activation]:
        raise KernelError(f"node {node.name!r} ({node.op}): {activation} has {ACTIVATIONS[activation]} parameters, found {len(numbers)}")
    kind = KINDS[activation]
    parameters = np.array([*numbers, 0, 0][:2], np.float32)
    board, helpers = crew_of(node)
    allocate, groups = node.provider.allocate, node.attribute("group", 1)

    @lru_cache(maxsize=16)
    def planned(shape: tuple[int, ...], weight: tuple[int, ...], kind: int) -> _Plan:
        return _plan(window_of(node, weight[2:]), shape, weight, groups, kind, helpers + 1)

    def run(x: Array, w: Array, bias: Array | None = None, addend: Array | None = None) -> Array:
        plan = planned(x.shape, w.shape, kind)
        fits = x.size > 0 and (addend is None or addend.shape == plan.result)
        if not fits:
            plan = planned(x.shape, w.shape, NOTHING)
        if bias is not None and bias.shape != w.shape[:1]:
            raise ValueError(f"the bias has to be of shape {w.shape[:1]}, one number for each feature, but it's of {bias.shape}")
        y: Array = allocate(plan.result, FLOAT32)
        if not x.size:  # all that a window sees is padding
            y[...] = 0 if bias is None else bias.reshape(-1, *(1,) * (x.ndim - 2))
        elif y.size:
            x = np.ascontiguousarray(x)
            if plan.part != SINGLE_CHANNELS and not plan.layout.is_plain:
                planes: Array = allocate((x.shape[0] * x.shape[1], plan.layout.step), FLOAT32)
                lay_out(board, helpers, LAY_OUT, plan.layout.words, x.reshape(-1), planes)
                x = planes
            added = NO_VECTOR if addend is None or not fits else np.ascontiguousarray(addend).reshape(-1)
            biases = NO_VECTOR if bias is None else np.ascontiguousarray(bias)
            weights = np.ascontiguousarray(w).reshape(-1)
            convolve(
                board,
                helpers,
                plan.part,
                plan.sizes,
                plan.layout.words,
                plan.starts,
                x.reshape(-1),
                weights,
                biases,
                added,
                parameters,
                y.reshape(-1),
            )
        if not fits:
            if addend is not None:  # one of them may be repeated, so that the sum has another shape
                y = np.add(y, addend, out=...)
            activate(board, helpers, ACTIVATE, kind, y.reshape(-1), parameters, y.reshape(-1))
        return y

    return run


@dataclass(frozen=True, eq=False)
class _Plan:
    """How one shape of images is convolved: by which part, with what sizes, as `miniort_numba.compiled.convolution` has them."""

    part: int
    layout: Layout
    sizes: Array
    starts: Array
    result: tuple[int, ...]


def _plan(window: SlidingWindow, shape: tuple[int, ...], weight: tuple[int, ...], groups: int, kind: int, threads: int) -> _Plan:
    """shape: of x; weight: of w; threads: that share the work."""
    from miniort_numba.compiled import convolution as compiled
    from miniort_numba.compiled import tiles

    batch, channels, *sizes = shape
    if len(shape) != len(weight) or channels != weight[1] * groups or weight[0] % groups:
        raise ValueError(f"weights of shape {weight} in {groups} groups don't fit an input of shape {shape}")
    height, width = (1, *sizes) if len(sizes) == 1 else sizes
    layout = layout_of(window, (height, width))
    result = (batch, weight[0], *layout.counts[2 - len(sizes) :])
    images, features, points, inner = batch * groups, weight[0] // groups, prod(layout.counts), prod(weight[1:])
    strips, own = 1, features
    if not prod(result):
        part, units, chunk = compiled.PRODUCTS, 0, 1
    elif groups > 1 and weight[1] == 1:
        part, units, chunk = compiled.SINGLE_CHANNELS, batch * channels, WINDOWS_PER_CHUNK // max(1, points * features)
    elif points == 1:
        part, units, chunk = compiled.SINGLE_WINDOWS, batch * weight[0], WEIGHTS_PER_CHUNK // max(1, inner)
    else:
        part = compiled.PRODUCTS
        all_strips = -(-points // tiles.STRIP)
        wanted = threads * CHUNKS_PER_THREAD if threads > 1 else 1
        wanted = max(1, min(wanted, images * features * points * inner // STEPS_PER_CHUNK))
        strips = -(-all_strips // min(all_strips, -(-wanted // images)))
        units = images * -(-all_strips // strips)
        blocks = -(-features // tiles.ROWS)
        own = -(-blocks // min(blocks, -(-wanted // units))) * tiles.ROWS
        units *= -(-features // own)
        chunk = units // wanted
    words = np.array([kind, channels, weight[0], groups, layout.step, strips, own, units, max(1, chunk)], np.int64)
    starts = (np.arange(weight[1])[:, None] * layout.step + layout.offsets).reshape(-1)
    return _Plan(part, layout, words, starts, result)
