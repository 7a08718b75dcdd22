"""Builders of attention, and of what goes with it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse
from miniort.types import Array


def mask(d: Draws, dtype: Any, shape: tuple[int, ...]) -> Array:
    """True where a key is seen, or a bias; the first key is always seen."""
    if dtype != np.dtype(bool):
        return d.ordinary(dtype, shape, -2, 2)
    seen = d.array(dtype, shape)
    seen[..., 0] = True
    return seen


@builds("Attention")
def attention(d: Draws, operator: Operator) -> NodeCase:
    """Packed or by head, grouped heads, masks of two to four axes, past keys, windows; the scores at any stage."""
    dtype = d.dtype(operator, "T1")
    batch, kv_heads, queries, new, past = d.integer(1, 2), d.integer(1, 2), d.integer(1, 3), d.integer(1, 4), d.integer(1, 3)
    heads = kv_heads * d.integer(1, 2)
    size, v_size = d.integer(1, 4), d.integer(1, 4)
    q = d.ordinary(dtype, (batch, heads, queries, size), -2, 2)
    k = d.ordinary(dtype, (batch, kv_heads, new, size), -2, 2)
    v = d.ordinary(dtype, (batch, kv_heads, new, v_size), -2, 2)
    attributes = d.some(scale=d.number(0.25, 1.5), softcap=d.number(0.5, 3), is_causal=d.integer(0, 1))
    if operator.has_attribute("left_window_size"):
        attributes |= d.some(left_window_size=d.integer(-1, 3), right_window_size=d.integer(-1, 3))
    cache = d.choice(["none", "past", "lengths"] if operator.version >= 24 else ["none", "past"])
    total = new + (past if cache == "past" else 0)
    mask_type = d.choice([np.dtype(bool), dtype])
    mask_shape = ((batch, heads, queries, total), (1, 1, queries, total), (batch, 1, 1, total), (queries, total))
    inputs: list[Any] = [q, k, v, mask(d, mask_type, d.choice(mask_shape)) if d.boolean() else None]
    if cache == "past":
        inputs += [d.ordinary(dtype, (batch, kv_heads, past, size), -2, 2), d.ordinary(dtype, (batch, kv_heads, past, v_size), -2, 2)]
    elif cache == "lengths":
        inputs += [None, None, d.array(np.dtype(np.int64), (batch,), 1, new)]
    outputs = d.choice([1, 4] if cache == "lengths" else [1, 3, 4])
    skipped = frozenset([1, 2]) if outputs == 4 and (cache == "lengths" or d.boolean()) else frozenset()
    if outputs == 4:
        attributes |= d.some(qk_matmul_output_mode=d.integer(0, 3))
    if d.boolean():
        for index, (array, count) in enumerate(((q, heads), (k, kv_heads), (v, kv_heads))):
            inputs[index] = array.transpose(0, 2, 1, 3).reshape(batch, array.shape[2], count * array.shape[3])
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    if d.integer(0, 4) == 0:
        attributes["softmax_precision"] = onnx.TensorProto.FLOAT
    return NodeCase(d.trimmed(inputs), attributes, outputs, skipped=skipped, tolerance=1e-3, atol=0.1 if is_coarse(dtype) else 1e-4)


@builds("RotaryEmbedding")
def rotary_embedding(d: Draws, operator: Operator) -> NodeCase:
    """Whole heads or a part of them; halves or pairs; angles by position or per token."""
    dtype = d.dtype(operator)
    batch, heads, length, half = d.integer(1, 2), d.integer(1, 3), d.integer(1, 4), d.integer(1, 3)
    part = d.integer(1, half)
    x = d.ordinary(dtype, (batch, heads, length, 2 * half))
    attributes = d.some(interleaved=d.integer(0, 1)) | ({"rotary_embedding_dim": 2 * part} if part < half else {})
    if d.boolean():
        x = x.transpose(0, 2, 1, 3).reshape(batch, length, heads * 2 * half)
        attributes["num_heads"] = heads
    positions = d.array(np.dtype(np.int64), (batch, length), 0, 4) if d.boolean() else None
    shape = (batch, length, part) if positions is None else (5, part)
    angles = d.ordinary(np.dtype(np.float64), shape, -3, 3)
    inputs = [x, np.cos(angles).astype(dtype), np.sin(angles).astype(dtype), positions]
    return NodeCase(d.trimmed(inputs), attributes, constants=d.constants(1, 2), atol=0.1 if is_coarse(dtype) else None)


@builds("LinearAttention")
def linear_attention(d: Draws, operator: Operator) -> NodeCase:
    """A state that each token decays and adds to, by each of the rules."""
    dtype = d.dtype(operator)
    batch, length, kv_heads, size, v_size = d.integer(1, 2), d.integer(1, 4), d.integer(1, 2), d.integer(1, 3), d.integer(1, 3)
    heads = kv_heads * d.integer(1, 2)
    rule = d.choice(["linear", "gated", "delta", "gated_delta"])
    decay_size = kv_heads * (size if d.boolean() else 1)
    state_type = d.dtype(operator, "S")
    inputs = [
        d.ordinary(dtype, (batch, length, heads * size), -1, 1),
        d.ordinary(dtype, (batch, length, kv_heads * size), -0.5, 0.5),
        d.ordinary(dtype, (batch, length, kv_heads * v_size), -1, 1),
        d.ordinary(state_type, (batch, kv_heads, size, v_size), -1, 1) if d.boolean() else None,
        d.ordinary(dtype, (batch, length, decay_size), -1, 0) if "gated" in rule else None,
        d.ordinary(dtype, (batch, length, kv_heads if d.boolean() else 1), 0, 1) if "delta" in rule else None,
    ]
    if inputs[3] is None:
        state_type = dtype
    attributes = {"q_num_heads": heads, "kv_num_heads": kv_heads} | d.some(scale=d.number(0.25, 1.5), chunk_size=d.integer(1, 4))
    if rule != "gated_delta" or d.boolean():
        attributes["update_rule"] = rule
    coarse = is_coarse(dtype) or is_coarse(state_type) or ml_dtypes.bfloat16 in (dtype, state_type)
    return NodeCase(d.trimmed(inputs), attributes, 2, atol=0.1 if coarse else 1e-4)
