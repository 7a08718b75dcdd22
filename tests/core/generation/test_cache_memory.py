"""The memory of a decoder's caches: one that's gone leaves it to the next, and nobody keeps it when the decoder is closed."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from miniort.generation import Decoder, Generator, generate, open_decoder


def start_of(cache: object) -> int:
    address: int = cache._buffers[0][0].ctypes.data  # type: ignore[attr-defined]
    return address


@pytest.fixture
def decoder() -> Decoder:
    return open_decoder("demo", providers=["cpu"])


def test_a_cache_takes_over_the_memory_of_one_that_is_gone(decoder: Decoder) -> None:
    first, second = (decoder.new_cache("static", max_length=64) for _ in range(2))
    where = start_of(first)
    assert start_of(second) != where
    del first
    third = decoder.new_cache("static", max_length=64)
    assert start_of(third) == where


def test_a_generation_leaves_nothing_lent(decoder: Decoder) -> None:
    memory = decoder._cache_memory
    generator = Generator(decoder, decoder.new_cache("static", max_length=64), decoder.new_sampler(), end_tokens=())
    generator.append_tokens([5, 6, 7])
    list(generate(generator, 8))
    assert decoder.replay_counts is not None
    assert decoder.replay_counts.replayed > 0
    assert memory.memory().active > 0
    del generator
    gc.collect()
    assert memory.memory().active == 0, "a recorded step doesn't keep the cache that it was noted down with"


def test_free_memory_is_bounded_and_goes_back_at_the_end(decoder: Decoder) -> None:
    memory = decoder._cache_memory
    bytes_per_token = decoder.cache_spec(1).bytes_per_token()
    caches = [decoder.new_cache("static", batch=(200 << 20) // (64 * bytes_per_token) + 1, max_length=64) for _ in range(2)]
    assert memory.memory().active >= 400 << 20
    del caches
    assert memory.memory().active == 0
    assert 200 << 20 <= memory.memory().reserved <= 256 << 20
    decoder.close()
    assert memory.memory().reserved == 0


def test_what_was_there_before_is_never_seen(decoder: Decoder) -> None:
    found = []
    for _ in range(2):
        cache = decoder.new_cache("static", max_length=64)
        generator = Generator(decoder, cache, decoder.new_sampler(), end_tokens=())
        generator.append_tokens([5, 6, 7])
        found.append([step.ids.tolist() for step in generate(generator, 6)])
        for pair in cache._buffers:  # type: ignore[attr-defined]
            for buffer in pair:
                buffer[...] = np.nan
        del generator, cache
        gc.collect()
    assert found[0] == found[1]
