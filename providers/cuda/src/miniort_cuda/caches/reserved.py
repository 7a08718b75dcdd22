"""The buffers of a static cache as a recorded step sees them: what the host would decide by their length is on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miniort_cuda.bfloat16 import BFloat16Array
from miniort_cuda.caches.memory import DeviceMemory


class ReservedBuffers:
    """The first `size` tokens of each layer's buffers, written or not. See `miniort.generation.cache.ReservedTokens`.

    buffers: for each layer keys and values, [batch, kv heads, reserved, dim].
    """

    def __init__(self, memory: DeviceMemory, buffers: Sequence[tuple[Any, Any]], size: int) -> None:
        self.size = size
        self._memory = memory
        self._buffers = tuple(buffers)
        self._place: Any = None

    def clear(self, start: int) -> None:
        """Zero what lies behind the first `start` tokens."""
        with self._memory.current_device():
            for pair in self._buffers:
                for buffer in pair:
                    buffer[:, :, start : self.size] = 0

    def write_at(self, place: Any) -> None:
        """Where the next tokens go: [1] int64 on the device."""
        self._place = place

    def append(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Write one token, [batch, kv heads, 1, dim]; gives [batch, kv heads, size, dim] of keys and of values."""
        keys, values = (self._written(*pair) for pair in zip(self._buffers[layer], (key, value), strict=True))
        return keys, values

    def _written(self, buffer: Any, new: Any) -> Any:
        if isinstance(new, BFloat16Array):
            buffer[:, :, self._place] = new.bits
            return BFloat16Array(buffer[:, :, : self.size])
        buffer[:, :, self._place] = new
        return buffer[:, :, : self.size]
