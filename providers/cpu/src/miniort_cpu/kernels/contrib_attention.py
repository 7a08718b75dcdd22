"""Attention of com.microsoft: Attention, QAttention, MultiHeadAttention, GroupQueryAttention, RotaryEmbedding.

The arithmetic is that of the default domain's Attention and RotaryEmbedding. What differs is how heads are packed, and that a mask is
a large negative number to add, not an order to leave a key out: a row that is wholly masked gives a mean, as in onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_cpu.buffers import Allocate, copied
from miniort_cpu.floating_point import FLOAT32, as_dtype, widen
from miniort_cpu.kernels.attention import _exponentials, _joined, _scores, _split_heads, _weighted_sum
from miniort_cpu.kernels.contrib_activation import CONTRIB
from miniort_cpu.kernels.integer_matrix import RightMatrix, integer_product, right_matrix
from miniort_cpu.kernels.matrix import matrix_product, widened_constant
from miniort_cpu.kernels.rotary_embedding import rotary_embedding

kernels = KernelTable("cpu")

MASKED = -10000.0
"""What is added to the score of a masked key where `mask_filter_value` says nothing else."""

LOWEST = float(np.finfo(np.float32).min)
"""What is added to the score of a key that comes after its query."""


def attend(
    allocate: Allocate,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    *additions: Array | None,
    softcap: float = 0.0,
    sink: Array | None = None,
    keep: tuple[bool, bool] = (False, False),
) -> tuple[Array, Array | None]:
    """softmax(cap(scale · q · kᵀ) + additions) · v.

    q: [B, H, N, D]; k: [B, Hkv, T, D]; v: [B, Hkv, T, V]; additions: broadcast to [B, H, N, T]; sink: [H], a score that takes its
    part of the softmax and has no value -> [B, N, H · V]; the scores [B, H, N, T] before or after the softmax, if `keep` says so
    """
    scores = _scores(allocate, q, k, scale or sqrt(1 / q.shape[3]))
    if softcap:
        np.divide(scores, softcap, out=scores)
        np.tanh(scores, out=scores)
        np.multiply(scores, softcap, out=scores)
    for addition in additions:
        if addition is not None:
            np.add(scores, addition, out=scores, casting="same_kind")
    kept = as_dtype(scores, q.dtype).copy() if keep[0] else None
    if sink is None:
        weights, total = _exponentials(scores)
    else:
        weights, total = _exponentials_with_sink(scores, widen(sink).reshape(-1, 1, 1))
    if keep[1]:
        kept = np.divide(weights, total, out=...).astype(q.dtype)
    return _weighted_sum(allocate, weights, total, v, q.dtype, True), kept


def _exponentials_with_sink(scores: Array, sink: Array) -> tuple[Array, Array]:
    """exp(scores - their maximum), in place, and its sum, both with the sink's score among them. [B, H, N, T]; sink: [H, 1, 1]."""
    peak = np.maximum(np.maximum.reduce(scores, -1, keepdims=True, initial=-np.inf), sink)
    np.subtract(scores, peak, out=scores)
    np.exp(scores, out=scores)
    return scores, np.add.reduce(scores, -1, keepdims=True) + np.exp(sink - peak)


def mask_addition(mask: Array | None, causal: bool, batch: int, count: int, length: int, value: float) -> Array | None:
    """`value` for keys that a mask leaves out, LOWEST for those that come after their query, else 0; None where all are 0.

    The last query is the last key, so a single one has none after it.

    mask: [batch] ends, [2 · batch] ends and then starts; [batch, T] or [batch, N, T] with 0 for keys left out, or [batch, 1, M, M]
    where only the first T of all M positions are there yet -> broadcasts to [batch, heads, N, T]
    """
    later = np.triu(np.full((count, length), LOWEST, np.float32), length - count + 1) if causal and count > 1 else None
    if mask is None:
        return later
    key = np.arange(length)
    if mask.ndim == 1 and mask.shape[0] in (batch, 2 * batch):
        left_out = key >= mask[:batch, None]
        if mask.shape[0] == 2 * batch:
            left_out |= key < mask[batch:, None]
        left_out = left_out[:, None, None, :]
    elif mask.ndim == 2:
        left_out = (mask == 0)[:, None, None, :]
    elif mask.ndim == 3:
        left_out = (mask == 0)[:, None]
    elif mask.ndim == 4:
        left_out = mask[:, :, length - count : length, :length] == 0
    else:
        raise ValueError(
            f"a mask must be [batch], [2 · batch], [batch, T], [batch, N, T] or [batch, 1, M, M], found {list(mask.shape)}, batch {batch}"
        )
    addition = np.where(left_out, np.float32(value), np.float32(0))
    return addition if later is None else np.minimum(addition, later)


