"""What is each layout's own: how much it stores, what it shares, and how far it goes back."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miniort.errors import CacheError, PluginError
from miniort.generation.cache import BlockedView, CacheLayoutInfo, CacheSpec, KVCache
from miniort.plugins import collect_mapping, create_plugin_manager
from miniort.types import Array, DType

LAYOUTS = collect_mapping(create_plugin_manager(allow=["cache_layouts"]), "miniort_cache_layouts", CacheLayoutInfo)
FLOAT32 = np.dtype(np.float32)


def spec_of(batch: int = 1, capacity: int | None = None, dtype: DType = FLOAT32) -> CacheSpec:
    return CacheSpec(layers=2, batch=batch, kv_heads=2, head_dim=3, value_head_dim=4, dtype=dtype, capacity=capacity)


def new(layout: str, spec: CacheSpec | None = None, **options: int) -> Any:
    return LAYOUTS[layout].create(spec or spec_of(), **options)


def tokens(numbers: list[int], batch: int = 1, dtype: DType = FLOAT32) -> tuple[Array, Array]:
    """A key and a value all of whose numbers are those of the tokens: [batch, 2, len(numbers), dim]."""
    number = np.array(numbers, dtype)[None, None, :, None]
    shape = (batch, 2, len(numbers))
    return np.broadcast_to(number, (*shape, 3)).copy(), np.broadcast_to(number, (*shape, 4)).copy()


def step(cache: KVCache, *numbers: int, batch: int = 1) -> None:
    for layer in range(2):
        cache.append(layer, *tokens(list(numbers), batch))
    cache.commit(len(numbers))


def numbers_in(cache: KVCache, batch: int = 1, row: int = 0) -> list[int]:
    keys, values = (np.asarray(view) for view in cache.append(1, *tokens([], batch)))
    assert (keys[..., :1] == keys).all()
    assert keys[row, 0, :, 0].tolist() == values[row, 1, :, 0].tolist()
    return [int(number) for number in keys[row, 0, :, 0]]


def test_there_are_these_layouts() -> None:
    assert list(LAYOUTS) == ["concat_bhtd", "concat_bthd", "int8", "paged", "static", "window"]
    assert [name for name, info in LAYOUTS.items() if info.lets_go] == ["window"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_element_types_stay(layout: str, dtype: Any) -> None:
    spec = spec_of(dtype=np.dtype(dtype))
    cache = new(layout, spec)
    for number in range(40):
        for layer in range(2):
            keys, values = cache.append(layer, *tokens([number], dtype=spec.dtype))
        cache.commit(1)
    assert keys.dtype == values.dtype == spec.dtype == np.asarray(keys).dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refusals_say_what_was_wanted(layout: str) -> None:
    cache = new(layout, spec_of(capacity=4))
    key, value = tokens([1, 2])
    with pytest.raises(CacheError, match=r"layer 0: the cache takes a value of float32 \[1, 2, new, 4\], found float32 \[1, 2, 2, 3\]"):
        cache.append(0, key, key)
    with pytest.raises(CacheError, match=r"layer 1: the cache takes a key of float32 \[1, 2, new, 3\], found float64"):
        cache.append(1, key.astype(np.float64), value)
    with pytest.raises(CacheError, match="key and value must have as many tokens, found 2 and 1"):
        cache.append(0, key, value[:, :, :1])
    with pytest.raises(CacheError, match="the cache has layers 0 to 1, found layer 2"):
        cache.append(2, key, value)
    step(cache, 1, 2, 3)
    with pytest.raises(CacheError, match="the cache holds 4 tokens at most: 3 are in it, and 2 more don't fit"):
        cache.append(0, key, value)
    cache.append(0, key[:, :, :1], value[:, :, :1])
    with pytest.raises(CacheError, match="commit of 1 tokens: layer 1 was appended only 0"):
        cache.commit(1)
    with pytest.raises(CacheError, match="crop needs a length from 0 to 3, found 4"):
        cache.crop(4)
    with pytest.raises(CacheError, match="reorder needs a list of rows from 0 to 0, found"):
        cache.reorder(np.array([1]))


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("static", {"max_length": 0}, "'static': max_length must be at least 1, found 0"),
        ("static", {"step": 0}, "'static': step must be at least 1, found 0"),
        ("paged", {"page_size": 0}, "'paged': page_size must be at least 1, found 0"),
        ("window", {"window": 0}, "'window': window must be at least 1, found 0"),
        ("window", {"sinks": -1}, "'window': sinks and rewind must not be negative, found -1 and 64"),
        ("int8", {"block": 0}, "'int8': block must be at least 1, found 0"),
    ],
)
def test_options_that_make_no_sense(layout: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        new(layout, **options)


# static


def reserved(cache: Any) -> int:
    """Tokens that a static cache has room for in its first layer."""
    return int(cache.length + next(iter(cache.unused())).shape[2])


def test_static_is_written_in_place_and_views_are_slices() -> None:
    cache = new("static", spec_of(capacity=100), max_length=100)
    first, _ = cache.append(0, *tokens([1]))
    step(cache, 1)
    second, _ = cache.append(0, *tokens([2]))
    assert np.shares_memory(first, second)
    assert reserved(cache) == 100


def test_static_takes_a_limit_below_the_models() -> None:
    cache = new("static", spec_of(capacity=100), max_length=2)
    step(cache, 1, 2)
    with pytest.raises(CacheError, match="the cache holds 2 tokens at most"):
        cache.append(0, *tokens([3]))
    assert reserved(new("static", spec_of(capacity=5), max_length=9)) == 5


@pytest.mark.parametrize(("capacity", "last"), [(None, 16), (11, 11)])
def test_static_doubles_up_to_the_models_context(capacity: int | None, last: int) -> None:
    cache = new("static", spec_of(capacity=capacity), step=4)
    sizes = []
    for number in range(9):
        step(cache, number)
        sizes.append(reserved(cache))
    assert sizes == [4] * 4 + [8] * 4 + [last]
    assert numbers_in(cache) == list(range(9))


def test_static_makes_room_for_a_prompt_at_once() -> None:
    cache = new("static", step=4)
    cache.append(0, *tokens(list(range(18))))
    assert reserved(cache) == 20


# paged


def test_paged_gives_one_array_where_pages_follow_one_another() -> None:
    cache = new("paged", page_size=2)
    for number in range(9):
        step(cache, number)
    keys, _ = cache.append(0, *tokens([9]))
    assert isinstance(keys, np.ndarray)
    assert keys.base is not None
    assert keys[0, 0, :, 0].tolist() == list(range(10))


def test_paged_reads_rows_that_grow_together_without_copies() -> None:
    cache = new("paged", spec_of(batch=3), page_size=2)
    for number in range(7):
        step(cache, number, batch=3)
    keys, _ = cache.append(0, *tokens([7], 3))
    assert isinstance(keys, BlockedView)
    assert [block.tokens.shape for block in keys.blocks] == [(3, 2, 2, 3)] * 4
    again, _ = cache.append(0, *tokens([8], 3))
    for block, other in zip(keys.blocks, again.blocks, strict=True):
        assert np.shares_memory(block.tokens, other.tokens)


def test_a_fork_of_paged_copies_nothing_and_the_first_write_one_page() -> None:
    cache = new("paged", page_size=4)
    step(cache, *range(10))
    pool = cache._pool
    assert int((pool.references > 0).sum()) == 3
    fork = cache.fork()
    assert int((pool.references > 0).sum()) == 3
    assert np.shares_memory(cache.append(0, *tokens([]))[0], fork.append(0, *tokens([]))[0])
    step(fork, 77)
    assert int((pool.references > 0).sum()) == 4
    step(cache, 10)
    assert int((pool.references > 0).sum()) == 4
    assert numbers_in(cache) == list(range(11))
    assert numbers_in(fork) == [*range(10), 77]


def test_paged_takes_the_pages_of_a_dropped_fork_back() -> None:
    cache = new("paged", page_size=2)
    step(cache, *range(6))
    pages = len(cache._pool.references)
    for number in range(400):  # these would be more pages than a slab has
        fork = cache.fork()
        step(fork, *range(number, number + 5))
        del fork
    assert len(cache._pool.references) == pages
    assert (cache._pool.references[cache._table.pages] == 1).all()
    assert int(cache._pool.references.sum()) == 3


def test_a_common_prompt_is_stored_once_among_rows() -> None:
    cache = new("paged", spec_of(), page_size=4)
    step(cache, *range(100))
    alone = cache.nbytes
    cache.reorder(np.zeros(8, np.int64))
    assert cache.nbytes == alone
    keys, _ = cache.append(0, *tokens([100], 8))
    shared = [block for block in keys.blocks if block.rows == slice(0, 8) and len(block.tokens) == 1]
    assert sum(block.tokens.shape[2] for block in shared) == 100
    for layer in range(2):
        cache.append(layer, *tokens([100], 8))
    cache.commit(1)
    page = 4 * spec_of().bytes_per_token()
    assert cache.nbytes == alone + 8 * page
    assert all(numbers_in(cache, 8, row) == list(range(101)) for row in range(8))


# window


def test_the_first_token_falls_out_of_a_window_of_eight_when_the_ninth_comes() -> None:
    """huggingface/transformers#37574: a 6-token prompt, then four tokens."""
    cache = new("window", window=8, sinks=0)
    step(cache, *range(6))
    kept = []
    for number in range(6, 10):
        step(cache, number)
        kept.append(cache.positions().tolist())
        assert numbers_in(cache) == kept[-1]
    assert kept == [list(range(7)), list(range(8)), list(range(1, 9)), list(range(2, 10))]


