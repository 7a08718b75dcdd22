"""Latency, throughput and memory of one decoder with any cache layouts, and without a cache, each as a function of the context's length."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from miniort.generation.cache import KVCache
from miniort.generation.decoder import Decoder
from miniort.generation.generator import Generator, generate
from miniort.generation.statistics import peak_memory
from miniort.generation.verification import LayoutChoice, context_limit
from miniort.types import IntArray

SHORTEST_CONTEXT = 16
"""The first context that is measured; then each twice as long, and the limit."""

BATCHES = (1, 2, 4, 8)
"""Sizes of the batches whose throughput is measured."""


@dataclass(frozen=True)
class TimeAt:
    """Seconds that something takes with that many tokens."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Latency:
    """Times of one layout, medians of several runs.

    `first_token`: from a prompt of that length to its first token. `next_token`: one step behind that many tokens.
    `crossover`: the context from which on a step is faster than an uncached one, None if it never is; between two measured ones by
    linear interpolation. `full_run`: one token, then one after the other until the context is full.
    """

    layout: str
    first_token: tuple[TimeAt, ...]
    next_token: tuple[TimeAt, ...]
    crossover: float | None
    full_run: TimeAt


@dataclass(frozen=True)
class UncachedLatency:
    """Times of steps that compute the whole history again. `full_run` is the sum over all lengths, by the measured ones."""

    next_token: tuple[TimeAt, ...]
    full_run: TimeAt


@dataclass(frozen=True)
class Rate:
    """New tokens per second of a batch, all rows together, prompt not counted."""

    layout: str
    batch: int
    tokens_per_second: float


@dataclass(frozen=True)
class Memory:
    """Bytes with a context of that many tokens.

    `by_formula`: 2·layers·kv_heads·head_dim·tokens·itemsize. `live`: what the cache says that its tokens take. `reserved`: what the
    providers' pools hold. `peak`: the process's largest resident set until then, None on systems that don't tell.
    """

    layout: str
    tokens: int
    by_formula: int
    live: int
    reserved: int
    peak: int | None


@dataclass(frozen=True)
class Measurement:
    """All figures of one decoder."""

    uncached: UncachedLatency
    latency: tuple[Latency, ...]
    throughput: tuple[Rate, ...]
    memory: tuple[Memory, ...]


