"""Scaled dot-product attention over an array namespace: what the Attention ops of all domains have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from miniort_cuda.element_types import FLOAT32, compute_dtype


@dataclass(frozen=True)
class Scores:
    """What may be done to the scores before the softmax.

    cap: c · tanh(scores / c), where it isn't 0. additions: broadcast to [B, H, N, T]; their last axis may be shorter than T, and hides
    the keys behind it. hidden: bool, broadcast to [B, H, N, T], True where a query may not see a key. sink: [H], a score with no value.
    """

    scale: float = 0.0
    cap: float = 0.0
    additions: Sequence[Any] = ()
    hidden: Sequence[Any] = ()
    sink: Any = None


def split_heads(x: Any, heads: int) -> Any:
    """[batch, time, heads · size] -> [batch, heads, time, size], a view."""
    batch, time, width = x.shape
    return x.reshape((batch, time, heads, width // heads)).transpose(0, 2, 1, 3)


def join_heads(x: Any) -> Any:
    """[batch, heads, time, size] -> [batch, time, heads · size]."""
    batch, heads, time, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape((batch, time, heads * size))


def raw_scores(xp: Any, q: Any, k: Any, scale: float) -> Any:
    """`scale` · q · kᵀ. q: [B, H, N, D]; k: [B, Hkv, T, D] -> [B, H, N, T], float32 at least.

    The queries of all heads that share a key head are the rows of one product, so that keys are never repeated.
    """
    batch, heads, count, size = q.shape
    kv_heads, length = k.shape[1:3]
    grouped = (q * (scale or sqrt(1 / size))).astype(k.dtype, copy=False).reshape((batch, kv_heads, heads // kv_heads * count, size))
    scores = xp.matmul(grouped, k.swapaxes(2, 3))
    return scores.astype(compute_dtype(q.dtype), copy=False).reshape((batch, heads, count, length))


def masked(xp: Any, scores: Any, how: Scores) -> Any:
    """The scores with everything added and hidden. [B, H, N, T] -> same."""
    length = scores.shape[-1]
    for addition in how.additions:
        covered = addition.shape[-1]
        if covered in (1, length):
            scores = scores + addition.astype(scores.dtype, copy=False)
        else:
            hides = xp.full((*addition.shape[:-1], length - covered), -np.inf, scores.dtype)
            scores = scores + xp.concatenate((addition.astype(scores.dtype, copy=False), hides), axis=-1)
    for hidden in how.hidden:
        scores = xp.where(hidden, xp.full((), -np.inf, scores.dtype), scores)
    return scores


def softmax_with_sink(xp: Any, scores: Any, sink: Any) -> Any:
    """Softmax over the last axis, a row that sees nothing being zeros. scores: [B, H, N, T]; sink: [H] or None."""
    if scores.shape[-1] == 0:
        return scores
    peak = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        sink = sink.astype(scores.dtype, copy=False).reshape((-1, 1, 1))
        peak = xp.maximum(peak, sink)
    e = xp.exp(scores - xp.maximum(peak, float(np.finfo(np.float32).min)))
    total = e.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + xp.exp(sink - peak)
    return e / xp.where(total == 0, xp.ones_like(total), total)


def weighted_sum(xp: Any, weights: Any, v: Any, dtype: Any) -> Any:
    """`weights` · v. weights: [B, H, N, T]; v: [B, Hkv, T, D] -> [B, H, N, D]."""
    batch, heads, count, length = weights.shape
    kv_heads, size = v.shape[1], v.shape[3]
    grouped = weights.astype(v.dtype, copy=False).reshape((batch, kv_heads, heads // kv_heads * count, length))
    return xp.matmul(grouped, v).reshape((batch, heads, count, size)).astype(dtype, copy=False)


def capped(xp: Any, scores: Any, cap: float) -> Any:
    """The scores, softly kept within ±cap where it isn't 0."""
    return xp.tanh(scores * (1 / cap)) * cap if cap else scores


def attend(xp: Any, q: Any, k: Any, v: Any, how: Scores) -> Any:
    """softmax(cap(scale · q · kᵀ) + additions) · v. q: [B, H, N, D]; k, v: [B, Hkv, T, D] -> [B, H, N, D] of v's size."""
    scores = masked(xp, capped(xp, raw_scores(xp, q, k, how.scale), how.cap), how)
    return weighted_sum(xp, softmax_with_sink(xp, scores, how.sink), v, q.dtype)


def mask_parts(xp: Any, mask: Any) -> tuple[list[Any], list[Any]]:
    """A mask as (additions, hidden): a bool one (True: may see) hides, a float one is added."""
    if mask is None:
        return [], []
    if mask.dtype == np.bool_:
        return [], [xp.logical_not(mask)]
    return [mask], []


def float32_or_wider(x: Any) -> Any:
    """`x` in the type to compute in."""
    return x.astype(np.promote_types(x.dtype, FLOAT32), copy=False)
