"""Attention in parts of queries and heads gives what the plain formula gives, whatever hides keys, and by any number of threads."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from miniort import InferenceSession, SessionOptions

RNG = np.random.default_rng(0)
QUERIES, KEYS, HEADS, KV_HEADS, DIM = 150, 300, 4, 2, 8
LOWEST = float(np.finfo(np.float32).min)


def attention(feeds: dict[str, np.ndarray | None], threads: int, **attributes: Any) -> np.ndarray:
    """Run the op on feeds by input name, None for an absent one."""
    names = ["q", "k", "v", "mask", "past_key", "past_value", "valid"]
    given = {name: array for name, array in feeds.items() if array is not None}
    inputs = [name if name in given else "" for name in names]
    while not inputs[-1]:
        inputs.pop()
    graph = helper.make_graph(
        [helper.make_node("Attention", inputs, ["y"], **attributes)],
        "attention",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape) for name, array in given.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = InferenceSession(model, SessionOptions(intra_op_num_threads=threads))
    y: np.ndarray = session.run(None, given)[0]
    session.close()
    return y


def wanted(q: np.ndarray, k: np.ndarray, v: np.ndarray, added: np.ndarray) -> np.ndarray:
    """The formula in float64, with -inf where a key is hidden; a query that sees none gives zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(part.astype(np.float64), group, axis=1) for part in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / sqrt(q.shape[3]) + added
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(peak), 0, peak))
    total = weights.sum(axis=-1, keepdims=True)
    y: np.ndarray = weights @ v / np.where(total == 0, 1, total)
    return y


def random_heads(heads: int, length: int, batch: int = 2) -> np.ndarray:
    return RNG.standard_normal((batch, heads, length, DIM), dtype=np.float32)


def hide(seen: np.ndarray) -> np.ndarray:
    return np.where(seen, 0.0, -np.inf)


CAUSAL = np.arange(KEYS) <= np.arange(QUERIES)[:, None] + KEYS - QUERIES
BAND = CAUSAL & (np.arange(KEYS) > np.arange(QUERIES)[:, None] + KEYS - QUERIES - 20)
PADDED = np.ones((2, 1, QUERIES, KEYS), bool) & CAUSAL
PADDED[1, ..., :170] = False  # of this row some queries see nothing
MASKS = {
    "none": (None, np.zeros(())),
    "causal": (CAUSAL[None, None], hide(CAUSAL)),
    "a band": (BAND[None, None], hide(BAND)),
    "of two axes": (CAUSAL, hide(CAUSAL)),
    "padding": (PADDED, hide(PADDED)),
    "of each head": ((heads := RNG.random((2, HEADS, QUERIES, KEYS)) < 0.1), hide(heads)),
    "of keys": ((keys := RNG.random((2, 1, 1, KEYS)) < 0.5), hide(keys)),
    "float": ((bias := RNG.standard_normal((1, HEADS, QUERIES, KEYS), dtype=np.float32)), bias),
    "float that hides": ((low := np.where(CAUSAL, np.float32(0), np.float32(LOWEST))[None, None]), low),
    "float that hides all": ((all_low := np.full((1, 1, QUERIES, KEYS), LOWEST, np.float32)), all_low),
    "float -inf": ((inf := hide(BAND).astype(np.float32)[None, None]), inf),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, threads: int) -> None:
    given, added = MASKS[mask]
    q, k, v = random_heads(HEADS, QUERIES), random_heads(KV_HEADS, KEYS), random_heads(KV_HEADS, KEYS)
    found = attention({"q": q, "k": k, "v": v, "mask": given}, threads)
    np.testing.assert_allclose(found, wanted(q, k, v, added), atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (16, -1), (16, 3), (-1, 0)])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("lowest", [-np.inf, LOWEST])
