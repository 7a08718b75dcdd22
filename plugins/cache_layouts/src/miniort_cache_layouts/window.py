"""The first tokens and the last ones; what lies between is let go (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from miniort.errors import PluginError
from miniort.generation.cache import Block, BlockedView, CacheSpec, View
from miniort.types import Array, IntArray
from miniort_cache_layouts.arguments import check_append, check_commit, check_crop, checked_rows, require_positive


class _Layer:
    """One layer's keys and values, [batch, kv heads, slots, dim] each: first the sinks, then tokens `first`, `first` + 1, …

    The buffers are written behind what they hold until they're full. Then new ones take over what is still wanted, so a token is moved
    about once in its life, and views of the old buffers stay as they are.
    """

    def __init__(self, buffers: tuple[Array, Array], first: int) -> None:
        self.buffers = buffers
        self.first = first

    @property
    def slots(self) -> int:
        slots: int = self.buffers[0].shape[2]
        return slots


class WindowCache:
    """Keeps the first `sinks` tokens (attention sinks) and the last `window` ones: it's when number `window` + 1 comes that one falls out.

    rewind: how many tokens a crop can take back for certain: that many more are held than are read.

    A step's queries see what was kept before it and what is new. So a prompt that is run at once is read as a whole, and one that's run in
    chunks isn't. Keys keep the positions that they were computed with.
    """

    def __init__(self, spec: CacheSpec, window: int = 1024, sinks: int = 4, rewind: int = 64) -> None:
        require_positive("window", window=window)
        if sinks < 0 or rewind < 0:
            raise PluginError(f"cache layout 'window': sinks and rewind must not be negative, found {sinks} and {rewind}")
        self.length = 0
        self.min_length = 0  # until a token is gone; then the shortest length whose whole window is still held
        self._spec = spec
        self._window = window
        self._sinks = sinks
        self._held = window + rewind
        self._layers = [_Layer(self._new_buffers(spec.batch, 0), sinks) for _ in range(spec.layers)]
        self._appended = [0] * spec.layers

    def append(self, layer: int, key: Array, value: Array) -> tuple[View, View]:
        """Write behind the committed tokens, key [batch, kv heads, new, dim], and give the sinks and the window: in two blocks, or one."""
        new = check_append(self._spec, self._batch, self._spec.capacity, self.length, layer, key, value)
        store = self._layers[layer]
        if self._slot(store, self.length + new) > store.slots:
            self._move(store, new)
        start, end = self._slot(store, self.length), self._slot(store, self.length + new)
        for buffer, tokens in zip(store.buffers, (key, value), strict=True):
            buffer[:, :, start:end] = tokens
        self._appended[layer] = new
        return self._view(store.buffers[0], store, end), self._view(store.buffers[1], store, end)

    def commit(self, count: int) -> None:
        """Keep the first `count` of the appended tokens. CacheError if some layer was not appended that many."""
        check_commit(count, self._appended)
        self.length += count
        self._discard_appended()
        for store in self._layers:
            if store.slots > 2 * self._full_slots:  # a long prompt is behind
                self._move(store, 0)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; the window goes back to where it was. CacheError where it isn't all held any more."""
        check_crop(length, self.min_length, self.length)
        self.length = length
        self._discard_appended()

    def reorder(self, rows: IntArray) -> None:
        """Make row i what row `rows[i]` was, in new buffers."""
        rows = checked_rows(rows, self._batch)
        self._layers = [_Layer((store.buffers[0][rows], store.buffers[1][rows]), store.first) for store in self._layers]
        self._discard_appended()

    def fork(self) -> WindowCache:
        """A second cache with a copy of what is held."""
        other = object.__new__(WindowCache)
        other.__dict__.update(self.__dict__)
        other.reorder(np.arange(self._batch))
        return other

    def positions(self) -> IntArray:
        """The sinks' and the window's: 0 … sinks-1, then length-window … length-1."""
        sinks = min(self._sinks, self.length)
        return np.concatenate([np.arange(sinks), np.arange(self._first_read, self.length)])

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that are held: sinks, window, and those held for a rewind."""
        first = self._layers[0].first
        held = self.length if self.length <= first else self._sinks + self.length - first
        return held * self._spec.bytes_per_token() // self._spec.batch * self._batch

    def unused(self) -> Iterator[Array]:
        """The parts of the buffers that hold no committed token."""
        for store in self._layers:
            end = self._slot(store, self.length)
            yield from (buffer[:, :, end:] for buffer in store.buffers)

    @property
    def _batch(self) -> int:
        batch: int = self._layers[0].buffers[0].shape[0]
        return batch

    @property
    def _first_read(self) -> int:
        """The time index where the window begins."""
        return max(self._sinks, self.length - self._window)

    @property
    def _full_slots(self) -> int:
        """As many slots as buffers have once the window is full: as many are free after a move as are taken over."""
        return self._sinks + 2 * self._held

    def _slot(self, store: _Layer, time: int) -> int:
        """Where the token of a time index is, among the slots; `time` isn't one between the sinks and `first`."""
        return time if time <= self._sinks else self._sinks + time - store.first

    def _view(self, buffer: Array, store: _Layer, end: int) -> View:
        sinks, start = self._sinks, self._slot(store, self._first_read)
        if end <= sinks or start == sinks:
            return buffer[:, :, :end]
        if sinks == 0:
            return buffer[:, :, start:end]
        batch, heads, _, dim = buffer.shape
        rows = slice(0, batch)
        blocks = (Block(rows, 0, buffer[:, :, :sinks]), Block(rows, sinks, buffer[:, :, start:end]))
        return BlockedView((batch, heads, sinks + end - start, dim), buffer.dtype, blocks)

    def _move(self, store: _Layer, new: int) -> None:
        """Put what is held into new buffers that have room for `new` tokens more."""
        first = max(store.first, self.length - self._held)
        start, end = self._slot(store, first), self._slot(store, self.length)
        sinks = min(self._sinks, self.length)
        wanted = sinks + max(0, end - start) + new
        buffers = self._new_buffers(self._batch, max(wanted, min(self._full_slots, 2 * wanted)))
        for target, source in zip(buffers, store.buffers, strict=True):
            target[:, :, :sinks] = source[:, :, :sinks]
            if end > start:
                target[:, :, self._sinks : self._sinks + end - start] = source[:, :, start:end]
        store.buffers, store.first = buffers, first
        if first > self._sinks:
            self.min_length = max(self.min_length, first + self._window)

    def _new_buffers(self, batch: int, slots: int) -> tuple[Array, Array]:
        spec = self._spec
        key_shape, value_shape = ((batch, spec.kv_heads, slots, dim) for dim in (spec.head_dim, spec.value_head_dim))
        return spec.allocate(key_shape, spec.dtype), spec.allocate(value_shape, spec.dtype)

    def _discard_appended(self) -> None:
        self._appended = [0] * self._spec.layers
