"""The compiled functions beside the same formulas in float64: odd sizes, both orders of storage, alone and with a helper."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import miniort_cpu.plugin
import miniort_numba.plugin
from miniort.errors import ProviderError
from miniort.providers import ProviderOptions
from miniort_numba.compiled import attention, few_rows, products, prompt_attention, rows
from miniort_numba.compiled.tiles import LANES
from miniort_numba.compiled.transposition import turn_strip
from miniort_numba.provider import NumbaProvider
from miniort_numba.team import Crew, hire

NO_MASK = np.empty((0, 0, 0, 0), np.uint8)


@pytest.fixture(params=[1, 2, 3], ids=lambda number: f"{number} threads")
def crew(request: pytest.FixtureRequest) -> Crew:
    return hire(request.param)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [(1, 1), (7, 33), (768, 768), (1000, 130), (2049, 1100)])
def test_one_row(crew: Crew, size: tuple[int, int]) -> None:
    a, b, y = draw(size[0]), draw(*size), np.full(size[1], np.nan, np.float32)
    products.multiply_row(crew.board, crew.helpers, products.BY_ROWS, a, b, 0, 0, y)
    np.testing.assert_allclose(y, a.astype(float) @ b, atol=5e-4)
    y[:] = np.nan
    turned = np.ascontiguousarray(b.T)
    products.multiply_rows_by_dots(crew.board, crew.helpers, products.BY_DOTS, a[None], turned, y[None])
    np.testing.assert_allclose(y, a.astype(float) @ b, atol=5e-4)


@pytest.mark.parametrize(
    "size",
    [
        (2, 5, 3),
        (3, 77, 130),
        (5, 8, 4),
        (16, 768, 520),
        (33, 300, 100),
        (24, 50, 1100),
        (9, 1, 33),
        (100, 513, 31),
        (6, 0, 7),
        (260, 70, 820),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_several_rows(crew: Crew, size: tuple[int, int, int], turned: bool) -> None:
    count, inner, columns = size
    a, y = draw(count, inner), np.full((count, columns), np.nan, np.float32)
    b = draw(columns, inner).T if turned else draw(inner, columns)
    products.multiply_many_rows(crew.board, crew.helpers, products.BY_STRIPS, a, b, 3, 1, 0, 0, y)
    np.testing.assert_allclose(y, a.astype(float) @ b, atol=5e-4)
    few = min(count, few_rows.MOST_ROWS)
    if not turned:
        y[:] = np.nan
        few_rows.multiply_few_rows(crew.board, crew.helpers, few_rows.FEW_BY_ROWS, a[:few], b, y[:few])
        np.testing.assert_allclose(y[:few], a[:few].astype(float) @ b, atol=5e-4)
    elif inner:
        y[:] = np.nan
        products.multiply_rows_by_dots(crew.board, crew.helpers, products.BY_DOTS, a, b.T, y)
        np.testing.assert_allclose(y, a.astype(float) @ b, atol=5e-4)
        y[:] = np.nan
        few_rows.multiply_few_rows_by_dots(crew.board, crew.helpers, few_rows.FEW_BY_DOTS, a[:few], b.T, y[:few])
        np.testing.assert_allclose(y[:few], a[:few].astype(float) @ b, atol=5e-4)


@pytest.mark.parametrize("size", [(1, 1), (1, 768), (300, 77)])
def test_normalization(crew: Crew, size: tuple[int, int]) -> None:
    x, scale, bias, y = draw(*size), draw(size[1]), draw(size[1]), np.empty(size, np.float32)
    wide = x.astype(float)
    mean, variance = wide.mean(1, keepdims=True), wide.var(1, keepdims=True)
    rows.normalize_rows(crew.board, crew.helpers, rows.LAYER_ROWS, x, scale, bias, 1e-5, y)
    np.testing.assert_allclose(y, (wide - mean) / np.sqrt(variance + 1e-5) * scale + bias, atol=1e-4)
    rows.normalize_rows(crew.board, crew.helpers, rows.ROOT_MEAN_SQUARE_ROWS, x, scale, bias[:0], 1e-5, y)
    np.testing.assert_allclose(y, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * scale, atol=1e-5)


def test_activations(crew: Crew) -> None:
    x = np.concatenate([5 * draw(70_001), np.array([np.nan, np.inf, 0, -0.0, 100, -100, 1e30, -1e30], np.float32)])
    wide, y = x.astype(float), np.empty_like(x)
    with np.errstate(all="ignore"):
        gelu = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        swish = wide / (1 + np.exp(-0.5 * wide))
    rows.activate(crew.board, crew.helpers, rows.GELU, x, 1.0, y)
    np.testing.assert_allclose(y, gelu, rtol=1e-5, atol=1e-6)
    rows.activate(crew.board, crew.helpers, rows.SWISH, x, 0.5, y)
    np.testing.assert_allclose(y, swish, rtol=1e-5, atol=1e-6)
    rows.activate(crew.board, crew.helpers, rows.GELU, x, 1.0, x)  # over itself
    np.testing.assert_allclose(x, gelu, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sizes", [(1, 4, 4, 1, 200), (2, 6, 3, 1, 70), (2, 6, 3, 5, 70), (1, 2, 2, 150, 150), (1, 9, 3, 30, 93), (1, 4, 2, 7, 600)]
)
@pytest.mark.parametrize("masked", ["nothing", "causal", "everything", "by row", "by head"])
def test_attention(crew: Crew, sizes: tuple[int, ...], masked: str) -> None:
    batch, heads, kv_heads, queries, keys = sizes
    q = draw(batch, queries, heads, 40).transpose(0, 2, 1, 3)
    k, v = draw(batch, kv_heads, keys + 5, 40)[:, :, :keys], draw(batch, kv_heads, keys + 5, 24)[:, :, :keys]
    rng = np.random.default_rng(0)
    mask: np.ndarray | None = None
    if masked == "everything":
        mask = np.zeros((1, 1, queries, keys), bool)
    elif masked == "by row":
        mask = rng.random((batch, 1, queries, keys)) < 0.5
    elif masked == "by head":
        mask = rng.random((1, heads, 1, keys)) < 0.1
    seen = np.ones((1, 1, queries, keys), bool) if mask is None else np.broadcast_to(mask, (*mask.shape[:2], queries, keys))
    if masked == "causal":
        seen = np.tril(seen)
    repeated_k, repeated_v = (np.repeat(each.astype(float), heads // kv_heads, 1) for each in (k, v))
    weights = np.exp(0.3 * q @ repeated_k.swapaxes(2, 3)) * seen
    total = weights.sum(-1, keepdims=True)
    wanted = weights @ repeated_v / np.where(total == 0, 1, total)
    given, offset = NO_MASK if mask is None else mask.view(np.uint8), 0 if masked == "causal" else -1
    y = np.full((batch, queries, heads, 24), np.nan, np.float32)
    prompt_attention.attend_by_strips(crew.board, crew.helpers, prompt_attention.BY_STRIPS, q, k, v, given, offset, 0.3, y)
    np.testing.assert_allclose(y.transpose(0, 2, 1, 3), wanted, atol=1e-5)
    if heads // kv_heads * queries <= attention.FEW_ROWS:
        y[:] = np.nan
        attention.attend(crew.board, crew.helpers, attention.ATTEND, q, k, v, given, offset, 0.3, y)
        np.testing.assert_allclose(y.transpose(0, 2, 1, 3), wanted, atol=1e-5)


def test_attention_whose_maximum_grows_from_block_to_block(crew: Crew) -> None:
    keys = 3 * prompt_attention.KEYS
    q, v = np.ones((1, 1, 5, 8), np.float32), draw(1, 1, keys, 64)
    k = np.repeat(np.linspace(-20, 20, keys, dtype=np.float32)[:, None], 8, 1)[None, None]
    mask = np.ones((1, 1, 5, keys), np.uint8)
    mask[0, 0, 1, : keys // 2] = 0  # its first block of keys is hidden whole
    mask[0, 0, 2] = 0
    scores = np.where(mask, q.astype(float) @ k.swapaxes(2, 3), -np.inf)
    weights = np.exp(scores - np.where(mask.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0))
    wanted = weights @ v / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    y = np.full((1, 5, 1, 64), np.nan, np.float32)
    prompt_attention.attend_by_strips(crew.board, crew.helpers, prompt_attention.BY_STRIPS, q, k, v, mask, -1, 1.0, y)
    np.testing.assert_allclose(y.transpose(0, 2, 1, 3), wanted, atol=5e-5)


def test_threads_at_the_same_time() -> None:
    crew = hire(3)
    a, b = draw(40, 300), draw(300, 400)
    wanted = a.astype(float) @ b
    start = threading.Barrier(4)

    def work(_: int) -> float:
        start.wait()
        worst = 0.0
        for _ in range(60):
            y = np.full((40, 400), np.nan, np.float32)
            products.multiply_many_rows(crew.board, crew.helpers, products.BY_STRIPS, a, b, 1, 1, 0, 0, y)
            worst = max(worst, float(np.abs(y - wanted).max()))
        return worst

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < 1e-3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks on this system")
def test_a_fork_has_a_crew_of_its_own() -> None:
    program = """