def test_places_and_a_mask_together(window: tuple[int, int], causal: int, lowest: float) -> None:
    q, k, v = random_heads(HEADS, QUERIES), random_heads(KV_HEADS, QUERIES), random_heads(KV_HEADS, QUERIES)
    mask = np.where(RNG.random((2, 1, QUERIES, QUERIES)) < 0.3, np.float32(0), np.float32(lowest))
    row, key = np.arange(QUERIES)[:, None], np.arange(QUERIES)
    seen = np.ones((QUERIES, QUERIES), bool)
    for hides, shown in ((causal, key <= row), (window[0] >= 0, key >= row - window[0]), (window[1] >= 0, key <= row + window[1])):
        seen &= shown if hides else True
    found = attention({"q": q, "k": k, "v": v, "mask": mask}, 2, is_causal=causal, **window_attributes(window))
    np.testing.assert_allclose(found, wanted(q, k, v, mask + hide(seen)), atol=1e-5)


def window_attributes(window: tuple[int, int]) -> dict[str, int]:
    """None where there's no window: the op has had these attributes since a later version only."""
    return {} if window == (-1, -1) else {"left_window_size": window[0], "right_window_size": window[1]}


def test_a_past_and_valid_lengths() -> None:
    q, k, v = random_heads(HEADS, QUERIES), random_heads(KV_HEADS, QUERIES), random_heads(KV_HEADS, QUERIES)
    past = random_heads(KV_HEADS, 90), random_heads(KV_HEADS, 90)
    seen = np.arange(QUERIES + 90) <= np.arange(QUERIES)[:, None] + 90
    found = attention({"q": q, "k": k, "v": v, "past_key": past[0], "past_value": past[1]}, 2, is_causal=1)
    keys, values = np.concatenate([past[0], k], axis=2), np.concatenate([past[1], v], axis=2)
    np.testing.assert_allclose(found, wanted(q, keys, values, hide(seen)), atol=1e-5)
    valid = np.array([QUERIES, QUERIES - 40])
    found = attention({"q": q, "k": k, "v": v, "valid": valid}, 2, is_causal=1)
    key, row = np.arange(QUERIES), np.arange(QUERIES)[:, None]
    seen = np.stack([(key <= row + length - QUERIES) & (key < length) for length in valid])[:, None]
    np.testing.assert_allclose(found, wanted(q, k, v, hide(seen)), atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_one_query_over_many_keys(masked: bool) -> None:
    q, k, v = random_heads(HEADS, 1, 1), random_heads(KV_HEADS, 70_000, 1), random_heads(KV_HEADS, 70_000, 1)
    mask = np.ones((1, 1, 1, 70_000), bool)
    mask[..., :60_000] = not masked
    found = attention({"q": q, "k": k, "v": v, "mask": mask}, 2)
    np.testing.assert_allclose(found, wanted(q, k, v, hide(mask)), atol=1e-5)


def test_packed_heads_come_out_packed() -> None:
    q, k, v = (RNG.standard_normal((2, length, heads * DIM), dtype=np.float32) for length, heads in ((150, 4), (300, 2), (300, 2)))
    found = attention({"q": q, "k": k, "v": v}, 2, q_num_heads=HEADS, kv_num_heads=KV_HEADS)
    one, two, three = (x.reshape(2, -1, heads, DIM).transpose(0, 2, 1, 3) for x, heads in ((q, 4), (k, 2), (v, 2)))
    np.testing.assert_allclose(found, wanted(one, two, three, np.zeros(())).transpose(0, 2, 1, 3).reshape(2, 150, -1), atol=1e-5)


def test_a_mask_of_one_key_hides_all_others() -> None:
    q, k, v = random_heads(HEADS, QUERIES), random_heads(KV_HEADS, KEYS), random_heads(KV_HEADS, KEYS)
    seen = np.zeros((QUERIES, KEYS), bool)
    seen[:, 0] = True
    for mask in (np.ones((QUERIES, 1), bool), np.ones((1, 1), bool)):
        y = attention({"q": q, "k": k, "v": v, "mask": mask}, threads=2)
        np.testing.assert_allclose(y, wanted(q, k, v, hide(seen)), atol=1e-5)
