"""Normalization of com.microsoft over the last axis, with the sum before it: SkipLayerNormalization and its kin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, ValueInfo
from miniort_cpu.floating_point import FLOAT32, as_dtype, widen
from miniort_cpu.kernels.contrib_activation import CONTRIB
from miniort_cpu.kernels.normalization import layer_normalization, rms_normalization

kernels = KernelTable("cpu")


def _inverse_root(x: Array, axis: int, epsilon: float) -> Array:
    """1 / √(mean of x² + epsilon) over the axes from `axis` on, which stay as axes of size 1. x: [before..., after...] -> float32."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    return as_dtype(np.reciprocal(np.sqrt(np.mean(np.square(widen(x)), axes, keepdims=True) + epsilon), out=...), FLOAT32)


@kernels.register("SimplifiedLayerNormalization")
@kernels.register("SimplifiedLayerNormalization", domain=CONTRIB)
def simplified_layer_normalization(node: NodeContext) -> Run:
    """RMSNormalization by its older name. x: [before..., after...]; scale: [after...] -> x's shape; 1/√(...): [before..., 1...] float32."""
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)
    normalize = rms_normalization(replace(node, attributes={"axis": axis, "epsilon": epsilon}))
    wants_root = len(node.outputs) > 1 and node.outputs[1] is not None

    def run(x: Array, scale: Array) -> Array | tuple[Array, Array]:
        y: Array = normalize(x, scale)
        return (y, _inverse_root(x, axis, epsilon)) if wants_root else y

    return run


def _total(node: NodeContext, x: Array, skip: Array, bias: Array | None) -> Array:
    """`x` + skip + bias, in the type to compute in. x: [..., N]; skip: broadcasts to it; bias: [N] -> x's shape."""
    wide = widen(x)
    total = np.add(wide, widen(skip), out=node.provider.allocate(x.shape, wide.dtype))
    return total if bias is None else np.add(total, widen(bias), out=total)


@kernels.register("SkipLayerNormalization", domain=CONTRIB)
def skip_layer_normalization(node: NodeContext) -> Run:
    """LayerNormalization of x + skip + bias. x: [batch, time, N]; skip: broadcasts to it; gamma, beta, bias: [N]

    -> x's shape; mean, 1/√(...): [batch, time, 1] float32; x + skip + bias: x's shape
    """
    epsilon = node.attribute("epsilon", 1e-12)
    statistics = any(output is not None for output in node.outputs[1:3])
    info = ValueInfo("statistics") if statistics else None
    normalize = layer_normalization(replace(node, attributes={"epsilon": epsilon}, outputs=(node.outputs[0], info, info)))
    wants_sum = len(node.outputs) > 3 and node.outputs[3] is not None

    def run(x: Array, skip: Array, gamma: Array, beta: Array | None = None, bias: Array | None = None) -> Array | tuple[Array | None, ...]:
        total = _total(node, x, skip, bias)
        result = normalize(total, widen(gamma), None if beta is None else widen(beta))
        y, mean, root = result if statistics else (result, None, None)
        y = as_dtype(y, x.dtype)
        return (y, mean, root, as_dtype(total, x.dtype)) if statistics or wants_sum else y

    return run


@kernels.register("SkipSimplifiedLayerNormalization", domain=CONTRIB)
def skip_simplified_layer_normalization(node: NodeContext) -> Run:
    """RMSNormalization of x + skip + bias. x: [batch, time, N]; skip: broadcasts to it; gamma, bias: [N]

    -> x's shape; nothing; 1/√(...): [batch, time, 1] float32; x + skip + bias: x's shape
    """
    epsilon = node.attribute("epsilon", 1e-12)
    normalize = rms_normalization(replace(node, attributes={"epsilon": epsilon}))
    wants_root = len(node.outputs) > 2 and node.outputs[2] is not None
    wants_sum = len(node.outputs) > 3 and node.outputs[3] is not None

    def run(x: Array, skip: Array, gamma: Array, bias: Array | None = None) -> Array | tuple[Array | None, ...]:
        total = _total(node, x, skip, bias)
        y = as_dtype(normalize(total, widen(gamma)), x.dtype)
        if not (wants_root or wants_sum):
            return y
        return y, None, _inverse_root(total, -1, epsilon) if wants_root else None, as_dtype(total, x.dtype)

    return run


@kernels.register("EmbedLayerNormalization", domain=CONTRIB)
def embed_layer_normalization(node: NodeContext) -> Run:
    """LayerNormalization of the embeddings of words, positions and segments, added up.

    ids, segment ids, position ids, mask: [batch, time] int32; embeddings: [count, N] each; gamma, beta: [N]
    -> [batch, time, N]; index of the first 0 in each row of the mask: [batch] int32; the sum: [batch, time, N]
    """
    normalize = layer_normalization(replace(node, attributes={"epsilon": node.attribute("epsilon", 1e-12)}, outputs=node.outputs[:1]))

    def run(
        ids: Array,
        segments: Array | None,
        words: Array,
        positions: Array,
        segment_embedding: Array | None,
        gamma: Array,
        beta: Array,
        mask: Array | None = None,
        position_ids: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        total = widen(words[ids])
        total = total + widen(positions[: ids.shape[1]] if position_ids is None else positions[position_ids])
        if segments is not None and segment_embedding is not None:
            total += widen(segment_embedding[segments])
        y = as_dtype(normalize(total, widen(gamma), widen(beta)), words.dtype)
        return y, _lengths(ids, mask), as_dtype(total, words.dtype)

    return run


def _lengths(ids: Array, mask: Array | None) -> Array:
    """How many of each row's elements come before the first 0 of its mask; 0 without a mask. ids, mask: [batch, time] -> [batch] int32."""
    if mask is None:
        return np.zeros(ids.shape[0], np.int32)
    return np.add.reduce(np.logical_and.accumulate(mask != 0, 1), 1, dtype=np.int32)  # type: ignore[no-any-return]
