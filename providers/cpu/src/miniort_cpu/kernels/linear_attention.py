"""Sequence mixing with a state of fixed size instead of a cache that grows: LinearAttention, CausalConvWithState."""

from __future__ import annotations

from math import sqrt

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT32, as_dtype, widen
from miniort_cpu.kernels.activation import sigmoid

kernels = KernelTable("cpu")

GATED = ("gated", "gated_delta")
CORRECTED = ("delta", "gated_delta")
RULES = ("linear", *GATED, "delta")


@kernels.register("LinearAttention", versions=(27, None))
def linear_attention(node: NodeContext) -> Run:
    """`scale` · qᵀ S at each time, S a sum of k ⊗ v that decays, or that takes back what it said for k before.

    Yang et al. 2024, arXiv:2412.06464, with the others as special cases.

    q: [batch, T, heads · K]; k: [batch, T, kv heads · K]; v: [batch, T, kv heads · V]; past: [batch, kv heads, K, V];
    decay: [batch, T, kv heads] or [batch, T, kv heads · K], a logarithm; beta: [batch, T, kv heads or 1]
    -> [batch, T, heads · V]; present: [batch, kv heads, K, V]
    """
    heads, kv_heads = node.attribute("q_num_heads"), node.attribute("kv_num_heads")
    rule, scale = node.attribute("update_rule", "gated_delta"), node.attribute("scale", 0.0)
    if rule not in RULES:
        raise KernelError(f"node {node.name!r} (LinearAttention): its update_rule must be one of {', '.join(RULES)}, found {rule!r}")
    gated, corrected = rule in GATED, rule in CORRECTED
    allocate = node.provider.allocate

    def run(
        q: Array, k: Array, v: Array, past: Array | None = None, decay: Array | None = None, beta: Array | None = None
    ) -> tuple[Array, Array]:
        if gated != (decay is not None) or corrected != (beta is not None):
            raise ValueError(
                f"the rule {rule!r} wants {'a' if gated else 'no'} decay and {'a' if corrected else 'no'} beta, found "
                f"{'none' if decay is None else 'one'} and {'none' if beta is None else 'one'}"
            )
        batch, length, _ = q.shape
        group = heads // kv_heads
        queries = widen(q).reshape(batch, length, kv_heads, group, -1)
        keys, values = (widen(each).reshape(batch, length, kv_heads, 1, -1) for each in (k, v))
        depth, width = keys.shape[4], values.shape[4]
        state = np.zeros((batch, kv_heads, depth, width), FLOAT32) if past is None else past.astype(FLOAT32)
        kept = None if decay is None else np.exp(widen(decay).reshape(batch, length, kv_heads, -1, 1), out=...)
        rate = None if beta is None else widen(beta).reshape(batch, length, -1, 1, 1)
        y = allocate((batch, length, kv_heads, group, width), FLOAT32)
        for time in range(length):
            key, value = keys[:, time], values[:, time]  # [batch, kv heads, 1, K or V]
            if kept is not None:
                np.multiply(state, kept[:, time], out=state)
            if rate is not None:
                value = rate[:, time] * (value - np.matmul(key, state))
            np.add(state, key.swapaxes(2, 3) * value, out=state)
            np.matmul(queries[:, time], state, y[:, time])
        np.multiply(y, scale or 1 / sqrt(depth), out=y)
        out = as_dtype(y.reshape(batch, length, heads * width), q.dtype)
        return out, as_dtype(state, q.dtype if past is None else past.dtype)

    return run


@kernels.register("CausalConvWithState", versions=(27, None))
def causal_convolution(node: NodeContext) -> Run:
    """Each channel convolved along time with its own kernel, which sees no later element, only earlier ones and the state before them.

    x: [batch, channels, T]; weight: [channels, 1, k]; bias: [channels]; past: [batch, channels, k - 1], zeros if absent
    -> x's shape; present: [batch, channels, k - 1], the last elements seen
    """
    activation = node.attribute("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise KernelError(f"node {node.name!r} (CausalConvWithState): its activation must be silu, swish or none, found {activation!r}")
    allocate = node.provider.allocate

    def run(x: Array, weight: Array, bias: Array | None = None, past: Array | None = None) -> tuple[Array, Array]:
        batch, channels, length = x.shape
        size = weight.shape[2]
        seen = allocate((batch, channels, size - 1 + length), x.dtype)
        seen[:, :, : size - 1] = 0 if past is None else past
        seen[:, :, size - 1 :] = x
        wide, kernel = widen(seen), widen(weight)
        y = allocate(x.shape, wide.dtype)
        np.multiply(wide[:, :, :length], kernel[:, :, 0], out=y)
        for place in range(1, size):
            np.add(y, wide[:, :, place : place + length] * kernel[:, :, place], out=y)
        if bias is not None:
            np.add(y, widen(bias)[:, None], out=y)
        if activation != "none":
            gate = np.empty_like(y)
            sigmoid(y, gate)
            np.multiply(y, gate, out=y)
        return as_dtype(y, x.dtype), seen[:, :, length:].copy()

    return run
