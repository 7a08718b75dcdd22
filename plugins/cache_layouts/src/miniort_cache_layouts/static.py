"""Buffers that are written in place, and grow as they fill."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from miniort.generation.cache import CacheSpec, reserved_size
from miniort.types import Array, IntArray
from miniort_cache_layouts.arguments import check_append, check_commit, check_crop, checked_rows, require_positive
from miniort_cache_layouts.reserved import ReservedBuffers


class StaticCache:
    """For each layer a buffer of keys and one of values, [batch, kv heads, reserved, dim], of which the first `length` tokens are in use.

    max_length: the most tokens it will hold, where that is fewer than the model's context; the buffers have this size from the start.
    step: without `max_length` buffers begin with this many tokens and at least double when they are full, up to the model's context, so
    that growing copies each token about once in all; sizes are multiples of this.

    A view is a slice of a buffer. In this order of axes a head's tokens stand one behind the other, so attention reads memory in one
    sweep; with [batch, time, kv heads, dim] a step writes in one place but reads in strides, and there's far more to read than to write.
    """

    min_length = 0

    def __init__(self, spec: CacheSpec, max_length: int | None = None, step: int = 256) -> None:
        require_positive("static", max_length=max_length, step=step)
        limits = [limit for limit in (spec.capacity, max_length) if limit is not None]
        self.length = 0
        self._spec = spec
        self._limit = min(limits, default=None)
        self._step = step
        reserved = min([step if max_length is None else max_length, *limits])
        self._buffers = self._first_buffers(reserved)
        self._reserved: ReservedBuffers | None = None
        self._appended = [0] * spec.layers

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        """Write behind the committed tokens, key [batch, kv heads, new, dim], and give a slice of each buffer, [.., length + new, dim]."""
        start = self.length
        end = start + check_append(self._spec, self._batch, self._limit, start, layer, key, value)
        if end > self._buffers[layer][0].shape[2]:
            self._grow(layer, end)
        keys, values = self._buffers[layer]
        keys[:, :, start:end] = key
        values[:, :, start:end] = value
        self._appended[layer] = end - start
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, count: int) -> None:
        """Keep the first `count` of the appended tokens. CacheError if some layer was not appended that many."""
        check_commit(count, self._appended)
        self.length += count
        self._discard_appended()

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens. The next append writes over the others; the buffers keep their size."""
        check_crop(length, 0, self.length)
        self.length = length
        self._discard_appended()

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was, in new buffers."""
        rows = checked_rows(rows, self._batch)
        self._replace_buffers(len(rows), rows)
        self._discard_appended()

    def fork(self) -> StaticCache:
        """A second cache with a copy of the committed tokens."""
        other = object.__new__(StaticCache)
        other.__dict__.update(self.__dict__)
        other._buffers, other._reserved = list(self._buffers), None
        other._replace_buffers(self._batch, slice(None))
        other._discard_appended()
        return other

    def positions(self) -> IntArray:
        """0 … length-1: no token is ever let go."""
        return np.arange(self.length, dtype=np.int64)

    def reserved(self) -> ReservedBuffers | None:
        """The buffers at a size with room for two more tokens, see `reserved_size`."""
        size = reserved_size(self.length, min(keys.shape[2] for keys, _ in self._buffers), self._step)
        if size is None:
            return None
        if self._reserved is None or self._reserved.size < self.length + 2 or not self._reserved.is_of(self._buffers):
            self._reserved = ReservedBuffers(self._buffers, size)
        return self._reserved

    def note_replay(self) -> None:
        """Take one token of every layer as appended."""
        self._appended = [1] * self._spec.layers

    @property
    def nbytes(self) -> int:
        """Bytes of the committed tokens' keys and values; what is reserved beyond them isn't counted."""
        return self.length * self._spec.bytes_per_token() // self._spec.batch * self._batch

    def unused(self) -> Iterator[Array]:
        """The parts of the buffers that hold no committed token."""
        for keys, values in self._buffers:
            yield from (keys[:, :, self.length :], values[:, :, self.length :])

    @property
    def _batch(self) -> int:
        batch: int = self._buffers[0][0].shape[0]
        return batch

    def _first_buffers(self, reserved: int) -> list[tuple[Array, Array]]:
        """Those of all layers, cut from one block, which is large enough for huge pages: they're filled in less time."""
        spec = self._spec
        key_size, value_size = (spec.batch * spec.kv_heads * reserved * dim for dim in (spec.head_dim, spec.value_head_dim))
        block = spec.allocate((spec.layers, key_size + value_size), spec.dtype)
        return [
            (
                layer[:key_size].reshape(spec.batch, spec.kv_heads, reserved, spec.head_dim),
                layer[key_size:].reshape(spec.batch, spec.kv_heads, reserved, spec.value_head_dim),
            )
            for layer in block
        ]

    def _new_buffers(self, batch: int, reserved: int) -> tuple[Array, Array]:
        spec = self._spec
        key_shape, value_shape = ((batch, spec.kv_heads, reserved, dim) for dim in (spec.head_dim, spec.value_head_dim))
        return spec.allocate(key_shape, spec.dtype), spec.allocate(value_shape, spec.dtype)

    def _grow(self, layer: int, wanted: int) -> None:
        rounded = -(-max(wanted, 2 * self._buffers[layer][0].shape[2]) // self._step) * self._step
        buffers = self._new_buffers(self._batch, rounded if self._limit is None else min(rounded, self._limit))
        for new, old in zip(buffers, self._buffers[layer], strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._buffers[layer] = buffers

    def _replace_buffers(self, batch: int, rows: IntArray | slice) -> None:
        """New buffers of the same length with these rows' committed tokens; one layer at a time, so that no second cache is needed."""
        for layer, pair in enumerate(self._buffers):
            buffers = self._new_buffers(batch, pair[0].shape[2])
            for new, old in zip(buffers, pair, strict=True):
                new[:, :, : self.length] = old[rows, :, : self.length]
            self._buffers[layer] = buffers

    def _discard_appended(self) -> None:
        self._appended = [0] * self._spec.layers
