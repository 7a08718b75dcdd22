"""The buffers of a static cache as a recorded step sees them: always as many tokens, of which the last aren't written yet."""

from __future__ import annotations

from collections.abc import Sequence

from miniort.tape import call
from miniort.types import Array

Pair = tuple[Array, Array]


class ReservedBuffers:
    """The first `size` tokens of each layer's buffers, written or not. See `miniort.generation.cache.ReservedTokens`.

    buffers: for each layer keys and values, [batch, kv heads, reserved, dim].
    """

    def __init__(self, buffers: Sequence[Pair], size: int) -> None:
        self.size = size
        self._buffers = tuple(buffers)
        self._place: Array | None = None

    def is_of(self, buffers: Sequence[Pair]) -> bool:
        """Whether these are the buffers, each the same object."""
        return all(mine is other for mine, other in zip(self._buffers, buffers, strict=True))

    def clear(self, start: int) -> None:
        """Zero what lies behind the first `start` tokens."""
        for keys, values in self._buffers:
            keys[:, :, start : self.size] = 0
            values[:, :, start : self.size] = 0

    def write_at(self, place: Array) -> None:
        """Where the next token goes: an array [1] int64, which is read whenever one is written."""
        self._place = place

    def append(self, layer: int, key: Array, value: Array) -> Pair:
        """Write one token, [batch, kv heads, 1, dim]; gives [batch, kv heads, size, dim] of keys and of values."""
        keys, values = self._buffers[layer]
        call(_write, keys, values, self._place, key, value, writes=(keys, values))
        return keys[:, :, : self.size], values[:, :, : self.size]


def _write(keys: Array, values: Array, place: Array, key: Array, value: Array) -> None:
    start = int(place[0])
    keys[:, :, start : start + 1] = key
    values[:, :, start : start + 1] = value
