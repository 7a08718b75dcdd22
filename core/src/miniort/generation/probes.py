"""What a decoder's graphs can do that nothing in them says, found out by small runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miniort.errors import MiniortError
from miniort.generation.cache import CacheSpec, KVCache
from miniort.types import Array, DType, FloatArray, IntArray

Forward = Callable[[IntArray, IntArray, KVCache], FloatArray]
"""tokens [batch, new], mask [batch, time], cache -> logits [batch, n, vocabulary] of the last n tokens."""

PAST = 2
"""Tokens in the past of `sees_later_tokens`: enough that a mask that forgets the past would show."""

PADDING = 6


class _Recorder:
    """A cache with some tokens of zeros, that keeps what was appended last in each layer."""

    def __init__(self, spec: CacheSpec, length: int) -> None:
        self.spec = spec
        self.length = self.min_length = length
        self.appended: dict[int, tuple[Array, Array]] = {}
        self.nbytes = 0

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        if key.shape[2]:
            self.appended[layer] = key, value
        spec = self.spec
        past = (np.zeros((spec.batch, spec.kv_heads, self.length, dim), spec.dtype) for dim in (spec.head_dim, spec.value_head_dim))
        keys, values = (np.concatenate([old, new], axis=2) for old, new in zip(past, (key, value), strict=True))
        return keys, values

    def commit(self, count: int) -> None: ...

    def crop(self, length: int) -> None: ...

    def reorder(self, rows: IntArray) -> None: ...

    def fork(self) -> KVCache:
        return self

    def positions(self) -> IntArray:
        return np.arange(self.length)


def sees_later_tokens(forward: Forward, spec: Callable[[int], CacheSpec], rows: int) -> bool:
    """Whether what a graph computes for a token behind a past depends on the token after it, or it takes no two tokens at all.

    The same token is given twice with different ones after it. Keys and values that it appends, and its logits where the graph gives those
    of every token, must be the same. Both are rows of one run, so that not even scales that are taken from a whole tensor differ; of a
    run each where the graph takes one row (`rows` 1).
    """
    tokens = np.array([[1, 2], [1, 3]])
    found: list[list[Array]] = []
    try:
        for batch in np.split(tokens, len(tokens) // rows):
            cache = _Recorder(spec(rows), PAST)
            logits = forward(batch, np.ones((rows, PAST + 2), np.int64), cache)
            first = [part[:, :, 0] for layer in sorted(cache.appended) for part in cache.appended[layer]]
            if logits.shape[1] == 2:
                first.append(logits[:, 0])
            found += [[part[row] for part in first] for row in range(rows)]
    except MiniortError:
        forward(tokens[:1, :1], np.ones((1, PAST + 1), np.int64), _Recorder(spec(1), PAST))  # if that fails too, it's not the second token
        return True
    one, other = found
    return any(differ(left, right) for left, right in zip(one, other, strict=True))


def heeds_padding(forward: Forward, spec: Callable[[int], CacheSpec]) -> bool:
    """Whether a row that is padded on the left gives the logits that it gives alone."""
    row = np.array([[1, 2, 3]])
    padded = np.pad(row, ((0, 0), (PADDING, 0)))
    mask = np.pad(np.ones_like(row), ((0, 0), (PADDING, 0)))
    try:
        alone, found = (forward(tokens, kept, _Recorder(spec(1), 0))[0, -1] for tokens, kept in ((row, np.ones_like(row)), (padded, mask)))
    except MiniortError:
        return False
    return not differ(found, alone)


def differ(found: Array, wanted: Array) -> bool:
    """Whether two arrays differ by more than rounding, measured by how far apart the numbers in them lie. NaN differs."""
    left, right = (np.asarray(each, np.float64) for each in (found, wanted))
    spread = float(right.max() - right.min())
    error = float(np.abs(left - right).max())
    return not error <= _tolerance((found.dtype, wanted.dtype)) * max(spread, 1e-6)


def _tolerance(dtypes: Sequence[DType | Any]) -> float:
    return 1e-3 if all(dtype.name in ("float32", "float64") for dtype in dtypes) else 2e-2
