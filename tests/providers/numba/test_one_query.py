"""Attention of one query by parts of the keys, and the short products that it's made of, beside float64."""

from __future__ import annotations

import numpy as np
import pytest

from miniort_numba.compiled import one_query
from miniort_numba.compiled.row_products import add_values, multiply_keys
from miniort_numba.team import hire


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [(900, 64), (37, 64), (37, 80), (5, 128), (33, 16), (40, 200), (1, 64), (2, 7), (17, 0), (0, 64)])
def test_short_products(size: tuple[int, int]) -> None:
    rows = draw(*size)
    a, y = draw(size[1]), np.full(size[0], np.nan, np.float32)
    multiply_keys(y, a, rows)
    np.testing.assert_allclose(y, rows.astype(float) @ a, atol=1e-4)
    factors, total = draw(size[0]), draw(size[1])
    wanted = total + factors.astype(float) @ rows
    add_values(total, factors, rows)
    np.testing.assert_allclose(total, wanted, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [(1, 12, 12, 700, 64, 64), (2, 6, 2, 300, 40, 24), (1, 9, 3, 1000, 64, 64), (3, 2, 1, 5, 16, 16), (1, 2, 2, 0, 8, 8)]
)
@pytest.mark.parametrize("masked", ["nothing", "a prefix", "everything", "by row", "by head", "a whole part"])
def test_one_query(threads: int, sizes: tuple[int, ...], masked: str) -> None:
    batch, heads, kv_heads, keys, dim, width = sizes
    crew = hire(threads)
    q = draw(batch, 1, heads, dim).transpose(0, 2, 1, 3)
    k, v = draw(batch, kv_heads, keys + 5, dim)[:, :, :keys], draw(batch, kv_heads, keys + 5, width)[:, :, :keys]
    rng = np.random.default_rng(0)
    mask = {
        "nothing": np.ones((1, 1, 1, keys), bool),
        "a prefix": np.arange(keys)[None, None, None] >= keys // 3,
        "everything": np.zeros((1, 1, 1, keys), bool),
        "by row": rng.random((batch, 1, 1, keys)) < 0.5,
        "by head": rng.random((1, heads, 1, keys)) < 0.1,
        "a whole part": np.abs(np.arange(keys)[None, None, None] - keys / 2) > keys / 4,
    }[masked]
    repeated_k, repeated_v = (np.repeat(each.astype(float), heads // kv_heads, 1) for each in (k, v))
    weights = np.exp(0.3 * q @ repeated_k.swapaxes(2, 3)) * mask
    total = weights.sum(-1, keepdims=True)
    wanted = weights @ repeated_v / np.where(total == 0, 1, total)
    given = np.empty((0, 0, 0, 0), np.uint8) if masked == "nothing" else mask.view(np.uint8)
    y = np.full((batch, 1, heads, width), np.nan, np.float32)
    one_query.attend_one_query(crew.board, crew.helpers, one_query.ATTEND_PARTS, q, k, v, given, 0.3, y)
    np.testing.assert_allclose(y.transpose(0, 2, 1, 3), wanted, atol=1e-5)
