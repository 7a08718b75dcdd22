"""Softmax and normalization, also of com.microsoft with the sum before it. float16 is summed in float32, as the ops' `stash_type` asks."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort_cuda.element_types import FLOATS, compute_dtype
from miniort_cuda.fused import fused_kernels
from miniort_cuda.kernels.activation import softmax_of
from miniort_cuda.namespace import CONTRIB, array_namespace

kernels = KernelTable("cuda")


@kernels.register("Softmax", (13, None), types={"T": FLOATS})
def softmax(node: NodeContext) -> Run:
    """Softmax along one axis. x: any shape -> same shape, dtype."""
    xp, axis, fused = array_namespace(node), node.attribute("axis", -1), fused_kernels(node)

    def run(x: Any) -> Any:
        y = None if fused is None else fused.softmax(x, axis)
        return softmax_of(xp, x, axis) if y is None else y

    return run


@kernels.register("Softmax", (1, 12), types={"T": FLOATS})
def softmax_of_rows(node: NodeContext) -> Run:
    """Softmax over all axes from `axis` on together, as it was before version 13. x: any shape -> same shape, dtype."""
    xp, axis = array_namespace(node), node.attribute("axis", 1)

    def run(x: Any) -> Any:
        first = axis + x.ndim if axis < 0 else axis
        rows = x.reshape((prod(x.shape[:first]), prod(x.shape[first:])))
        return softmax_of(xp, rows, 1).reshape(x.shape)

    return run


@kernels.register("LayerNormalization", (17, None), types={"T": FLOATS, "U": FLOATS})
def layer_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias, over the axes from `axis` on.

    x: [..., N], scale and bias broadcast to it -> y: as x; mean and inverse deviation: [..., 1] float32 where they are asked for.
    """
    xp = array_namespace(node)
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)
    outputs, fused = len(node.outputs), fused_kernels(node)

    def run(x: Any, scale: Any, bias: Any = None) -> Any:
        if fused is not None and outputs == 1 and axis in (-1, x.ndim - 1):
            y = fused.normalized(x, scale, bias, epsilon, centred=True)
            if y is not None:
                return y
        axes = tuple(range(axis % x.ndim, x.ndim))
        wide = x.astype(compute_dtype(x.dtype), copy=False)
        mean = wide.mean(axis=axes, keepdims=True)
        centred = wide - mean
        inverse = 1 / xp.sqrt((centred * centred).mean(axis=axes, keepdims=True) + epsilon)
        y = (centred * inverse).astype(x.dtype, copy=False) * scale
        if bias is not None:
            y = y + bias
        if outputs == 1:
            return y
        return (y, mean.astype(np.float32, copy=False), inverse.astype(np.float32, copy=False))[:outputs]

    return run


@kernels.register("RMSNormalization", (23, None), types={"T": FLOATS, "V": FLOATS})
def rms_normalization(node: NodeContext) -> Run:
    """Scaled x / √(mean(x²) + epsilon), over the axes from `axis` on.

    x: [..., N], scale broadcasts to it -> shape of x, dtype of scale.
    """
    xp, fused = array_namespace(node), fused_kernels(node)
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)

    def run(x: Any, scale: Any) -> Any:
        if fused is not None and axis in (-1, x.ndim - 1):
            y = fused.normalized(x, scale, None, epsilon, centred=False)
            if y is not None:
                return y
        axes = tuple(range(axis % x.ndim, x.ndim))
        wide = x.astype(compute_dtype(x.dtype), copy=False)
        normal = wide / xp.sqrt((wide * wide).mean(axis=axes, keepdims=True) + epsilon)
        return normal.astype(scale.dtype, copy=False) * scale

    return run


def _refuse_training(node: NodeView) -> str | None:
    """Statistics of the batch are for training."""
    if node.attribute("training_mode", 0) or any(output is not None for output in node.outputs[1:]):
        return "its kernel doesn't train: training_mode must be 0, with one output"
    return None if node.attribute("spatial", 1) else "its kernel has no spatial=0: statistics are of channels"


@kernels.register("BatchNormalization", (7, None), types={"T": FLOATS}, refuse=_refuse_training)
def batch_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias of each channel. x: [N, C, ...]; the others: [C] -> x's shape."""
    xp, epsilon = array_namespace(node), node.attribute("epsilon", 1e-5)

    def run(x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        wide = compute_dtype(x.dtype)
        factor = scale.astype(wide, copy=False) / xp.sqrt(variance.astype(wide, copy=False) + epsilon)
        shift = bias.astype(wide, copy=False) - mean.astype(wide, copy=False) * factor
        shape = (-1,) + (1,) * (x.ndim - 2)
        return (x.astype(wide, copy=False) * factor.reshape(shape) + shift.reshape(shape)).astype(x.dtype, copy=False)

    return run


@kernels.register("InstanceNormalization", (6, None), types={"T": FLOATS})
def instance_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias, over all of a row's channel. x: [N, C, ...]; scale, bias: [C] -> x's shape."""
    xp, epsilon = array_namespace(node), node.attribute("epsilon", 1e-5)

    def run(x: Any, scale: Any, bias: Any) -> Any:
        axes = tuple(range(2, x.ndim))
        wide = x.astype(compute_dtype(x.dtype), copy=False)
        centred = wide - wide.mean(axis=axes, keepdims=True)
        normal = centred / xp.sqrt((centred * centred).mean(axis=axes, keepdims=True) + epsilon)
        shape = (-1,) + (1,) * len(axes)
        return (normal * scale.reshape(shape) + bias.reshape(shape)).astype(x.dtype, copy=False)

    return run


def inverse_root(xp: Any, x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    """1 / √(mean of x² + epsilon) over `axes`, which stay as axes of size 1. x: [..., N] -> [..., 1]."""
    return 1 / xp.sqrt((x * x).mean(axis=axes, keepdims=True) + epsilon)


@kernels.register("SimplifiedLayerNormalization")
@kernels.register("SimplifiedLayerNormalization", domain=CONTRIB)
def simplified_layer_normalization(node: NodeContext) -> Run:
    """RMSNormalization by its older name. x: [before..., after...]; scale: [after...] -> x's shape; 1/√(...): [before..., 1...]."""
    xp = array_namespace(node)
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)
    wants_root = len(node.outputs) > 1 and node.outputs[1] is not None

    def run(x: Any, scale: Any) -> Any:
        wide = x.astype(compute_dtype(x.dtype), copy=False)
        root = inverse_root(xp, wide, tuple(range(axis % x.ndim, x.ndim)), epsilon)
        y = (wide * root).astype(scale.dtype, copy=False) * scale
        return (y, root.astype(np.float32, copy=False)) if wants_root else y

    return run


