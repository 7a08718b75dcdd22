"""Old and new tokens joined in a new array at each step: the plainest layout, and the baseline of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miniort.generation.cache import CacheSpec
from miniort.types import IntArray
from miniort_cuda.caches.memory import DeviceCache, DeviceMemory, copied

Pair = tuple[Any, Any]


class ConcatCache(DeviceCache):
    """For each layer all keys and all values, [batch, kv heads, time, dim]. Arrays are never written, so a fork shares them."""

    def __init__(self, memory: DeviceMemory, spec: CacheSpec) -> None:
        super().__init__(memory, spec)
        with memory.current_device():
            keys, values = (self.empty((spec.batch, spec.kv_heads, 0, dim)) for dim in (spec.head_dim, spec.value_head_dim))
        self._kept: Sequence[Pair] = [(keys, values)] * spec.layers
        self._joined: list[Pair | None] = [None] * spec.layers

    def write(self, layer: int, key: Any, value: Any, new: int) -> Pair:
        """Join old and new."""
        xp = self.memory.xp
        keys, values = (xp.concatenate((old, each), axis=2) for old, each in zip(self._kept[layer], (key, value), strict=True))
        self._joined[layer] = keys, values
        return keys, values

    def keep(self, length: int) -> None:
        """Make the first `length` tokens the committed ones: views of what there is."""
        pairs = [old if joined is None or length <= self.length else joined for old, joined in zip(self._kept, self._joined, strict=True)]
        with self.memory.current_device():
            self._kept = [(keys[:, :, :length], values[:, :, :length]) for keys, values in pairs]
        self._joined = [None] * self.spec.layers
        super().keep(length)

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was."""
        rows = self.checked_rows(rows)
        with self.memory.current_device():
            index = self.memory.upload(rows)
            take = self.memory.xp.take
            self._kept = [(take(keys, index, axis=0), take(values, index, axis=0)) for keys, values in self._kept]
        self.batch = len(rows)
        self._joined = [None] * self.spec.layers
        super().keep(self.length)

    def fork(self) -> ConcatCache:
        """A second cache with the same committed tokens, which shares their arrays."""
        other: ConcatCache = copied(self)
        other._joined = [None] * self.spec.layers
        return other
