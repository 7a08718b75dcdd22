"""Attention of the default domain."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import dtype_from_onnx
from miniort_cuda.element_types import FLOATS
from miniort_cuda.fused import fused_kernels
from miniort_cuda.namespace import array_namespace
from miniort_cuda.scaled_dot_product import (
    Scores,
    capped,
    join_heads,
    mask_parts,
    masked,
    raw_scores,
    softmax_with_sink,
    split_heads,
    weighted_sum,
)

kernels = KernelTable("cuda")

RAW, CAPPED, MASKED, NORMALIZED = range(4)
"""What `qk_matmul_output_mode` asks for: the scores as they are, after the soft cap, with the mask too, or after the softmax."""


@kernels.register("Attention", (23, None), types={"T1": FLOATS, "T2": FLOATS})
def attention(node: NodeContext) -> Run:
    """softmax(scale · q · kᵀ + mask) · v (Vaswani et al. 2017, arXiv:1706.03762); a query that may see no key gives zeros.

    q: [batch, heads, N, dim] or [batch, N, heads · dim]; k, v: [batch, kv heads, M, dim] or [batch, M, kv heads · dim]; mask: broadcasts
    to [batch, heads, N, T], bool (True: may see) or float (added), its last axis may be shorter; past key, value: [batch, kv heads, P,
    dim], put before k and v; valid: [batch] int64, how many keys of each row are no padding
    -> y: as q, with v's dim; present key, value: [batch, kv heads, T, dim], T = P + M; scores: [batch, heads, N, T]
    """
    xp, fused = array_namespace(node), fused_kernels(node)
    causal, mode = bool(node.attribute("is_causal", 0)), node.attribute("qk_matmul_output_mode", 0)
    cap, scale = node.attribute("softcap", 0.0), node.attribute("scale", 0.0)
    q_heads, kv_heads = node.attribute("q_num_heads", 0), node.attribute("kv_num_heads", 0)
    left, right = node.attribute("left_window_size", -1), node.attribute("right_window_size", -1)
    precision = node.attribute("softmax_precision", None)
    in_double = precision is not None and dtype_from_onnx(precision) == np.float64
    wants_present = any(output is not None for output in node.outputs[1:3])
    wants_scores = len(node.outputs) > 3 and node.outputs[3] is not None

    def run(q: Any, k: Any, v: Any, mask: Any = None, past_key: Any = None, past_value: Any = None, valid: Any = None) -> Any:
        packed = q.ndim == 3
        if packed:
            q, k, v = split_heads(q, q_heads), split_heads(k, kv_heads), split_heads(v, kv_heads)
        offset: Any = 0
        if past_key is not None:
            offset = past_key.shape[2]
            k, v = xp.concatenate((past_key, k), axis=2), xp.concatenate((past_value, v), axis=2)
        elif wants_present:
            k, v = k.copy(), v.copy()
        elif valid is not None:
            offset = valid.reshape((-1, 1, 1, 1)) - q.shape[2]
        count, length = q.shape[2], k.shape[2]
        is_plain = not (cap or wants_scores or in_double or left >= 0 or right >= 0) and valid is None
        sees_all = count == 1 and isinstance(offset, int) and offset == length - 1
        if fused is not None and is_plain and (sees_all or not causal):
            y = fused.attention(q, k, v, mask, scale)
            if y is not None:
                y = join_heads(y) if packed else y
                return (y, k, v) if wants_present else y
        additions, hidden = mask_parts(xp, mask)
        if mask is not None and mask.dtype == np.bool_ and mask.shape[-1] not in (1, length):
            hides = xp.ones((*mask.shape[:-1], length - mask.shape[-1]), np.bool_)
            hidden = [xp.concatenate((hidden[0], hides), axis=-1)]
        if (causal and not sees_all) or left >= 0 or right >= 0:
            key = xp.arange(length)
            position = offset + xp.arange(count).reshape((-1, 1))  # of each query, counted like the keys
            hidden += [key > position] if causal else []
            hidden += [key < position - left] if left >= 0 else []
            hidden += [key > position + right] if right >= 0 else []
        if valid is not None:
            hidden.append(xp.arange(length) >= valid.reshape((-1, 1, 1, 1)))

        scores = raw_scores(xp, q, k, scale)
        kept = [scores]
        scores = capped(xp, scores, cap)
        kept.append(scores)
        scores = masked(xp, scores, Scores(additions=additions, hidden=hidden))
        kept.append(scores)
        weights = softmax_with_sink(xp, scores.astype(np.float64) if in_double else scores, None)
        kept.append(weights)
        y = weighted_sum(xp, weights, v, q.dtype)
        y = join_heads(y) if packed else y
        if wants_scores:
            return y, k, v, kept[mode].astype(q.dtype)
        return (y, k, v) if wants_present else y

    return run
