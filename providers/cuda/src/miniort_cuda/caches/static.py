"""Buffers that are made once and written in place, so that a step moves only its new tokens, and addresses never change."""

from __future__ import annotations

from typing import Any

from miniort.errors import PluginError
from miniort.generation.cache import CacheSpec, reserved_size
from miniort.types import IntArray
from miniort_cuda.caches.memory import DeviceCache, DeviceMemory, copied
from miniort_cuda.caches.reserved import ReservedBuffers

Pair = tuple[Any, Any]


class StaticCache(DeviceCache):
    """For each layer a buffer of keys and one of values, [batch, kv heads, reserved, dim], of which the first `length` tokens are in use.

    max_length: the most tokens it will hold, where that is fewer than the model's context; the buffers have this size from the start.
    step: where nothing sets a limit, buffers grow by this many tokens at a time.
    """

    def __init__(self, memory: DeviceMemory, spec: CacheSpec, max_length: int | None = None, step: int = 256) -> None:
        for name, number in (("max_length", max_length), ("step", step)):
            if number is not None and number < 1:
                raise PluginError(f"cache layout 'static': {name} must be at least 1, found {number}")
        super().__init__(memory, spec)
        limits = [limit for limit in (spec.capacity, max_length) if limit is not None]
        self._limit = min(limits, default=None)
        self._step = step
        self._reserved: ReservedBuffers | None = None
        with memory.current_device():
            self._buffers = [self._new(spec.batch, self._limit or step) for _ in range(spec.layers)]

    def limit(self) -> int | None:
        """The size of the buffers, where they don't grow."""
        return self._limit

    def _new(self, batch: int, reserved: int) -> Pair:
        spec = self.spec
        return self.empty((batch, spec.kv_heads, reserved, spec.head_dim)), self.empty(
            (batch, spec.kv_heads, reserved, spec.value_head_dim)
        )

    def write(self, layer: int, key: Any, value: Any, new: int) -> Pair:
        """Write behind the committed tokens, and give a slice of each buffer."""
        start, end = self.length, self.length + new
        if end > self._buffers[layer][0].shape[2]:
            self._buffers[layer] = self._moved(self._buffers[layer], self.batch, -(-end // self._step) * self._step)
            self._reserved = None
        keys, values = self._buffers[layer]
        if new:
            keys[:, :, start:end] = key
            values[:, :, start:end] = value
        return keys[:, :, :end], values[:, :, :end]

    def _moved(self, pair: Pair, batch: int, reserved: int, index: Any = None) -> Pair:
        """New buffers with the committed tokens of the old, of the rows in `index` if it's given."""
        buffers = self._new(batch, reserved)
        for new, old in zip(buffers, pair, strict=True):
            used = old[:, :, : self.length]
            new[:, :, : self.length] = used if index is None else self.memory.xp.take(used, index, axis=0)
        return buffers

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was, in new buffers."""
        rows = self.checked_rows(rows)
        with self.memory.current_device():
            index = self.memory.upload(rows)
            self._buffers = [self._moved(pair, len(rows), pair[0].shape[2], index) for pair in self._buffers]
        self.batch, self._reserved = len(rows), None
        self.keep(self.length)

    def fork(self) -> StaticCache:
        """A second cache with a copy of the committed tokens."""
        other: StaticCache = copied(self)
        other._reserved = None
        with self.memory.current_device():
            other._buffers = [self._moved(pair, self.batch, pair[0].shape[2]) for pair in self._buffers]
        return other

    def reserved(self) -> ReservedBuffers | None:
        """The buffers at a size with room for two more tokens, see `reserved_size`."""
        size = reserved_size(self.length, min(keys.shape[2] for keys, _ in self._buffers), self._step)
        if size is None:
            return None
        if self._reserved is None or self._reserved.size < self.length + 2:
            self._reserved = ReservedBuffers(self.memory, self._buffers, size)
        return self._reserved

    def note_replay(self) -> None:
        """Take one token of every layer as appended."""
        self.appended = [1] * self.spec.layers