def _with_past(allocate: Allocate, past: Array | None, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """All keys, all values, and both as one array: present. past: [2, B, H, P, D] or None; keys, values: [B, H, N, D].

    -> [B, H, P + N, D] twice, [2, B, H, P + N, D]
    """
    batch, heads, count, size = keys.shape
    before = 0 if past is None else past.shape[3]
    present = allocate((2, batch, heads, before + count, size), keys.dtype)
    if past is not None:
        present[:, :, :, :before] = past
    present[0, :, :, before:] = keys
    present[1, :, :, before:] = values
    return present[0], present[1], present


def _packed_attention(node: NodeContext) -> Callable[..., Array | tuple[Array, Array]]:
    """What Attention and QAttention do after their projection: f(projected, mask, past, bias) -> y, present.

    projected: [batch, N, Q + K + V], the hidden sizes of the three -> y: [batch, N, V]; present: [2, batch, heads, P + N, K / heads]
    """
    heads, scale = node.attribute("num_heads"), node.attribute("scale", 0.0)
    unidirectional, filter_value = bool(node.attribute("unidirectional", 0)), node.attribute("mask_filter_value", MASKED)
    sizes = node.attribute("qkv_hidden_sizes", None)
    allocate = node.provider.allocate
    wants_present = len(node.outputs) > 1 and node.outputs[1] is not None

    def attention_of(projected: Array, mask: Array | None, past: Array | None, bias: Array | None) -> Array | tuple[Array, Array]:
        batch, count, width = projected.shape
        first, second, _ = sizes or (width // 3,) * 3
        q, k, v = (_split_heads(part, heads) for part in np.split(projected, (first, first + second), axis=2))
        present: Array | None = None
        if past is not None or wants_present:
            k, v, present = _with_past(allocate, past, k, v)
        length = k.shape[2]
        additions = [
            mask_addition(mask, unidirectional, batch, count, length, filter_value),
            None if bias is None else widen(bias),
        ]
        y, _ = attend(allocate, q, k, v, scale, *additions)
        return y if present is None else (y, present)

    return attention_of


def _refuse_attention(node: NodeView) -> str | None:
    if node.attribute("do_rotary", 0):
        return "its kernel has no do_rotary: the op doesn't say which angles it means; put RotaryEmbedding before a MultiHeadAttention"
    if node.attribute("past_present_share_buffer", 0):
        return "its kernel has no past_present_share_buffer: a present that is written into its past can't be told from the inputs"
    return None


@kernels.register("Attention", domain=CONTRIB, refuse=_refuse_attention)
def attention(node: NodeContext) -> Run:
    """Attention over a projection of its input, with the keys and values of earlier tokens.

    x: [batch, N, I]; weight: [I, Q + K + V]; bias: [Q + K + V]; mask: see `mask_addition`; past: [2, batch, heads, P, size];
    attention bias: broadcasts to [batch, heads, N, P + N] -> [batch, N, V]; present: [2, batch, heads, P + N, size]
    """
    attention_of = _packed_attention(node)
    constant = widened_constant(node, 1)
    allocate = node.provider.allocate

    def run(
        x: Array,
        weight: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        past: Array | None = None,
        attention_bias: Array | None = None,
    ) -> Array | tuple[Array, Array]:
        projected = matrix_product(allocate, widen(x), widen(weight) if constant is None else constant)
        if bias is not None:
            np.add(projected, widen(bias), out=projected)
        return attention_of(as_dtype(projected, x.dtype), mask, past, attention_bias)

    return run


@kernels.register("QAttention", domain=CONTRIB, refuse=_refuse_attention)
def quantized_attention(node: NodeContext) -> Run:
    """Attention whose projection is of 8-bit integers.

    x: [batch, N, I]; weight: [I, 3 · hidden]; bias: [3 · hidden]; scales, zero points: [], weight's also [3 · hidden]; mask: see
    `mask_addition`; past: [2, batch, heads, P, size] -> [batch, N, hidden]; present: [2, batch, heads, P + N, size]
    """
    attention_of = _packed_attention(node)
    constant = right_matrix(node, 1, 7)
    allocate = node.provider.allocate

    def run(
        x: Array,
        weight: Array,
        bias: Array,
        x_scale: Array,
        weight_scale: Array,
        mask: Array | None = None,
        x_zero_point: Array | None = None,
        weight_zero_point: Array | None = None,
        past: Array | None = None,
    ) -> Array | tuple[Array, Array]:
        product = integer_product(allocate, x, x_zero_point, constant or RightMatrix(allocate, weight, weight_zero_point))
        projected = as_dtype(product, FLOAT32)
        np.multiply(projected, widen(x_scale) * widen(weight_scale), out=projected)
        np.add(projected, widen(bias), out=projected)
        return attention_of(as_dtype(projected, bias.dtype), mask, past, None)

    return run


def _refuse_multi_head(node: NodeView) -> str | None:
    if node.has_input(8) or node.has_input(9):
        return "its kernel has no shared buffers and no beams: past_sequence_length and cache_indirection must be absent"
    return None


@kernels.register("MultiHeadAttention", domain=CONTRIB, refuse=_refuse_multi_head)
def multi_head_attention(node: NodeContext) -> Run:
    """Attention of queries, keys and values that are projected already, their bias not yet added.

    q: [batch, N, hidden], alone [batch, N, heads, 3, size] with k and v in it; k: [batch, M, hidden], [batch, M, heads, 2, size] with v
    in it, or [batch, heads, M, size], as v: [batch, M, V], [batch, heads, M, size]; bias: [2 · hidden + V]; mask: see `mask_addition`;
    attention bias: broadcasts to [batch, heads, N, T]; past key, value: [batch, heads, P, size], T = P + M
    -> [batch, N, V]; present key, value: [batch, heads, T, size]; scores before the softmax: [batch, heads, N, T]
    """
    heads, scale = node.attribute("num_heads"), node.attribute("scale", 0.0)
    unidirectional, filter_value = bool(node.attribute("unidirectional", 0)), node.attribute("mask_filter_value", MASKED)
    allocate = node.provider.allocate
    wants_present = any(output is not None for output in node.outputs[1:3])
    wants_scores = len(node.outputs) > 3 and node.outputs[3] is not None

    def run(
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        bias: Array | None = None,
        mask: Array | None = None,
        attention_bias: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
    ) -> Array | tuple[Array | None, ...]:
        queries, keys, values = _unpacked(q, k, v, heads)
        if bias is not None:
            first, second = queries.shape[1] * queries.shape[3], queries.shape[1] * keys.shape[3]
            parts = np.split(bias, (first, first + second))
            queries, keys, values = (part + shift.reshape(heads, 1, -1) for part, shift in zip((queries, keys, values), parts, strict=True))
        if past_key is not None and past_value is not None:
            keys, values = _joined(allocate, past_key, keys), _joined(allocate, past_value, values)
        elif wants_present:
            keys, values = copied(allocate, keys), copied(allocate, values)
        batch, _, count, _ = queries.shape
        length = keys.shape[2]
        additions = [
            mask_addition(mask, unidirectional, batch, count, length, filter_value),
            None if attention_bias is None else widen(attention_bias),
        ]
        y, kept = attend(allocate, queries, keys, values, scale, *additions, keep=(wants_scores, False))
        return (y, keys, values, kept) if wants_present or wants_scores else y

    return run


def _unpacked(q: Array, k: Array | None, v: Array | None, heads: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values as [batch, heads, time, size], views, from any of the forms that MultiHeadAttention takes."""
    if k is None:
        queries, keys, values = (q[:, :, :, place].transpose(0, 2, 1, 3) for place in range(3))
        return queries, keys, values
    queries = _split_heads(q, heads)
    if v is None:
        keys, values = (k[:, :, :, place].transpose(0, 2, 1, 3) for place in range(2))
        return queries, keys, values
    return queries, k if k.ndim == 4 else _split_heads(k, heads), v if v.ndim == 4 else _split_heads(v, heads)


@kernels.register("RotaryEmbedding", domain=CONTRIB)
def contrib_rotary_embedding(node: NodeContext) -> Run:
    """The default domain's RotaryEmbedding with its inputs in another order.

    x: [batch, heads, time, size] or [batch, time, heads · size]; position_ids: [batch, time], or [1], the first position of every row;
    cosines, sines: [positions, R/2], R elements of each head are turned -> x's shape
    """
    rotated, heads = node.attribute("rotary_embedding_dim", 0), node.attribute("num_heads", 0)
    interleaved = node.attribute("interleaved", 0)

    def run(x: Array, position_ids: Array, cosines: Array, sines: Array) -> Array:
        count = heads or x.shape[-1] // (2 * cosines.shape[1])
        attributes = {"interleaved": interleaved, "rotary_embedding_dim": rotated, "num_heads": count}
        if position_ids.ndim == 1:
            batch, time = x.shape[0], x.shape[-2]
            position_ids = np.broadcast_to(position_ids + np.arange(time), (batch, time))
        return rotary_embedding(replace(node, attributes=attributes))(x, cosines, sines, position_ids)  # type: ignore[no-any-return]

    return run


def _refuse_group_query(node: NodeView) -> str | None:
    if node.attribute("sliding_window_cache", 0):
        return "its kernel has no sliding_window_cache: a cache that drops old tokens is a cache layout's affair"
    for name in ("k_quant_type", "v_quant_type"):
        if node.attribute(name, "NONE") != "NONE":
            return f"its kernel has no quantized cache: {name} must be NONE"
    return None


@kernels.register("GroupQueryAttention", domain=CONTRIB, refuse=_refuse_group_query)
def group_query_attention(node: NodeContext) -> Run:
    """Causal attention where several heads share their keys and values, over a cache whose rows have lengths of their own.

    q: [batch, N, heads · size], alone [batch, N, (heads + 2 · kv heads) · size] with k and v in it; k, v: [batch, M, kv heads · size];
    past key, value: [batch, kv heads, P, size]; seqlens: [batch], keys of each row less 1, new ones included; total: the longest row's;
    cosines, sines: [positions, R/2]; position_ids: [batch, N]; attention bias: broadcasts to [batch, heads, N, T]; sink: [heads];
    query_seqlens: [batch], tokens of each row's chunk that are no padding
    -> [batch, N, heads · size]; present key, value: [batch, kv heads, max(P, total), size]; scores: [batch, heads, N, T]

    New keys go behind the ones that their row has, not behind those that the buffer has room for. What the outputs hold where a row
    has no token isn't specified.
    """
    heads, kv_heads, scale = node.attribute("num_heads"), node.attribute("kv_num_heads"), node.attribute("scale", 0.0)
    rotate, causal = bool(node.attribute("do_rotary", 0)), bool(node.attribute("causal", 1))
    window, softcap = node.attribute("local_window_size", -1), node.attribute("softcap", 0.0)
    smooth, qk_output = node.attribute("smooth_softmax", -1) > 0, node.attribute("qk_output", 0)
    epsilon = node.attribute("qk_norm_epsilon", 1e-6)
    epsilons = node.attribute("q_norm_epsilon", epsilon), node.attribute("k_norm_epsilon", epsilon)
    interleaved = node.attribute("rotary_interleaved", 0)
    rotations = [
        rotary_embedding(replace(node, attributes={"interleaved": interleaved, "num_heads": count, "rotary_embedding_dim": 0}))
        for count in (heads, kv_heads)
    ]
    if qk_output not in (0, 1, 2):
        raise KernelError(f"node {node.name!r} (GroupQueryAttention): its qk_output must be 0, 1 or 2, found {qk_output}")
    allocate = node.provider.allocate

    def turned(x: Array, cosines: Array, sines: Array, positions: Array, count: int) -> Array:
        """`x` with the first 2 · cosines.shape[1] elements of each head turned. x: [batch, N, count · size] -> same shape."""
        size = x.shape[2] // count
        rotation = rotations[0] if count == heads else rotations[1]
        if 2 * cosines.shape[1] < size:
            attributes = {"interleaved": interleaved, "num_heads": count, "rotary_embedding_dim": 2 * cosines.shape[1]}
            rotation = rotary_embedding(replace(node, attributes=attributes))
        return rotation(x, cosines, sines, positions)  # type: ignore[no-any-return]

    def run(
        q: Array,
        k: Array | None,
        v: Array | None,
        past_key: Array | None,
        past_value: Array | None,
        seqlens: Array,
        total: Array,
        cosines: Array | None = None,
        sines: Array | None = None,
        position_ids: Array | None = None,
        attention_bias: Array | None = None,
        sink: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        query_seqlens: Array | None = None,
    ) -> Array | tuple[Array | None, ...]:
        if k is None or v is None:
            size = q.shape[2] // (heads + 2 * kv_heads)
            q, k, v = np.split(q, (heads * size, (heads + kv_heads) * size), axis=2)
        count = q.shape[1]
        lengths = seqlens.reshape(-1).astype(np.int64) + 1  # of each row's keys, new ones included
        new = np.minimum(count, lengths) if query_seqlens is None else query_seqlens.reshape(-1).astype(np.int64)
        before = lengths - new
        if q_norm is not None and k_norm is not None:
            q, k = _normalized(q, q_norm, heads, epsilons[0]), _normalized(k, k_norm, kv_heads, epsilons[1])
        if rotate and cosines is not None and sines is not None:
            positions = before[:, None] + np.arange(count)
            positions = np.minimum(positions, lengths[:, None] - 1) if position_ids is None else position_ids
            q, k = turned(q, cosines, sines, positions, heads), turned(k, cosines, sines, positions, kv_heads)
        longest = int(lengths.max(initial=0))
        room = max(int(total.reshape(-1)[0]), 0 if past_key is None else past_key.shape[2])
        keys = _appended(allocate, past_key, _split_heads(k, kv_heads), before, new, room)
        values = _appended(allocate, past_value, _split_heads(v, kv_heads), before, new, room)
        unseen = _unseen(count, longest, before, lengths, causal, window)
        bias = None if attention_bias is None else widen(attention_bias)[..., :longest]
        y, scores = attend(
            allocate,
            _split_heads(q, heads),
            keys[:, :, :longest],
            values[:, :, :longest],
            scale,
            bias,
            unseen,
            softcap=softcap,
            sink=np.zeros(heads, np.float32) if sink is None and smooth else sink,
            keep=(qk_output == 1, qk_output == 2),
        )
        return y, keys, values, scores

    return run


def _normalized(x: Array, weight: Array, heads: int, epsilon: float) -> Array:
    """Each head's elements over their root mean square, times a weight. x: [batch, N, heads · size]; weight: [size] -> x's shape."""
    by_head = widen(x).reshape(*x.shape[:2], heads, -1)
    root = np.sqrt(np.mean(np.square(by_head), -1, keepdims=True) + np.float32(epsilon), out=...)
    return as_dtype((by_head / root * widen(weight)).reshape(x.shape), x.dtype)


def _appended(allocate: Allocate, past: Array | None, x: Array, before: Array, new: Array, room: int) -> Array:
    """A cache with each row's new elements behind those that it has.

    past: [batch, heads, P, size]; x: [batch, heads, N, size]; before, new: [batch], how many the row has, and how many of x are its own
    -> [batch, heads, room, size], zeros where nothing is
    """
    batch, heads, _, size = x.shape
    out = allocate((batch, heads, room, size), x.dtype)
    filled = 0 if past is None else past.shape[2]
    if past is not None:
        out[:, :, :filled] = past
    if filled < room:
        out[:, :, filled:] = 0
    first, last = int(before[0]), int(new[0])
    if (before == first).all() and (new == last).all():
        out[:, :, first : first + last] = x[:, :, :last]
        return out
    for row, (start, own) in enumerate(zip(before.tolist(), new.tolist(), strict=True)):
        out[row, :, start : start + own] = x[row, :, :own]
    return out


def _unseen(count: int, length: int, before: Array, lengths: Array, causal: bool, window: int) -> Array | None:
    """-inf for the keys that a query may not see, else 0; None if it sees all. before, lengths: [batch] -> [batch, 1, N, T]."""
    position = before[:, None, None, None] + np.arange(count)[:, None]
    key = np.arange(length)
    hidden = key >= lengths[:, None, None, None]
    if causal:
        hidden = hidden | (key > position)
        if window >= 0:
            hidden |= key <= position - window
    return np.where(hidden, np.float32(-np.inf), np.float32(0)) if hidden.any() else None
