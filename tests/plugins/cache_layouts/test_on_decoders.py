"""Every layout under real decoders: what they compute must not depend on how keys and values are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniort import SessionOptions
from miniort.errors import CacheError
from miniort.generation import Decoder, Generator, find_source, generate, open_decoder
from miniort.generation.cache import BlockedView, CacheLayoutInfo, KVCache
from miniort.generation.join import CACHE_INPUT, PAST_SHAPE_INPUT
from miniort.plugins import collect_mapping, create_plugin_manager
from miniort.runtime.observers import NodeInfo
from miniort.types import Array, FloatArray, IntArray

MODELS = ["demo", "gpt2_optimum", "llama_optimum"]
TOLERANCE = 1e-4
INT8_LOGITS = 0.03  # of the logits' range, as measured; what is documented is the error of keys and values
LAYOUTS: dict[str, dict[str, int]] = {
    "concat_bthd": {},
    "static": {},
    "paged": {"page_size": 4},
    "window": {"window": 100, "sinks": 4},
    "int8": {"block": 4},
}
FIXTURES = Path(__file__).parents[2] / "data" / "fixtures"


@cache
def decoder_of(model: str) -> Decoder:
    return open_decoder(model if model == "demo" else FIXTURES / model)


def tokens_of(count: int, seed: int, batch: int = 1) -> IntArray:
    return np.random.default_rng(seed).integers(3, 250, (batch, count))


def greedy(decoder: Decoder, layout: str, prompt: IntArray, mask: IntArray | None, count: int, **options: int) -> tuple[Array, FloatArray]:
    """Greedy tokens [batch, count], and the logits that they were chosen from [batch, count, vocabulary]."""
    cache = decoder.new_cache(layout, len(prompt), **options)
    generator = Generator(decoder, cache, decoder.new_sampler("greedy"), end_tokens=(), prefill_chunk=5)
    generator.append_tokens(prompt, mask)
    steps = list(generate(generator, count))
    return np.stack([step.ids for step in steps], 1), np.stack([step.logits for step in steps], 1)


class Story:
    """Steps of one batch over one cache; the logits of each are kept."""

    def __init__(self, decoder: Decoder, cache: KVCache, mask: IntArray) -> None:
        self.decoder = decoder
        self.cache = cache
        self.mask = mask

    def step(self, tokens: IntArray) -> FloatArray:
        """Logits after the last of `tokens`, [batch, vocabulary]."""
        self.mask = np.concatenate([self.mask, np.ones_like(tokens)], axis=1)
        logits = self.decoder.forward(tokens, self.mask[:, : self.cache.length + tokens.shape[1]], self.cache)
        self.cache.commit(tokens.shape[1])
        return np.array(logits[:, -1], np.float32)

    def steps(self, count: int, seed: int) -> Iterator[FloatArray]:
        for column in tokens_of(count, seed, len(self.mask)).T:
            yield self.step(column[:, None])


def tell(decoder: Decoder, cache: KVCache) -> list[FloatArray]:
    """A left-padded prompt in two chunks, steps, an abandoned step, a fork, a reorder to more rows, and a rewind: logits all along."""
    padded = np.array([[0] * 6 + [1] * 3, [1] * 9])
    story = Story(decoder, cache, padded)
    prompt = tokens_of(9, 1, batch=2)
    found = []
    for chunk in (slice(0, 4), slice(4, 9)):
        logits = decoder.forward(prompt[:, chunk], padded[:, : chunk.stop], cache)
        cache.commit(chunk.stop - chunk.start)
    found.append(np.array(logits[:, -1], np.float32))
    found += story.steps(5, seed=2)
    decoder.forward(tokens_of(3, 3, batch=2), np.pad(story.mask, ((0, 0), (0, 3)), constant_values=1), cache)  # abandoned
    other = Story(decoder, cache.fork(), story.mask)
    found += story.steps(3, seed=4)
    found += other.steps(3, seed=5)
    cache.reorder(np.array([1, 0, 1]))
    story.mask = story.mask[[1, 0, 1]]
    found += story.steps(4, seed=6)
    cache.crop(cache.length - 6)
    story.mask = story.mask[:, : cache.length]
    found.append(story.step(tokens_of(4, 7, batch=3)))
    found += other.steps(2, seed=8)
    return found


@cache
def told(model: str) -> list[FloatArray]:
    decoder = decoder_of(model)
    return tell(decoder, decoder.new_cache("concat_bhtd", batch=2))


def assert_close(layout: str, found: Array, wanted: Array) -> None:
    tolerance = INT8_LOGITS * float(np.ptp(wanted)) if layout == "int8" else TOLERANCE
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_of_a_batch_that_is_chunked_forked_reordered_and_rewound(model: str, layout: str) -> None:
    decoder = decoder_of(model)
    for found, wanted in zip(tell(decoder, decoder.new_cache(layout, 2, **LAYOUTS[layout])), told(model), strict=True):
        assert_close(layout, found, wanted)


@cache
def greedy_on_concat(model: str) -> tuple[Array, FloatArray]:
    mask = np.array([[0] * 8 + [1] * 3, [1] * 11])
    return greedy(decoder_of(model), "concat_bhtd", tokens_of(11, 9, batch=2), mask, 24)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_and_logits(model: str, layout: str) -> None:
    wanted_tokens, wanted_logits = greedy_on_concat(model)
    mask = np.array([[0] * 8 + [1] * 3, [1] * 11])
    tokens, logits = greedy(decoder_of(model), layout, tokens_of(11, 9, batch=2), mask, 24, **LAYOUTS[layout])
    if layout == "int8":  # a near tie may fall otherwise, and then everything after it differs
        same = np.cumprod(tokens == wanted_tokens, axis=1).astype(bool)
        assert same[:, :4].all()
        assert_close(layout, logits[same], wanted_logits[same])
    else:
        assert tokens.tolist() == wanted_tokens.tolist()
        assert_close(layout, logits, wanted_logits)


@pytest.mark.parametrize("model", MODELS)
def test_the_first_layers_keys_and_values_are_within_the_error_of_int8(model: str) -> None:
    """Those of the first layer don't depend on attention, so they're the same numbers before they're stored."""
    decoder, block = decoder_of(model), 4
    spec = decoder.cache_spec(1)
    views = []
    for layout, options in (("concat_bhtd", {}), ("int8", {"block": block})):
        cache = decoder.new_cache(layout, **options)
        story = Story(decoder, cache, np.empty((1, 0), np.int64))
        list(story.steps(16, seed=1))
        empty = [np.empty((1, spec.kv_heads, 0, dim), spec.dtype) for dim in (spec.head_dim, spec.value_head_dim)]
        views.append([np.asarray(view) for view in cache.append(0, *empty)])
    for exact, found in zip(*views, strict=True):
        blocks = np.abs(exact).reshape(1, spec.kv_heads, -1, block, exact.shape[3])
        bound = np.repeat(blocks.max(axis=(3, 4)), block, axis=2)[..., None] / 254
        assert not np.array_equal(exact, found)
        assert (np.abs(exact - found) <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("model", MODELS)
def test_window_equals_the_model_with_the_same_tokens_masked_out(model: str) -> None:
    """The reference keeps everything; a mask hides what fell out of the window, and positions are those that tokens have had all along."""
    window, sinks, count = 6, 2, 20
    decoder = decoder_of(model)
    session = list(decoder.sessions.values())[-1]
    names = {value.name for value in session.get_inputs()}
    assert {"input_ids", "attention_mask", "position_ids", CACHE_INPUT, PAST_SHAPE_INPUT} == names
    full = decoder.new_cache("concat_bhtd")
    spec = decoder.cache_spec(1)
    ids = tokens_of(count, 12)
    wanted = []
    for time in range(count):
        mask = np.ones((1, time + 1), np.int64)
        mask[:, sinks : max(sinks, time - window)] = 0
        feeds = {
            "input_ids": ids[:, time : time + 1],
            "attention_mask": mask,
            "position_ids": np.array([[time]]),
            CACHE_INPUT: full,
            PAST_SHAPE_INPUT: np.array([1, spec.kv_heads, time, spec.head_dim]),
        }
        wanted.append(np.array(session.execute(feeds)["logits"]).reshape(-1))
        full.commit(1)
    cache = decoder.new_cache("window", window=window, sinks=sinks)
    story = Story(decoder, cache, np.empty((1, 0), np.int64))
    found = [story.step(ids[:, time : time + 1])[0] for time in range(count)]
    assert cache.length == count
    assert len(cache.positions()) == window + sinks
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    unwindowed = Story(decoder, decoder.new_cache("concat_bhtd"), np.empty((1, 0), np.int64))
    everything = [unwindowed.step(ids[:, time : time + 1])[0] for time in range(count)]
    assert np.abs(np.array(everything[-1]) - found[-1]).max() > 10 * TOLERANCE, "nothing that fell out mattered, so the test says nothing"


class Appends:
    """Sees what each `CacheAppend` hands on."""

    wants: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.views: list[Any] = []

    def before_node(self, node: NodeInfo, inputs: Any) -> None: ...

    def after_node(self, node: NodeInfo, inputs: Any, outputs: Any) -> None:
        if node.op == "CacheAppend":
            self.views += outputs

    def on_value(self, name: str, value: Any) -> None: ...


@pytest.mark.parametrize(("model", "blocked"), [("demo", True), ("gpt2_optimum", False)])
@pytest.mark.parametrize("layout", ["paged", "window"])
def test_blocks_reach_attention_and_nobody_else(model: str, blocked: bool, layout: str) -> None:
    """The demo's graphs have `Attention`; those of optimum write it out, and get one array where no pass has changed them."""
    decoder = decoder_of(model) if blocked else open_decoder(FIXTURES / model, options=SessionOptions("none"))
    options = {"paged": {"page_size": 2}, "window": {"window": 3, "sinks": 1}}[layout]
    cache = decoder.new_cache(layout, 2, **options)
    story = Story(decoder, cache, np.empty((2, 0), np.int64))
    list(story.steps(8, seed=1))
    appends = Appends()
    session = list(decoder.sessions.values())[-1].observe(appends)
    kept, spec = len(cache.positions()), decoder.cache_spec(2)
    feeds = {
        "input_ids": tokens_of(1, 1, batch=2),
        "attention_mask": np.ones((2, kept + 1), np.int64),
        "position_ids": np.full((2, 1), 8),
        CACHE_INPUT: cache,
        PAST_SHAPE_INPUT: np.array([2, spec.kv_heads, kept, spec.head_dim]),
    }
    session.execute(feeds)
    assert len(appends.views) == 2 * spec.layers
    assert {type(view) for view in appends.views} == {BlockedView if blocked else np.ndarray}


def test_a_model_without_positions_is_refused_a_window() -> None:
    decoder = open_decoder(FIXTURES / "gpt2_optimum_legacy")
    with pytest.raises(CacheError, match=r"'window' lets go of old tokens, but gpt2_optimum_legacy takes no positions.*position_ids"):
        decoder.new_cache("window")


def test_a_cache_from_elsewhere_that_lets_go_is_refused_before_it_is_wrong() -> None:
    legacy = open_decoder(FIXTURES / "gpt2_optimum_legacy")
    cache = decoder_of("gpt2_optimum").new_cache("window", window=2, sinks=0)
    story = Story(legacy, cache, np.empty((1, 0), np.int64))
    list(story.steps(2, seed=1))
    story.step(tokens_of(1, 1))
    with pytest.raises(CacheError, match="the cache has let go of 1 tokens, but gpt2_optimum_legacy takes no positions"):
        story.step(tokens_of(1, 2))
    assert cache.length == 3


@pytest.mark.parametrize("model", MODELS)
def test_generator_rewinds_and_forks_on_paged(model: str) -> None:
    decoder = decoder_of(model)
    runs: list[list[Any]] = []
    for layout in ("concat_bhtd", "paged"):
        generator = Generator(decoder, decoder.new_cache(layout), decoder.new_sampler("greedy"), end_tokens=())
        generator.append_tokens(tokens_of(7, 3))
        first = [step.ids.tolist() for step in generate(generator, 6)]
        fork = generator.fork()
        generator.rewind(9)
        generator.append_tokens(tokens_of(2, 4))
        runs.append([first, [step.ids.tolist() for step in generate(generator, 5)], [step.ids.tolist() for step in generate(fork, 5)]])
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["static", "paged"])
def test_a_thousand_steps_need_no_memory_beyond_the_cache(layout: str) -> None:
    import tracemalloc

    source = replace(find_source(str(FIXTURES / "llama_optimum"), create_plugin_manager()), context_length=None)
    decoder = Decoder(source)
    cache = decoder.new_cache(layout)
    generator = Generator(decoder, cache, decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(tokens_of(8, 1))
    sizes = []
    tracemalloc.start()
    try:
        for number, _ in enumerate(generate(generator, 1000)):
            if number in (200, 999):
                sizes.append((tracemalloc.get_traced_memory()[0], cache.nbytes))
    finally:
        tracemalloc.stop()
    (early, early_cache), (late, late_cache) = sizes
    reserved = 1024 * decoder.cache_spec(1).bytes_per_token()  # the steps and slabs that the cache grows by
    assert cache.length == 1007
    assert late_cache > early_cache
    assert late - early < reserved + 100_000


@pytest.mark.parametrize("layout", ["static", "paged", "window"])
def test_a_cache_takes_over_the_memory_of_one_that_is_gone(layout: str) -> None:
    spec = replace(decoder_of("gpt2_optimum").cache_spec(1), capacity=None)
    create = collect_mapping(create_plugin_manager(), "miniort_cache_layouts", CacheLayoutInfo)[layout].create
    tokens = np.zeros((1, spec.kv_heads, 5_000, spec.head_dim), spec.dtype)

    def filled() -> tuple[KVCache, set[int]]:
        cache, places = create(spec), set()
        for layer in range(spec.layers):
            for view in cache.append(layer, tokens, tokens):
                parts = [block.tokens for block in view.blocks] if isinstance(view, BlockedView) else [view]
                places |= {part.ctypes.data for part in parts}
        return cache, places

    first, places = filled()
    second, others = filled()
    assert not places & others
    del first
    third, again = filled()
    assert again & places
    assert not again & others
    del second, third
