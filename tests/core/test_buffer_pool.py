"""The pool: a block goes back when the last view of its array dies, the best fit is taken, and no more is kept than was agreed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miniort.pool import SMALLEST, WASTE, BufferPool

F32 = np.dtype(np.float32)
KB = 1024


def floats(pool: BufferPool, kilobytes: int) -> Any:
    return pool.allocate([kilobytes * 256], F32)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_an_array_is_what_was_asked_for() -> None:
    pool = BufferPool()
    for shape, dtype in (((128, 256), F32), ((3, 0, 5), F32), ((), F32), ([1 << 20], np.dtype(np.int8)), ((1 << 15,), np.dtype(complex))):
        array = pool.allocate(shape, dtype)
        assert array.shape == tuple(shape)
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.flags.aligned
        array[...] = 1


def test_text_never_comes_from_raw_memory() -> None:
    array = BufferPool().allocate([1 << 16], np.dtype(object))
    assert array[0] is None


def test_a_block_comes_back_when_its_array_dies() -> None:
    pool = BufferPool()
    array = floats(pool, 256)
    first = address(array)
    assert pool.memory().active == 256 * KB
    del array
    assert pool.memory().active == 0
    assert pool.memory().reserved == 256 * KB
    assert address(floats(pool, 256)) == first


VIEWS: list[Callable[[Any], Any]] = [
    lambda a: a[10:20],
    lambda a: a.reshape(-1, 2),
    lambda a: a.reshape(256, -1).T[::2, 1:],
    lambda a: a.view(np.int8),
    lambda a: np.broadcast_to(a, (3, *a.shape)),
    lambda a: np.lib.stride_tricks.sliding_window_view(a, 4),
    lambda a: a[None].squeeze(0).ravel(),
    lambda a: memoryview(a),
    lambda a: np.frombuffer(a, np.uint8),
    lambda a: np.asarray(memoryview(a))[5:],
    lambda a: np.split(a, 4)[2],
    lambda a: np.ma.masked_array(a),
    lambda a: iter(a),
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_keeps_the_block(view: Callable[[Any], Any]) -> None:
    pool = BufferPool()
    array = floats(pool, 256)
    array[...] = 7
    kept = view(array)
    del array
    gc.collect()
    assert pool.memory().active == 256 * KB
    other = floats(pool, 256)
    other[...] = 9
    values = np.asarray(kept if not hasattr(kept, "__next__") else next(kept))
    assert 9 not in np.frombuffer(np.ascontiguousarray(values).tobytes()[:64], np.float32)
    del kept, values
    gc.collect()
    assert pool.memory().active == 256 * KB, "only the other one"


def test_the_smallest_free_block_that_fits() -> None:
    pool = BufferPool()
    held = [floats(pool, size) for size in (512, 128, 256)]
    addresses = {len(array) // 256: address(array) for array in held}
    held.clear()
    held = [floats(pool, size) for size in (200, 100, 300)]
    assert [address(array) for array in held] == [addresses[256], addresses[128], addresses[512]]
    assert pool.memory().reserved == (512 + 128 + 256) * KB


def test_a_block_that_is_far_too_large_is_not_wasted() -> None:
    pool = BufferPool()
    large = floats(pool, 1024)
    first = address(large)
    del large
    small = floats(pool, 1024 // WASTE - 4)
    assert address(small) != first
    assert pool.memory().active < 1024 * KB
    fitting = floats(pool, 1024 // WASTE)
    assert address(fitting) == first


def test_smaller_blocks_make_way_for_one_that_has_to_be_made() -> None:
    pool = BufferPool()
    held = [floats(pool, size) for size in (128, 256, 512)]
    held.clear()
    floats(pool, 200)
    assert pool.memory().reserved == (128 + 256 + 512) * KB, "there's one that fits"
    floats(pool, 600)
    assert pool.memory().reserved == 600 * KB
    floats(pool, 128)
    assert pool.memory().reserved == (600 + 128) * KB, "nothing larger makes way"


def test_runs_that_repeat_come_to_need_nothing_new() -> None:
    pool = BufferPool()
    reserved = []
    for _ in range(6):
        for size in (64, 256, 1024, 256, 4096, 64, 1024):
            floats(pool, size)
        reserved.append(pool.memory().reserved)
    addresses = [{address(floats(pool, size)) for size in (64, 256, 1024, 4096)} for _ in range(2)]
    assert reserved[-1] == reserved[-2] == (64 + 256 + 1024 + 4096) * KB
    assert addresses[0] == addresses[1]


def test_what_is_small_does_not_count() -> None:
    pool = BufferPool()
    array = pool.allocate([SMALLEST - 1], np.dtype(np.int8))
    assert pool.memory().reserved == 0
    array = pool.allocate([SMALLEST], np.dtype(np.int8))
    assert pool.memory().active == SMALLEST
    del array


def test_statistics() -> None:
    pool = BufferPool()
    a, b = floats(pool, 128), floats(pool, 256)
    assert (pool.memory().active, pool.memory().reserved, pool.memory().peak) == (384 * KB, 384 * KB, 384 * KB)
    del a
    c = floats(pool, 128)
    assert pool.memory().peak == 384 * KB
    del b, c
    assert (pool.memory().active, pool.memory().reserved, pool.memory().peak) == (0, 384 * KB, 384 * KB)
    pool.clear()
    assert (pool.memory().active, pool.memory().reserved, pool.memory().peak) == (0, 0, 384 * KB)


def test_no_more_than_agreed_lies_free() -> None:
    pool = BufferPool(keep=1024 * KB)
    held = [floats(pool, 256) for _ in range(16)]
    assert pool.memory().reserved == 4096 * KB
    held.clear()
    assert pool.memory().reserved <= 1024 * KB
    assert pool.memory().active == 0


def test_lent_arrays_outlive_clear_and_the_pool() -> None:
    pool = BufferPool()
    array = floats(pool, 256)
    array[...] = 7
    pool.clear()
    assert pool.memory().active == 256 * KB
    del pool
    gc.collect()
    assert (array == 7).all()


def test_sizes_that_are_numpys_own() -> None:
    pool = BufferPool()
    assert pool.allocate(np.array([256, 128]), F32).shape == (256, 128)


def test_threads() -> None:
    """Four threads allocate, fill, look, and drop; an array that two had at once would show the other's number."""
    pool = BufferPool()
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(mark: int) -> None:
        rng = np.random.default_rng(mark)
        start.wait()
        held: list[Any] = []
        for _ in range(200):
            array = floats(pool, int(rng.integers(64, 192)))
            array[...] = mark
            held.append(array)
            if len(held) > 3:
                wrong.extend(int(value) for value in np.unique(held.pop(0)) if value != mark)
        wrong.extend(int(value) for kept in held for value in np.unique(kept) if value != mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    assert pool.memory().active == 0
    assert pool.memory().peak <= 4 * 5 * 192 * KB