def _total(x: Any, skip: Any, bias: Any) -> Any:
    """`x` + skip + bias, in the type to compute in. x: [..., N]; skip: broadcasts to it; bias: [N] -> x's shape."""
    total = x.astype(compute_dtype(x.dtype), copy=False) + skip
    return total if bias is None else total + bias


@kernels.register("SkipSimplifiedLayerNormalization", domain=CONTRIB)
def skip_simplified_layer_normalization(node: NodeContext) -> Run:
    """RMSNormalization of x + skip + bias. x: [batch, time, N]; skip: broadcasts to it; gamma, bias: [N]

    -> x's shape; nothing; 1/√(...): [batch, time, 1] float32; x + skip + bias: x's shape
    """
    xp, epsilon = array_namespace(node), node.attribute("epsilon", 1e-12)
    single = len(node.outputs) == 1

    def run(x: Any, skip: Any, gamma: Any, bias: Any = None) -> Any:
        total = _total(x, skip, bias)
        root = inverse_root(xp, total, (-1,), epsilon)
        y = (total * root * gamma).astype(x.dtype, copy=False)
        return y if single else (y, None, root.astype(np.float32, copy=False), total.astype(x.dtype, copy=False))

    return run


def _normalized(xp: Any, total: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[Any, Any, Any]:
    """LayerNormalization over the last axis: y, mean, 1/√(variance + epsilon)."""
    mean = total.mean(axis=-1, keepdims=True)
    centred = total - mean
    root = inverse_root(xp, centred, (-1,), epsilon)
    y = centred * root * gamma
    return (y if beta is None else y + beta), mean, root


@kernels.register("SkipLayerNormalization", domain=CONTRIB)
def skip_layer_normalization(node: NodeContext) -> Run:
    """LayerNormalization of x + skip + bias. x: [batch, time, N]; skip: broadcasts to it; gamma, beta, bias: [N]

    -> x's shape; mean, 1/√(...): [batch, time, 1] float32; x + skip + bias: x's shape
    """
    xp, epsilon = array_namespace(node), node.attribute("epsilon", 1e-12)
    single = len(node.outputs) == 1

    def run(x: Any, skip: Any, gamma: Any, beta: Any = None, bias: Any = None) -> Any:
        total = _total(x, skip, bias)
        y, mean, root = _normalized(xp, total, gamma, beta, epsilon)
        y = y.astype(x.dtype, copy=False)
        if single:
            return y
        return y, mean.astype(np.float32, copy=False), root.astype(np.float32, copy=False), total.astype(x.dtype, copy=False)

    return run


@kernels.register("EmbedLayerNormalization", domain=CONTRIB)
def embed_layer_normalization(node: NodeContext) -> Run:
    """LayerNormalization of the embeddings of words, positions and segments, added up.

    ids, segment ids, position ids, mask: [batch, time] int32; embeddings: [count, N] each; gamma, beta: [N]
    -> [batch, time, N]; how many of each row's mask come before its first 0: [batch] int32; the sum: [batch, time, N]
    """
    xp, epsilon = array_namespace(node), node.attribute("epsilon", 1e-12)

    def run(
        ids: Any,
        segments: Any,
        words: Any,
        positions: Any,
        segment_embedding: Any,
        gamma: Any,
        beta: Any,
        mask: Any = None,
        position_ids: Any = None,
    ) -> Any:
        wide = compute_dtype(words.dtype)
        total = xp.take(words, ids, axis=0).astype(wide, copy=False)
        total = total + (positions[: ids.shape[1]] if position_ids is None else xp.take(positions, position_ids, axis=0))
        if segments is not None and segment_embedding is not None:
            total = total + xp.take(segment_embedding, segments, axis=0)
        y, _, _ = _normalized(xp, total, gamma, beta, epsilon)
        return y.astype(words.dtype, copy=False), _lengths(xp, ids, mask), total.astype(words.dtype, copy=False)

    return run


def _lengths(xp: Any, ids: Any, mask: Any) -> Any:
    """How many of each row's elements come before the first 0 of its mask; 0 without a mask. ids, mask: [batch, time] -> [batch] int32."""
    if mask is None:
        return xp.zeros(ids.shape[:1], np.int32)
    return (xp.cumsum(mask == 0, axis=1) == 0).sum(axis=1).astype(np.int32)
