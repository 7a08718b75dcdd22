"""Figures of one generation: latency, throughput and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

from miniort.generation.cache import CacheSpec, KVCache

T = TypeVar("T")


@dataclass(frozen=True)
class GenerationStatistics:
    """Times in seconds, sizes in bytes; None where something can't be measured or didn't happen.

    `time_to_first_token` is from the start to the first token, prompt included. `token_latency` is the median time of the others,
    `tokens_per_second` their mean rate times the batch. `cache_bytes` is what the cache says that it stores,
    `cache_bytes_by_formula` 2·layers·kv_heads·head_dim·tokens·batch·itemsize. `peak_memory` is the process's largest resident set.
    """

    prompt_tokens: int
    new_tokens: int
    time_to_first_token: float | None
    token_latency: float | None
    tokens_per_second: float | None
    cache_bytes: int | None
    cache_bytes_by_formula: int | None
    peak_memory: int | None


class Stopwatch:
    """Notes when each item of an iteration arrives."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.arrivals: list[float] = []

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        """The items themselves; the time that the consumer takes between them counts as theirs."""
        for item in items:
            self.arrivals.append(time.perf_counter())
            yield item

    def statistics(self, prompt_tokens: int, spec: CacheSpec, cache: KVCache | None) -> GenerationStatistics:
        """The figures so far, for a prompt of that many tokens."""
        arrivals = self.arrivals
        steps = [later - earlier for earlier, later in pairwise(arrivals)]
        return GenerationStatistics(
            prompt_tokens=prompt_tokens,
            new_tokens=len(arrivals),
            time_to_first_token=arrivals[0] - self.start if arrivals else None,
            token_latency=median(steps) if steps else None,
            tokens_per_second=spec.batch * len(steps) / sum(steps) if steps and sum(steps) > 0 else None,
            cache_bytes=None if cache is None else cache.nbytes,
            cache_bytes_by_formula=None if cache is None else spec.bytes_per_token() * cache.length,
            peak_memory=peak_memory(),
        )


def peak_memory() -> int | None:
    """The largest resident set of this process so far, in bytes; None on systems that don't tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
