"""Scaled dot-product attention: Attention."""

from __future__ import annotations

from math import sqrt

import numpy as np

from miniort.generation.cache import BlockedView
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType, dtype_from_onnx
from miniort_cpu.buffers import Allocate, copied
from miniort_cpu.floating_point import FLOAT64, as_dtype, compute_dtype, widen

kernels = KernelTable("cpu")

RAW, CAPPED, MASKED, NORMALIZED = range(4)
"""What `qk_matmul_output_mode` asks for: the scores as they are, after the soft cap, with the mask too, or after the softmax."""


@kernels.register("Attention", versions=(23, None), block_inputs=(1, 2))
def attention(node: NodeContext) -> Run:
    """softmax(scale · q · kᵀ + mask) · v (Vaswani et al. 2017, arXiv:1706.03762); a query that may see no key gives zeros.

    q: [batch, heads, N, dim] or [batch, N, heads · dim]; k, v: [batch, kv heads, M, dim] or [batch, M, kv heads · dim], heads a multiple
    of kv heads; mask: broadcasts to [batch, heads, N, T], bool (True: may see) or float (added), its last axis may be shorter;
    past key, value: [batch, kv heads, P, dim], put before k and v; valid: [batch] int64, how many keys of each row are no padding
    -> y: as q, with v's dim; present key, value: [batch, kv heads, T, dim], T = P + M; scores: [batch, heads, N, T]

    k and v may be views in blocks, whose arrays are then read where they are.
    """
    causal, mode = bool(node.attribute("is_causal", 0)), node.attribute("qk_matmul_output_mode", 0)
    softcap, scale = node.attribute("softcap", 0.0), node.attribute("scale", None)
    q_heads, kv_heads = node.attribute("q_num_heads", 0), node.attribute("kv_num_heads", 0)
    window = node.attribute("left_window_size", -1), node.attribute("right_window_size", -1)
    precision = node.attribute("softmax_precision", None)
    in_double = precision is not None and dtype_from_onnx(precision) == FLOAT64
    allocate = node.provider.allocate
    wants_present = any(output is not None for output in node.outputs[1:3])
    wants_scores = len(node.outputs) > 3 and node.outputs[3] is not None

    def run(
        q: Array,
        k: Array | BlockedView,
        v: Array | BlockedView,
        mask: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        valid: Array | None = None,
    ) -> Array | tuple[Array | BlockedView | None, ...]:
        packed = q.ndim == 3
        if packed:
            q, k, v = (_split_heads(np.asarray(x), count) for x, count in ((q, q_heads), (k, kv_heads), (v, kv_heads)))
        offset: int | Array = 0
        if past_key is not None and past_value is not None:
            offset = past_key.shape[2]
            k, v = _joined(allocate, past_key, np.asarray(k)), _joined(allocate, past_value, np.asarray(v))
        elif wants_present:
            k, v = copied(allocate, np.asarray(k)), copied(allocate, np.asarray(v))
        if past_key is None and valid is not None:
            offset = valid.reshape(-1, 1, 1, 1) - q.shape[2]

        kept: Array | None = None  # the scores that were asked for
        scores = _scores(allocate, q, k, sqrt(1 / q.shape[3]) if scale is None else scale)
        if wants_scores and mode == RAW:
            kept = scores.astype(q.dtype)
        if softcap:
            np.divide(scores, softcap, out=scores)
            np.tanh(scores, out=scores)
            np.multiply(scores, softcap, out=scores)
        if wants_scores and mode == CAPPED:
            kept = scores.astype(q.dtype)
        _apply_masks(scores, mask, causal, window, offset, valid)
        if wants_scores and mode == MASKED:
            kept = scores.astype(q.dtype)
        if in_double:
            scores = scores.astype(FLOAT64)

        weights, total = _exponentials(scores)
        if wants_scores and mode == NORMALIZED:
            kept = np.divide(weights, total, out=...).astype(q.dtype)
        y = _weighted_sum(allocate, weights, total, v, q.dtype, packed)
        return (y, k, v, kept) if wants_present or wants_scores else y

    return run


