"""The layout `concat_bhtd`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from miniort.errors import CacheError
from miniort.generation.cache import CacheLayoutInfo, CacheSpec, KVCache
from miniort.plugins import create_plugin_manager, find_named
from miniort.types import Array


def concat(spec: CacheSpec) -> KVCache:
    """The layout as a generator finds it: by entry point and name."""
    return LAYOUT.create(spec)


LAYOUT = find_named(create_plugin_manager(allow=["cache_layouts"]), "miniort_cache_layouts", CacheLayoutInfo, "concat_bhtd", "cache layout")
SPEC = CacheSpec(layers=2, batch=1, kv_heads=2, head_dim=3, value_head_dim=4, dtype=np.dtype(np.float32), capacity=8)


def tokens(*names: int, spec: CacheSpec = SPEC) -> tuple[Array, Array]:
    """A key and a value whose numbers are those of the tokens: [1, heads, len(names), dim]."""
    name = np.array(names, spec.dtype)[None, None, :, None]
    shape = (spec.batch, spec.kv_heads, len(names))
    return np.broadcast_to(name, (*shape, spec.head_dim)).copy(), np.broadcast_to(name, (*shape, spec.value_head_dim)).copy()


def step(cache: KVCache, *names: int) -> None:
    for layer in range(2):
        cache.append(layer, *tokens(*names))
    cache.commit(len(names))


def names_in(cache: KVCache, layer: int = 0) -> list[int]:
    """What the cache holds, by an append of no tokens."""
    keys, values = cache.append(layer, *tokens())
    assert (keys == keys[:1, :1, :, :1]).all()
    assert keys[0, 0, :, 0].tolist() == values[0, 0, :, 0].tolist()
    return [int(name) for name in keys[0, 0, :, 0]]


def test_several_tokens_follow_the_old_ones_in_order() -> None:
    cache = concat(SPEC)
    step(cache, 1, 2, 3)
    keys, values = cache.append(0, *tokens(4, 5))
    assert keys[0, 1, :, 2].tolist() == [1, 2, 3, 4, 5]
    assert values[0, 1, :, 3].tolist() == [1, 2, 3, 4, 5]
    assert cache.length == 3


def test_a_second_append_replaces_the_first() -> None:
    cache = concat(SPEC)
    step(cache, 1)
    cache.append(0, *tokens(8, 9))
    keys, _ = cache.append(0, *tokens(2))
    assert keys[0, 0, :, 0].tolist() == [1, 2]


def test_commit_of_the_first_few() -> None:
    cache = concat(SPEC)
    for layer in range(2):
        cache.append(layer, *tokens(1, 2, 3))
    cache.commit(2)
    step(cache, 4)
    assert names_in(cache) == names_in(cache, layer=1) == [1, 2, 4]


def test_commit_needs_every_layer() -> None:
    cache = concat(SPEC)
    cache.append(0, *tokens(1, 2))
    cache.append(1, *tokens(1))
    with pytest.raises(CacheError, match=r"commit of 2 tokens: layer 1 was appended only 1"):
        cache.commit(2)
    assert cache.length == 0


def test_what_a_crop_drops_stays_away() -> None:
    cache = concat(SPEC)
    step(cache, 1, 2, 3)
    cache.crop(1)
    step(cache, 7)
    assert names_in(cache) == [1, 7]


def test_crop_says_what_it_can_reach() -> None:
    cache = concat(SPEC)
    step(cache, 1, 2)
    with pytest.raises(CacheError, match="crop needs a length from 0 to 2, found 3"):
        cache.crop(3)


def test_reorder_says_which_rows_there_are() -> None:
    cache = concat(SPEC)
    for rows in (np.array([0, 1]), np.array([-1]), np.array([[0]]), np.array([0.0])):
        with pytest.raises(CacheError, match="reorder needs a list of rows from 0 to 0"):
            cache.reorder(rows)


def test_forks_go_on_apart() -> None:
    cache = concat(SPEC)
    step(cache, 1, 2)
    other = cache.fork()
    step(cache, 3)
    other.crop(1)
    step(other, 8, 9)
    assert names_in(cache) == [1, 2, 3]
    assert names_in(other) == [1, 8, 9]


def test_nbytes_is_the_formula_and_counts_committed_tokens_only() -> None:
    cache = concat(SPEC)
    assert cache.nbytes == 0
    step(cache, 1, 2, 3)
    cache.append(0, *tokens(4))
    assert cache.nbytes == 3 * SPEC.bytes_per_token() == 3 * 2 * 2 * (3 + 4) * 4


def test_past_its_capacity() -> None:
    cache = concat(SPEC)
    step(cache, 1, 2, 3, 4, 5, 6)
    with pytest.raises(CacheError, match=r"the cache holds 8 tokens at most: 6 are in it, and 3 more don't fit"):
        cache.append(0, *tokens(7, 8, 9))
    step(cache, 7, 8)
    assert names_in(cache) == [1, 2, 3, 4, 5, 6, 7, 8]


KEY, VALUE = tokens(1, 2)


@pytest.mark.parametrize(
    ("layer", "key", "value", "message"),
    [
        (0, KEY[:, :1], VALUE, r"layer 0: the cache takes a key of float32 \[1, 2, new, 3\], found float32 \[1, 1, 2, 3\]"),
        (1, KEY, KEY, r"layer 1: the cache takes a value of float32 \[1, 2, new, 4\], found float32 \[1, 2, 2, 3\]"),
        (0, KEY[0], VALUE, r"found float32 \[2, 2, 3\]"),
        (0, KEY[0, 0, 0, 0], VALUE, r"found float32 \[\]"),
        (0, np.concatenate((KEY, KEY)), VALUE, r"found float32 \[2, 2, 2, 3\]"),
        (0, KEY.astype(np.float64), VALUE, r"key of float32 .* found float64"),
        (0, KEY, VALUE.astype(np.float16), r"value of float32 .* found float16"),
        (0, KEY[:, :, :1], VALUE, "key and value must have as many tokens, found 1 and 2"),
        (2, KEY, VALUE, "the cache has layers 0 to 1, found layer 2"),
        (-1, KEY, VALUE, "the cache has layers 0 to 1, found layer -1"),
    ],
)
def test_tokens_that_do_not_fit(layer: int, key: Array, value: Array, message: str) -> None:
    cache = concat(SPEC)
    with pytest.raises(CacheError, match=message):
        cache.append(layer, key, value)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_stays(dtype: type) -> None:
    spec = CacheSpec(layers=1, batch=1, kv_heads=1, head_dim=2, value_head_dim=2, dtype=np.dtype(dtype))
    cache = concat(spec)
    keys, values = cache.append(0, *tokens(1, 2, spec=spec))
    assert keys.dtype == values.dtype == spec.dtype


def test_is_a_kv_cache() -> None:
    assert isinstance(concat(SPEC), KVCache)