def test_sinks_stay() -> None:
    cache = new("window", window=3, sinks=2)
    for number in range(20):
        step(cache, number)
    assert numbers_in(cache) == cache.positions().tolist() == [0, 1, 17, 18, 19]
    keys, _ = cache.append(0, *tokens([20]))
    assert isinstance(keys, BlockedView)
    assert [block.tokens.shape[2] for block in keys.blocks] == [2, 4]


def test_a_window_goes_back_as_far_as_it_says() -> None:
    cache = new("window", window=3, sinks=1, rewind=4)
    for number in range(50):
        step(cache, number)
        assert cache.length - cache.min_length >= min(4, cache.length)
    shortest = cache.min_length
    with pytest.raises(CacheError, match=f"crop needs a length from {shortest} to 50, found {shortest - 1}: older tokens are gone"):
        cache.crop(shortest - 1)
    cache.crop(shortest)
    assert numbers_in(cache) == [0, shortest - 3, shortest - 2, shortest - 1]


def test_a_window_holds_no_more_after_a_long_prompt_than_after_many_steps() -> None:
    cache = new("window", window=16, sinks=2, rewind=4)
    step(cache, *range(2000))
    for number in range(100):
        step(cache, number)
        assert cache.nbytes <= (2 + 2 * (16 + 4)) * spec_of().bytes_per_token()
    assert sum(buffer.nbytes for store in cache._layers for buffer in store.buffers) <= 50 * spec_of().bytes_per_token()