class Meter:
    """Measures one decoder with layouts.

    max_context: the longest context, None for the model's own. repeats: how often a step is run. batches: sizes of the batches.
    """

    def __init__(
        self, decoder: Decoder, *, max_context: int | None = None, repeats: int = 5, batches: Sequence[int] = BATCHES, steps: int = 16
    ) -> None:
        self.decoder = decoder
        self.limit = context_limit(decoder, max_context)
        self.repeats = repeats
        self.batches = tuple(batches)
        self.steps = min(steps, self.limit - 1)
        one = np.zeros((1, 1), np.int64)
        vocabulary = decoder.uncached(one, one + 1).shape[-1]
        self._tokens: IntArray = np.random.default_rng(1).integers(0, vocabulary, (max(self.batches), self.limit))

    @property
    def contexts(self) -> tuple[int, ...]:
        """Lengths that are measured: 16, 32, 64, … and the limit."""
        lengths = []
        length = SHORTEST_CONTEXT
        while length < self.limit:
            lengths.append(length)
            length *= 2
        return (*lengths, self.limit)

    def measure(self, layouts: Sequence[LayoutChoice]) -> Measurement:
        """All figures. Memory comes first, for a process's peak never falls, and an uncached run needs the most."""
        memory = tuple(self.memory(layout, tokens) for layout in layouts for tokens in self.contexts)
        uncached = self.uncached()
        latency = tuple(self.latency(layout, uncached) for layout in layouts)
        throughput = tuple(self.throughput(layout, batch) for layout in layouts for batch in self.batches)
        return Measurement(uncached, latency, throughput, memory)

    def uncached(self) -> UncachedLatency:
        """Steps without a cache."""
        points = []
        for tokens in self.contexts:
            ids, mask = self._tokens[:1, :tokens], np.ones((1, tokens), np.int64)
            points.append(TimeAt(tokens, self._time(lambda ids=ids, mask=mask: self.decoder.uncached(ids, mask))))  # type: ignore[misc]
        return UncachedLatency(tuple(points), TimeAt(self.limit, sum_over_lengths(points)))

    def latency(self, layout: LayoutChoice, uncached: UncachedLatency) -> Latency:
        """Steps with a cache. A step that is timed isn't committed, so that the next one sees the same context."""
        first, following = [], []
        for tokens in self.contexts:
            first.append(TimeAt(tokens, self._time(lambda tokens=tokens: self._filled(layout, tokens))))  # type: ignore[misc]
            cache = self._filled(layout, tokens - 1)
            ids, mask = self._tokens[:1, tokens - 1 : tokens], np.ones((1, tokens), np.int64)
            step = self._time(lambda ids=ids, mask=mask, cache=cache: self.decoder.forward(ids, mask, cache))  # type: ignore[misc]
            following.append(TimeAt(tokens, step))
        return Latency(
            layout.label,
            tuple(first),
            tuple(following),
            crossover(following, uncached.next_token),
            TimeAt(self.limit, self._full_run(layout)),
        )

    def throughput(self, layout: LayoutChoice, batch: int) -> Rate:
        """New tokens per second behind prompts of 16 tokens, or as many as fit."""
        prompt = max(1, min(SHORTEST_CONTEXT, self.limit - self.steps))
        generator = self._generator(layout, batch)
        generator.append_tokens(self._tokens[:batch, :prompt])
        generator.step()
        start = time.perf_counter()
        steps = sum(1 for _ in generate(generator, self.steps))
        return Rate(layout.label, batch, batch * steps / (time.perf_counter() - start))

    def memory(self, layout: LayoutChoice, tokens: int) -> Memory:
        """Bytes after a prompt of that many tokens."""
        cache = self._filled(layout, tokens)
        providers = {id(each.provider): each.provider for session in self.decoder.sessions.values() for each in session.providers}
        return Memory(
            layout=layout.label,
            tokens=tokens,
            by_formula=self.decoder.cache_spec(1).bytes_per_token() * tokens,
            live=cache.nbytes,
            reserved=sum(provider.memory().reserved for provider in providers.values()),
            peak=peak_memory(),
        )

    def _generator(self, layout: LayoutChoice, batch: int = 1) -> Generator:
        cache = self.decoder.new_cache(layout.name, batch, **layout.options)
        return Generator(self.decoder, cache, self.decoder.new_sampler(), end_tokens=())

    def _filled(self, layout: LayoutChoice, tokens: int) -> KVCache:
        """A cache with the first `tokens` tokens in it."""
        cache = self.decoder.new_cache(layout.name, 1, **layout.options)
        if tokens:
            self.decoder.forward(self._tokens[:1, :tokens], np.ones((1, tokens), np.int64), cache)
            cache.commit(tokens)
        return cache

    def _full_run(self, layout: LayoutChoice) -> float:
        generator = self._generator(layout)
        generator.append_tokens(self._tokens[:1, :1])
        start = time.perf_counter()
        for _ in generate(generator):
            if generator.tokens.shape[1] > self.limit:
                break
        return time.perf_counter() - start

    def _time(self, run: Callable[[], object]) -> float:
        """The median time of several runs, after one that isn't counted."""
        run()
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return median(times)


def crossover(cached: Sequence[TimeAt], uncached: Sequence[TimeAt]) -> float | None:
    """The number of tokens from which on `cached` is faster at every measured length; both are of the same lengths, ascending."""
    gains = [without.seconds - with_cache.seconds for with_cache, without in zip(cached, uncached, strict=True)]
    if gains[-1] <= 0:
        return None
    slower = [index for index, gain in enumerate(gains) if gain <= 0]
    if not slower:
        return float(cached[0].tokens)
    left, right = slower[-1], slower[-1] + 1
    share = -gains[left] / (gains[right] - gains[left])
    return cached[left].tokens + share * (cached[right].tokens - cached[left].tokens)


def sum_over_lengths(points: Sequence[TimeAt]) -> float:
    """Σ seconds(n) for n = 1 … the last length, with seconds(n) linear between measured lengths, and constant before the first."""
    total = points[0].seconds * points[0].tokens
    for left, right in pairwise(points):
        steps = right.tokens - left.tokens
        slope = (right.seconds - left.seconds) / steps
        total += sum(left.seconds + slope * step for step in range(1, steps + 1))
    return total