def _split_heads(x: Array, heads: int) -> Array:
    """[batch, time, heads · dim] -> [batch, heads, time, dim], a view."""
    batch, time, width = x.shape
    return x.reshape(batch, time, heads, width // heads).transpose(0, 2, 1, 3)


def _joined(allocate: Allocate, past: Array, new: Array) -> Array:
    """[batch, heads, P, dim] and [batch, heads, M, dim] -> [batch, heads, P + M, dim]."""
    batch, heads, length, size = past.shape
    return np.concatenate((past, new), 2, allocate((batch, heads, length + new.shape[2], size), past.dtype))


def _scores(allocate: Allocate, q: Array, k: Array | BlockedView, scale: float) -> Array:
    """`scale` · q · kᵀ. q: [B, H, N, D]; k: [B, Hkv, T, D] -> [B, H, N, T].

    The queries of all heads that share a key head are the rows of one product, so that keys are never repeated. Keys in blocks fill the
    scores block by block: they're so much smaller than the keys that one softmax over all of them is cheaper than a running one.
    """
    batch, heads, count, size = q.shape
    kv_heads, length = k.shape[1:3]
    dtype = compute_dtype(q.dtype)
    scaled = np.multiply(widen(q), scale, out=allocate(q.shape, dtype))
    grouped = scaled.reshape(batch, kv_heads, heads // kv_heads * count, size)
    scores = allocate((*grouped.shape[:3], length), dtype)
    if isinstance(k, BlockedView):
        for rows, start, keys in k.blocks:
            np.matmul(grouped[rows], widen(keys).swapaxes(2, 3), scores[rows, ..., start : start + keys.shape[2]])
    else:
        np.matmul(grouped, widen(k).swapaxes(2, 3), scores)
    return scores.reshape(batch, heads, count, length)


def _apply_masks(
    scores: Array, mask: Array | None, causal: bool, window: tuple[int, int], offset: int | Array, valid: Array | None
) -> None:
    """Add a float mask to the scores, and set those to -inf that a query may not see. scores: [B, H, N, T], written in place.

    offset: how many keys come before the first query's own, one number or [B, 1, 1, 1].
    """
    count, length = scores.shape[2:]
    allowed: list[Array] = []
    if mask is not None:
        covered = mask.shape[-1]
        if mask.dtype == np.bool_:
            np.copyto(scores[..., :covered], -np.inf, where=~mask)
        else:
            np.add(scores[..., :covered], mask, out=scores[..., :covered])
        scores[..., covered:] = -np.inf
    key = np.arange(length)
    left, right = window
    if (causal and not (count == 1 and isinstance(offset, int) and offset == length - 1)) or left >= 0 or right >= 0:
        position = offset + np.arange(count)[:, None]  # of each query, counted like the keys: [N, 1] or [B, 1, N, 1]
        if causal:
            allowed.append(key <= position)
        if left >= 0:
            allowed.append(key >= position - left)
        if right >= 0:
            allowed.append(key <= position + right)
    if valid is not None:
        allowed.append(key < valid.reshape(-1, 1, 1, 1))
    for seen in allowed:
        np.copyto(scores, -np.inf, where=~seen)


def _exponentials(scores: Array) -> tuple[Array, Array]:
    """exp(scores - their maximum), in place, and its sum: [..., T] -> [..., T], [..., 1]. Where all are -inf: zeros, and a sum of 1."""
    peak = np.maximum.reduce(scores, -1, keepdims=True, initial=-np.inf)
    np.copyto(peak, 0, where=np.isneginf(peak))
    np.subtract(scores, peak, out=scores)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, -1, keepdims=True)
    np.copyto(total, 1, where=total == 0)
    return scores, total


def _weighted_sum(allocate: Allocate, weights: Array, total: Array, v: Array | BlockedView, dtype: DType, packed: bool) -> Array:
    """`weights` · v / total. weights: [B, H, N, T]; total: [B, H, N, 1]; v: [B, Hkv, T, D] -> [B, H, N, D], packed [B, N, H · D].

    Dividing after the product costs D divisions per query instead of T, and puts the heads where they belong on the way.
    """
    batch, heads, count, length = weights.shape
    kv_heads, size = v.shape[1], v.shape[3]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads * count, length)
    sums = allocate((*grouped.shape[:3], size), weights.dtype)
    if isinstance(v, BlockedView):
        sums.fill(0)
        for rows, start, values in v.blocks:
            sums[rows] += np.matmul(grouped[rows, ..., start : start + values.shape[2]], as_dtype(values, weights.dtype))
    else:
        np.matmul(grouped, as_dtype(v, weights.dtype), sums)
    sums = sums.reshape(batch, heads, count, size)
    if not packed:
        return as_dtype(np.divide(sums, total, out=sums), dtype)
    y = allocate((batch, count, heads, size), weights.dtype)
    np.divide(sums, total, out=y.transpose(0, 2, 1, 3))
    return as_dtype(y.reshape(batch, count, heads * size), dtype)
