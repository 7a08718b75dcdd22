"""Attention of com.microsoft: Attention, QAttention, MultiHeadAttention, GroupQueryAttention.

Here a mask is a large negative number to add, not an order to leave a key out: a row that is wholly masked gives a mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from miniort.errors import InputError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort_cuda.element_types import FLOATS, compute_dtype
from miniort_cuda.kernels.quantization import integer_product
from miniort_cuda.kernels.rotary_embedding import rotated
from miniort_cuda.namespace import CONTRIB, array_namespace
from miniort_cuda.scaled_dot_product import Scores, attend, float32_or_wider, join_heads, split_heads

kernels = KernelTable("cuda")

MASKED = -10000.0
"""What is added to the score of a masked key where `mask_filter_value` says nothing else."""

LOWEST = float(np.finfo(np.float32).min)
"""What is added to the score of a key that comes after its query."""


def _mask_addition(xp: Any, mask: Any, causal: bool, batch: int, count: int, length: int, value: float) -> list[Any]:
    """`value` for keys that a mask leaves out, LOWEST for those that come after their query, else 0; empty where all are 0.

    mask: [batch] ends, [2 · batch] ends and then starts; [batch, T] or [batch, N, T] with 0 for keys left out, or [batch, 1, M, M]
    where only the first T of all M positions are there yet -> broadcasts to [batch, heads, N, T]
    """
    key = xp.arange(length)
    later = None
    if causal and count > 1:
        position = xp.arange(count).reshape((-1, 1)) + (length - count)
        later = xp.where(key > position, xp.full((), LOWEST, np.float32), xp.zeros((), np.float32))
    if mask is None:
        return [] if later is None else [later]
    if mask.ndim == 1 and mask.shape[0] in (batch, 2 * batch):
        left_out = key >= mask[:batch].reshape((-1, 1))
        if mask.shape[0] == 2 * batch:
            left_out = xp.logical_or(left_out, key < mask[batch:].reshape((-1, 1)))
        left_out = left_out.reshape((batch, 1, 1, length))
    elif mask.ndim == 2:
        left_out = (mask == 0).reshape((batch, 1, 1, length))
    elif mask.ndim == 3:
        left_out = xp.expand_dims(mask == 0, 1)
    elif mask.ndim == 4:
        left_out = mask[:, :, length - count : length, :length] == 0
    else:
        raise InputError(f"a mask must be [batch], [2 · batch], [batch, T], [batch, N, T] or [batch, 1, M, M], found {list(mask.shape)}")
    addition = xp.where(left_out, xp.full((), value, np.float32), xp.zeros((), np.float32))
    return [addition if later is None else xp.minimum(addition, later)]


def _packed_attention(node: NodeContext) -> Callable[..., Any]:
    """What Attention and QAttention do after their projection: f(projected, mask, past, bias) -> y, present.

    projected: [batch, N, Q + K + V], the hidden sizes of the three -> y: [batch, N, V]; present: [2, batch, heads, P + N, K / heads]
    """
    xp, heads, scale = array_namespace(node), node.attribute("num_heads"), node.attribute("scale", 0.0)
    unidirectional, filter_value = bool(node.attribute("unidirectional", 0)), node.attribute("mask_filter_value", MASKED)
    sizes = node.attribute("qkv_hidden_sizes", None)
    wants_present = len(node.outputs) > 1 and node.outputs[1] is not None

    def attention_of(projected: Any, mask: Any, past: Any, bias: Any) -> Any:
        batch, count, width = projected.shape
        first, second, _ = sizes or (width // 3,) * 3
        parts = projected[..., :first], projected[..., first : first + second], projected[..., first + second :]
        q, k, v = (split_heads(part, heads) for part in parts)
        if past is not None:
            k, v = xp.concatenate((past[0], k), axis=2), xp.concatenate((past[1], v), axis=2)
        additions = _mask_addition(xp, mask, unidirectional, batch, count, k.shape[2], filter_value)
        y = join_heads(attend(xp, q, k, v, Scores(scale, additions=[*additions, *([] if bias is None else [bias])])))
        if not wants_present:
            return y
        return y, xp.concatenate((xp.expand_dims(k, 0), xp.expand_dims(v, 0)), axis=0)

    return attention_of


def _refuse_attention(node: NodeView) -> str | None:
    for name in ("do_rotary", "past_present_share_buffer"):
        if node.attribute(name, 0):
            return f"its kernel has no {name}"
    return None


@kernels.register("Attention", domain=CONTRIB, types={0: FLOATS}, refuse=_refuse_attention)
def attention(node: NodeContext) -> Run:
    """Attention over a projection of its input, with the keys and values of earlier tokens.

    x: [batch, N, I]; weight: [I, Q + K + V]; bias: [Q + K + V]; mask: see `_mask_addition`; past: [2, batch, heads, P, size];
    attention bias: broadcasts to [batch, heads, N, P + N] -> [batch, N, V]; present: [2, batch, heads, P + N, size]
    """
    xp, attention_of = array_namespace(node), _packed_attention(node)

    def run(x: Any, weight: Any, bias: Any = None, mask: Any = None, past: Any = None, attention_bias: Any = None) -> Any:
        projected = xp.matmul(x, weight)
        return attention_of(projected if bias is None else projected + bias, mask, past, attention_bias)

    return run


@kernels.register("QAttention", domain=CONTRIB, refuse=_refuse_attention)
def quantized_attention(node: NodeContext) -> Run:
    """Attention whose projection is of 8-bit integers.

    x: [batch, N, I]; weight: [I, 3 · hidden]; bias: [3 · hidden]; scales, zero points: [], weight's also [3 · hidden]; mask: see
    `_mask_addition`; past: [2, batch, heads, P, size] -> [batch, N, hidden]; present: [2, batch, heads, P + N, size]
    """
    xp, attention_of = array_namespace(node), _packed_attention(node)

    def run(
        x: Any,
        weight: Any,
        bias: Any,
        x_scale: Any,
        weight_scale: Any,
        mask: Any = None,
        x_zero_point: Any = None,
        weight_zero_point: Any = None,
        past: Any = None,
    ) -> Any:
        product = integer_product(xp, x, weight, x_zero_point, weight_zero_point)
        projected = product.astype(np.float32) * (float32_or_wider(x_scale) * weight_scale) + bias
        return attention_of(projected.astype(bias.dtype, copy=False), mask, past, None)

    return run


def _refuse_multi_head(node: NodeView) -> str | None:
    if node.has_input(8) or node.has_input(9):
        return "its kernel has no shared buffers and no beams: past_sequence_length and cache_indirection must be absent"
    if len(node.outputs) > 3 and node.outputs[3] is not None:
        return "its kernel doesn't give the scores"
    return None


@kernels.register("MultiHeadAttention", domain=CONTRIB, types={0: FLOATS}, refuse=_refuse_multi_head)
def multi_head_attention(node: NodeContext) -> Run:
    """Attention of queries, keys and values that are projected already, their bias not yet added.

    q: [batch, N, hidden], alone [batch, N, heads, 3, size] with k and v in it; k: [batch, M, hidden], [batch, M, heads, 2, size] with v
    in it, or [batch, heads, M, size], as v: [batch, M, V], [batch, heads, M, size]; bias: [2 · hidden + V]; mask: see `_mask_addition`;
    attention bias: broadcasts to [batch, heads, N, T]; past key, value: [batch, heads, P, size], T = P + M
    -> [batch, N, V]; present key, value: [batch, heads, T, size]
    """
    xp, heads, scale = array_namespace(node), node.attribute("num_heads"), node.attribute("scale", 0.0)
    unidirectional, filter_value = bool(node.attribute("unidirectional", 0)), node.attribute("mask_filter_value", MASKED)
    wants_present = any(output is not None for output in node.outputs[1:3])

    def run(
        q: Any,
        k: Any = None,
        v: Any = None,
        bias: Any = None,
        mask: Any = None,
        attention_bias: Any = None,
        past_key: Any = None,
        past_value: Any = None,
    ) -> Any:
        if k is None:
            queries, keys, values = (q[:, :, :, place].transpose(0, 2, 1, 3) for place in range(3))
        elif v is None:
            queries = split_heads(q, heads)
            keys, values = (k[:, :, :, place].transpose(0, 2, 1, 3) for place in range(2))
        else:
            queries = split_heads(q, heads)
            keys, values = (each if each.ndim == 4 else split_heads(each, heads) for each in (k, v))
        if bias is not None:
            first = queries.shape[1] * queries.shape[3]
            second = first + queries.shape[1] * keys.shape[3]
            shifts = bias[:first], bias[first:second], bias[second:]
            queries, keys, values = (
                part + shift.reshape((heads, 1, -1)) for part, shift in zip((queries, keys, values), shifts, strict=True)
            )
        if past_key is not None:
            keys, values = xp.concatenate((past_key, keys), axis=2), xp.concatenate((past_value, values), axis=2)
        elif wants_present:
            keys, values = keys.copy(), values.copy()
        batch, _, count, _ = queries.shape
        additions = _mask_addition(xp, mask, unidirectional, batch, count, keys.shape[2], filter_value)
        additions += [] if attention_bias is None else [attention_bias]
        y = join_heads(attend(xp, queries, keys, values, Scores(scale, additions=additions)))
        return (y, keys, values) if wants_present else y

    return run


def _refuse_group_query(node: NodeView) -> str | None:
    if node.attribute("sliding_window_cache", 0):
        return "its kernel has no sliding_window_cache"
    for name in ("k_quant_type", "v_quant_type"):
        if node.attribute(name, "NONE") != "NONE":
            return f"its kernel has no quantized cache: {name} must be NONE"
    if node.attribute("qk_output", 0):
        return "its kernel doesn't give the scores: qk_output must be 0"
    return None


@kernels.register("GroupQueryAttention", domain=CONTRIB, types={0: FLOATS}, host_inputs=(6,), refuse=_refuse_group_query)
def group_query_attention(node: NodeContext) -> Run:
    """Causal attention where several heads share their keys and values, over a cache whose rows have lengths of their own.

    q: [batch, N, heads · size], alone [batch, N, (heads + 2 · kv heads) · size] with k and v in it; k, v: [batch, M, kv heads · size];
    past key, value: [batch, kv heads, P, size]; seqlens: [batch], keys of each row less 1, new ones included; total: the longest row's;
    cosines, sines: [positions, R/2]; position_ids: [batch, N]; attention bias: broadcasts to [batch, heads, N, T]; sink: [heads];
    query_seqlens: [batch], tokens of each row's chunk that are no padding
    -> [batch, N, heads · size]; present key, value: [batch, kv heads, max(P, total), size]

    New keys go behind the ones that their row has, not behind those that the buffer has room for. The rows' lengths stay on the device:
    only `total` is read on the host.
    """
    xp = array_namespace(node)
    heads, kv_heads, scale = node.attribute("num_heads"), node.attribute("kv_num_heads"), node.attribute("scale", 0.0)
    rotate, causal = bool(node.attribute("do_rotary", 0)), bool(node.attribute("causal", 1))
    window, cap = node.attribute("local_window_size", -1), node.attribute("softcap", 0.0)
    smooth, interleaved = node.attribute("smooth_softmax", -1) > 0, bool(node.attribute("rotary_interleaved", 0))
    epsilon = node.attribute("qk_norm_epsilon", 1e-6)
    epsilons = node.attribute("q_norm_epsilon", epsilon), node.attribute("k_norm_epsilon", epsilon)

    def turned(x: Any, cosines: Any, sines: Any, positions: Any, count: int) -> Any:
        by_head = x.reshape((*x.shape[:2], count, x.shape[2] // count))
        cos, sin = xp.take(cosines, positions, axis=0), xp.take(sines, positions, axis=0)
        return rotated(xp, by_head, cos, sin, interleaved).reshape(x.shape)

    def run(
        q: Any,
        k: Any,
        v: Any,
        past_key: Any,
        past_value: Any,
        seqlens: Any,
        total: Any,
        cosines: Any = None,
        sines: Any = None,
        position_ids: Any = None,
        attention_bias: Any = None,
        sink: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        q_norm: Any = None,
        k_norm: Any = None,
        query_seqlens: Any = None,
    ) -> Any:
        if k is None:
            size = q.shape[2] // (heads + 2 * kv_heads)
            first, second = heads * size, (heads + kv_heads) * size
            q, k, v = q[..., :first], q[..., first:second], q[..., second:]
        count = q.shape[1]
        lengths = seqlens.reshape(-1).astype(np.int64) + 1  # of each row's keys, new ones included
        new = xp.minimum(lengths, count) if query_seqlens is None else query_seqlens.reshape(-1).astype(np.int64)
        before = lengths - new
        if q_norm is not None:
            q, k = _normalized(xp, q, q_norm, heads, epsilons[0]), _normalized(xp, k, k_norm, kv_heads, epsilons[1])
        if rotate and cosines is not None:
            positions = before.reshape((-1, 1)) + xp.arange(count)
            positions = xp.minimum(positions, lengths.reshape((-1, 1)) - 1) if position_ids is None else position_ids
            q, k = turned(q, cosines, sines, positions, heads), turned(k, cosines, sines, positions, kv_heads)
        longest = int(total.reshape(-1)[0])
        room = max(longest, 0 if past_key is None else past_key.shape[2])
        keys = _appended(xp, past_key, split_heads(k, kv_heads), before, new, room)
        values = _appended(xp, past_value, split_heads(v, kv_heads), before, new, room)
        key = xp.arange(longest)
        hidden = [key >= lengths.reshape((-1, 1, 1, 1))]
        if causal:
            position = before.reshape((-1, 1, 1, 1)) + xp.arange(count).reshape((-1, 1))
            hidden.append(key > position)
            if window >= 0:
                hidden.append(key <= position - window)
        additions = [] if attention_bias is None else [attention_bias[..., :longest]]
        if sink is None and smooth:
            sink = xp.zeros((heads,), np.float32)
        how = Scores(scale, cap, additions, hidden, sink)
        y = attend(xp, split_heads(q, heads), keys[:, :, :longest], values[:, :, :longest], how)
        return join_heads(y), keys, values

    return run


def _normalized(xp: Any, x: Any, weight: Any, heads: int, epsilon: float) -> Any:
    """Each head's elements over their root mean square, times a weight. x: [batch, N, heads · size]; weight: [size] -> x's shape."""
    by_head = x.reshape((*x.shape[:2], heads, x.shape[2] // heads)).astype(compute_dtype(x.dtype), copy=False)
    root = xp.sqrt((by_head * by_head).mean(axis=-1, keepdims=True) + epsilon)
    return (by_head / root * weight).reshape(x.shape).astype(x.dtype, copy=False)


def _appended(xp: Any, past: Any, x: Any, before: Any, new: Any, room: int) -> Any:
    """A cache with each row's new elements behind those that it has.

    past: [batch, heads, P, size]; x: [batch, heads, N, size]; before, new: [batch], how many the row has, and how many of x are its own
    -> [batch, heads, room, size], zeros where nothing is
    """
    filled = 0 if past is None else past.shape[2]
    both = x if past is None else xp.concatenate((past, x), axis=2)
    place = xp.arange(room)
    start, end = before.reshape((-1, 1)), (before + new).reshape((-1, 1))
    is_new = xp.logical_and(place >= start, place < end)
    source = xp.where(is_new, filled + place - start, xp.minimum(place, max(filled - 1, 0)))  # [batch, room]
    taken = xp.take_along_axis(both, source.reshape((x.shape[0], 1, room, 1)), axis=2)
    is_there = xp.logical_or(is_new, place < filled).reshape((x.shape[0], 1, room, 1))
    return xp.where(is_there, taken, xp.zeros((), x.dtype))