import os
import numpy as np
from miniort_numba.compiled import products
from miniort_numba.team import hire

def check():
    crew = hire(2)
    a, b, y = np.ones((9, 70), np.float32), np.ones((70, 900), np.float32), np.zeros((9, 900), np.float32)
    products.multiply_many_rows(crew.board, crew.helpers, products.BY_STRIPS, a, b, 1, 1, 0, 0, y)
    assert (y == 70).all()

check()
child = os.fork()
if child == 0:
    check()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
check()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_provider_says_what_it_has() -> None:
    info = miniort_numba.plugin.miniort_providers()[0]
    assert info.priority < miniort_cpu.plugin.miniort_providers()[0].priority
    assert info.check().ok
    with pytest.raises(ProviderError, match="threads"):
        NumbaProvider(ProviderOptions(threads=-1))
    with pytest.raises(ProviderError, match="numba"):
        NumbaProvider(ProviderOptions(options={"speed": "high"}))


@pytest.mark.parametrize("columns", [0, 3, 16, 50, 384])
def test_turned_strip(columns: int) -> None:
    x, y = draw(LANES, columns + 3), np.full((columns + 1, LANES + 5), np.nan, np.float32)
    done = turn_strip(y.ctypes.data, LANES + 5, x.ctypes.data, columns + 3, columns)
    assert columns - LANES < done <= columns
    np.testing.assert_array_equal(y[:done, :LANES], x[:, :done].T)
    assert np.isnan(y[done:]).all()
    assert np.isnan(y[:, LANES:]).all()
