"""Attention and rotary embedding: against the reference evaluator where that is right, and against plain sums."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]


def plain_attention(q, k, v, allowed=None, added=None, scale=None, softcap=0.0):
    """In float64, key heads repeated, a query without keys gives zeros. q: [B, H, N, D] -> y: [B, H, N, D]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    if added is not None:
        scores = scores + added
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(peak), 0, peak))
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total == 0, 1, total)) @ v


def heads_last(x):
    """[B, H, N, D] -> [B, N, H · D]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_plain(heads, kv_heads, dtype, node, same, sample):
    q, k, v = sample(dtype, (2, heads, 5, 8)), sample(dtype, (2, kv_heads, 7, 8), 1), sample(dtype, (2, kv_heads, 7, 6), 2)
    want = plain_attention(q, k, v).astype(dtype)
    for opset in (23, 24, 25):
        same(node("Attention", opset, [q, k, v])(q, k, v)[0], want, atol=1e-2 if q.itemsize == 2 else 1e-5)
    packed = [heads_last(x) for x in (q, k, v)]
    got = node("Attention", 23, packed, q_num_heads=heads, kv_num_heads=kv_heads)(*packed)[0]
    same(got, heads_last(want), atol=1e-2 if q.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("past", [0, 1, 4])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("causal", [0, 1])
def test_past_comes_before_the_new_keys(past, new, causal, node, same, sample):
    """Query i of N new ones sees keys 0 to P + i; old and new in the wrong order would show here."""
    q, k, v = (sample(np.float32, (2, 2, new, 4), seed) for seed in range(3))
    old_k, old_v = sample(np.float32, (2, 2, past, 4), 3), sample(np.float32, (2, 2, past, 4), 4)
    all_k, all_v = np.concatenate((old_k, k), 2), np.concatenate((old_v, v), 2)
    allowed = np.tri(new, past + new, past, bool) if causal else None
    inputs = [q, k, v, None, old_k, old_v]
    y, present_key, present_value = node("Attention", 23, inputs, 3, is_causal=causal)(*inputs)
    same(y, plain_attention(q, all_k, all_v, allowed).astype(np.float32))
    same(present_key, all_k)
    same(present_value, all_v)
    inputs = [heads_last(q), heads_last(k), heads_last(v), None, old_k, old_v]
    y, present_key, present_value = node("Attention", 23, inputs, 3, is_causal=causal, q_num_heads=2, kv_num_heads=2)(*inputs)
    same(y, heads_last(plain_attention(q, all_k, all_v, allowed).astype(np.float32)))
    same(present_key, all_k)
    same(present_value, all_v)


def test_present_without_past(node, same, sample):
    q, k, v = (sample(np.float32, (1, 2, 3, 4), seed) for seed in range(3))
    _, present_key, present_value = node("Attention", 23, [q, k, v], 3)(q, k, v)
    same(present_key, k)
    same(present_value, v)


def test_causal_without_past_sees_the_first_key_only(node, same):
    q, k = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 3, 1), np.float32)
    v = np.array([1, 2, 6], np.float32).reshape(1, 1, 3, 1)
    same(node("Attention", 23, [q, k, v], is_causal=1)(q, k, v)[0], np.ones((1, 1, 1, 1), np.float32))


def test_causal_with_an_outer_cache(node, same):
    q, k = np.zeros((1, 1, 2, 1), np.float32), np.zeros((1, 1, 4, 1), np.float32)
    v = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 4, 1)
    for valid, want in ((4, [2, 2.5]), (2, [1, 1.5]), (1, [0, 1]), (0, [0, 0])):
        inputs = [q, k, v, None, None, None, np.array([valid])]
        same(node("Attention", 24, inputs, is_causal=1)(*inputs)[0].ravel(), np.array(want, np.float32))


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (2, 1, 3, 5), (4, 3, 5), (2, 4, 3, 5)])
def test_masks(shape, node, same, sample):
    q, k, v = sample(np.float32, (2, 4, 3, 8)), sample(np.float32, (2, 2, 5, 8), 1), sample(np.float32, (2, 2, 5, 8), 2)
    allowed, added = sample(bool, shape, 3), sample(np.float32, shape, 4)
    for causal in (0, 1):
        seen = np.tri(3, 5, 0, bool) if causal else True
        model = node("Attention", 23, [q, k, v, allowed], is_causal=causal)
        same(model(q, k, v, allowed)[0], plain_attention(q, k, v, allowed & seen).astype(np.float32))
        model = node("Attention", 23, [q, k, v, added], is_causal=causal)
        same(model(q, k, v, added)[0], plain_attention(q, k, v, np.broadcast_to(seen, (3, 5)), added).astype(np.float32))


def test_short_masks(node, same, sample):
    q, k, v = sample(np.float32, (2, 2, 3, 8)), sample(np.float32, (2, 2, 5, 8), 1), sample(np.float32, (2, 2, 5, 8), 2)
    for mask in (np.ones((3, 4), bool), np.zeros((3, 4), np.float32)):
        want = plain_attention(q, k[:, :, :4], v[:, :, :4]).astype(np.float32)
        same(node("Attention", 24, [q, k, v, mask])(q, k, v, mask)[0], want)


def test_a_query_without_keys(node, same, sample):
    q, k, v = (sample(np.float32, (1, 1, 2, 4), seed) for seed in range(3))
    for mask in (np.array([[False, False], [True, False]]), np.array([[-np.inf, -np.inf], [0, -np.inf]], np.float32)):
        y, _, _, weights = node("Attention", 23, [q, k, v, mask], 4, qk_matmul_output_mode=3)(q, k, v, mask)
        same(y[0, 0], np.stack([np.zeros(4, np.float32), v[0, 0, 0]]))
        same(weights[0, 0], np.array([[0, 0], [1, 0]], np.float32))
    none = np.zeros((1, 1, 0, 4), np.float32)
    same(node("Attention", 23, [q, none, none])(q, none, none)[0], np.zeros((1, 1, 2, 4), np.float32))


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 2.0}, {"scale": 0.1, "softcap": 1.5}])
def test_scale_and_softcap(options, node, same, sample):
    q, k, v = (sample(np.float32, (2, 2, 3, 8), seed) for seed in range(3))
    same(node("Attention", 23, [q, k, v], **options)(q, k, v)[0], plain_attention(q, k, v, **options).astype(np.float32))


@pytest.mark.parametrize("precision", [None, 1, 11])
def test_scores(precision, node, same, sample):
    q, k, v = (sample(np.float32, (2, 2, 3, 8), seed) for seed in range(3))
    mask = sample(np.float32, (3, 3), 5)
    raw = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(8))
    capped = 3 * np.tanh(raw / 3)
    weights = np.exp(capped + mask)
    for mode, want in enumerate((raw, capped, capped + mask, weights / weights.sum(-1, keepdims=True))):
        attributes = {"qk_matmul_output_mode": mode, "softcap": 3.0} | ({} if precision is None else {"softmax_precision": precision})
        y, _, _, scores = node("Attention", 23, [q, k, v, mask], 4, **attributes)(q, k, v, mask)
        same(scores, want, rtol=1e-5, atol=1e-5)
        same(y, plain_attention(q, k, v, added=mask, softcap=3.0).astype(np.float32), atol=1e-5)


def test_windows(node, same, sample):
    q, k, v = (sample(np.float32, (1, 1, 6, 4), seed) for seed in range(3))
    position, key = np.arange(6)[:, None], np.arange(6)
    for left, right, causal in itertools.product((-1, 0, 2), (-1, 0, 3), (0, 1)):
        allowed = np.ones((6, 6), bool)
        allowed &= key <= position if causal else True
        allowed &= key >= position - left if left >= 0 else True
        allowed &= key <= position + right if right >= 0 else True
        model = node("Attention", 25, [q, k, v], left_window_size=left, right_window_size=right, is_causal=causal)
        same(model(q, k, v)[0], plain_attention(q, k, v, allowed).astype(np.float32))


def rotate(x, cos, sin, interleaved):
    """Every pair as a complex number. x: [B, H, T, R]; cos, sin: [B, T, R/2]."""
    size = x.shape[-1]
    first = x[..., 0::2] if interleaved else x[..., : size // 2]
    second = x[..., 1::2] if interleaved else x[..., size // 2 :]
    turned = (first + 1j * second) * (cos + 1j * sin)[:, None]
    if interleaved:
        return np.stack((turned.real, turned.imag), -1).reshape(x.shape)
    return np.concatenate((turned.real, turned.imag), -1)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rotated", [0, 4])
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_rotary_embedding(interleaved, rotated, with_positions, dtype, node, same, sample):
    x, size = sample(dtype, (2, 3, 5, 8)), rotated or 8
    positions = np.array([[4, 0, 1, 2, 3], [9, 8, 7, 6, 5]])
    angles = np.arange(10)[:, None] / 10 ** np.arange(size // 2)
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    want = x.astype(np.float64)
    turning = [table.astype(np.float64)[positions] for table in (cos, sin)]
    want[..., :size] = rotate(want[..., :size], *turning, interleaved)
    inputs = [x, cos, sin, positions] if with_positions else [x, cos[positions], sin[positions]]
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": rotated}
    atol = 3e-2 if x.itemsize == 2 else 1e-6
    same(node("RotaryEmbedding", 23, inputs, **attributes)(*inputs)[0], want.astype(dtype), atol=atol)
    packed = [heads_last(x), *inputs[1:]]
    same(node("RotaryEmbedding", 23, packed, num_heads=3, **attributes)(*packed)[0], heads_last(want).astype(dtype), atol=atol)