# int8


def test_int8_is_within_half_a_scale_and_a_quarter_of_the_bytes() -> None:
    spec = CacheSpec(layers=1, batch=2, kv_heads=3, head_dim=64, value_head_dim=64, dtype=FLOAT32)
    cache = LAYOUTS["int8"].create(spec, block=16)
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((2, 3, 160, 64)).astype(np.float32) * np.exp(rng.standard_normal((2, 3, 160, 1))).astype(np.float32)
    for start in range(0, 160, 10):
        cache.append(0, exact[:, :, start : start + 10], exact[:, :, start : start + 10])
        cache.commit(10)
    found, _ = cache.append(0, exact[:, :, :0], exact[:, :, :0])
    largest = np.abs(exact).reshape(2, 3, 10, 16 * 64).max(axis=3).repeat(16, axis=2)[..., None]
    error = np.abs(np.asarray(found) - exact)
    assert (error <= largest / 254 * (1 + 1e-5)).all()
    assert error.max() > largest.min() / 1000
    assert 160 * spec.bytes_per_token() / 4 < cache.nbytes < 160 * spec.bytes_per_token() / 3.9


def test_int8_rounds_once_whatever_is_rewound() -> None:
    cache = new("int8", block=4)
    rng = np.random.default_rng(1)

    def run(count: int) -> None:
        for layer in range(2):
            cache.append(layer, *(rng.standard_normal((1, 2, count, dim)).astype(np.float32) for dim in (3, 4)))
        cache.commit(count)

    run(8)
    before = np.asarray(cache.append(0, *tokens([]))[0])[:, :, :6]
    for _ in range(30):
        cache.crop(6)
        run(7)
    assert np.array_equal(np.asarray(cache.append(0, *tokens([]))[0])[:, :, :6], before)


def test_int8_of_zeros() -> None:
    cache = new("int8", block=2)
    step(cache, 0, 0, 0)
    assert numbers_in(cache) == [0, 0, 0]


# all


@pytest.mark.parametrize("layout", ["static", "paged", "window", "int8"])
def test_a_thousand_steps_leave_nothing_behind_but_the_cache(layout: str) -> None:
    cache = new(layout)
    step(cache, 1)
    tracemalloc.start()
    try:
        for number in range(1000):
            step(cache, number)
        found, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    reserved = 1280 * spec_of().bytes_per_token()  # 1,000 tokens, and as many as a layout grows by
    assert found < reserved + 50_000
    assert peak < 2 * reserved + 50_000
