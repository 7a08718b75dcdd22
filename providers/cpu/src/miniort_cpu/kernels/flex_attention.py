"""Attention whose scores and probabilities pass through graphs of the model's own: FlexAttention, of the domain ai.onnx.preview."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, dtype_from_onnx
from miniort_cpu.floating_point import as_dtype, compute_dtype, widen
from miniort_cpu.kernels.softmax import softmax

kernels = KernelTable("cpu")


@kernels.register("FlexAttention", versions=(1, None), domain="ai.onnx.preview")
def flex_attention(node: NodeContext) -> Run:
    """prob_mod(softmax(score_mod(scale · q · kᵀ))) · v, either graph absent for none.

    q: [B, H, N, D]; k: [B, Hkv, T, D]; v: [B, Hkv, T, Dv], H a multiple of Hkv -> [B, H, N, Dv], q's dtype. The graphs take and give
    [B, H, N, T] of type `softmax_precision`, without it float32, or double for doubles.
    """
    scale, precision = node.attribute("scale", None), node.attribute("softmax_precision", None)
    score_mod, prob_mod = node.subgraphs.get("score_mod"), node.subgraphs.get("prob_mod")
    allocate = node.provider.allocate

    def run(scope: Any, q: Array, k: Array, v: Array) -> Array:
        batch, heads, count, size = q.shape
        kv_heads, length = k.shape[1:3]
        wanted = compute_dtype(q.dtype) if precision is None else dtype_from_onnx(precision)
        scaled = widen(q) * (sqrt(1 / size) if scale is None else scale)
        grouped = scaled.reshape(batch, kv_heads, heads // kv_heads * count, size)  # the queries of all heads that share a key head
        values = np.matmul(grouped, widen(k).swapaxes(2, 3)).reshape(batch, heads, count, length).astype(wanted)
        if score_mod is not None:
            values = score_mod(scope, values)[0]
        values = as_dtype(softmax(allocate, widen(values), -1), wanted)
        if prob_mod is not None:
            values = prob_mod(scope, values)[0]
        values = widen(values)
        y = np.matmul(values.reshape(batch, kv_heads, -1, length), as_dtype(widen(v), values.dtype))
        return as_dtype(y.reshape(batch, heads, count, v.shape[3]), q.dtype)

    return run if node.subgraphs else lambda q, k, v: run(None, q, k, v)
