"""The cache layout `example_list`."""

from __future__ import annotations

import numpy as np

from miniort.errors import CacheError
from miniort.generation.cache import CacheSpec
from miniort.types import Array, IntArray

Token = tuple[Array, Array]
"""Key and value of one token in one layer, [batch, kv heads, 1, head dim] each."""


class ListCache:
    """Every layer is a list of tokens, joined whenever it's read: simple, not quick."""

    min_length = 0

    def __init__(self, spec: CacheSpec) -> None:
        sizes = (spec.head_dim, spec.value_head_dim)
        self._empty = tuple(np.empty((spec.batch, spec.kv_heads, 0, size), spec.dtype) for size in sizes)
        self._capacity = spec.capacity
        self._keep([[] for _ in range(spec.layers)])

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        """The kept tokens, then the new ones: [batch, kv heads, new, head dim] -> [batch, kv heads, length + new, head dim]."""
        if self._capacity is not None and self.length + key.shape[2] > self._capacity:
            raise CacheError(f"the cache holds {self._capacity} tokens at most: {self.length} are in it, {key.shape[2]} more don't fit")
        tokens = [(key[:, :, i : i + 1].copy(), value[:, :, i : i + 1].copy()) for i in range(key.shape[2])]
        self._new[layer] = tokens
        keys, values = zip(self._empty, *self._kept[layer], *tokens, strict=True)
        return np.concatenate(keys, axis=2), np.concatenate(values, axis=2)

    def commit(self, count: int) -> None:
        """Keep the first `count` of the new tokens."""
        if count < 0 or any(len(new) < count for new in self._new):
            raise CacheError(f"can't keep {count} tokens: layers were appended {[len(new) for new in self._new]}")
        self._keep([kept + new[:count] for kept, new in zip(self._kept, self._new, strict=True)])

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise CacheError(f"can't crop to {length}: there are {self.length} tokens")
        self._keep([kept[:length] for kept in self._kept])

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was."""
        batch = len(self._empty[0])
        if ((rows < 0) | (rows >= batch)).any():
            raise CacheError(f"the cache has rows 0 to {batch - 1}, found {list(rows)}")
        self._empty = tuple(array[rows] for array in self._empty)
        self._keep([[(key[rows], value[rows]) for key, value in kept] for kept in self._kept])

    def fork(self) -> ListCache:
        """A second cache with the same history. Lists are never changed, only replaced, so both may have the same ones."""
        other = object.__new__(ListCache)
        other.__dict__.update(self.__dict__)
        other._keep(self._kept)
        return other

    def positions(self) -> IntArray:
        """0 … length-1: nothing is let go of."""
        return np.arange(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes of the committed tokens."""
        return sum(array.nbytes for kept in self._kept for token in kept for array in token)

    def _keep(self, kept: list[list[Token]]) -> None:
        """Make these the committed tokens, and drop what was appended."""
        self.length = len(kept[0])
        self._kept = kept
        self._new: list[list[Token]] = [[] for _ in kept]
