"""A run that was recorded as a CUDA graph: one launch hands all of its kernels to the device.

Every kernel's arguments are then what they were: addresses too. So its inputs lie in one block that stays, and all that it makes comes from
a memory pool of its own, which nobody else takes from. The pool lives as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from miniort.providers import DeviceArray
from miniort.types import Array
from miniort_cuda.bfloat16 import BFloat16Array
from miniort_cuda.packing import pack, unpack


class RecordedGraph:
    """A recording; see `miniort.providers.Recording`. `pool` is where its memory comes from."""

    def __init__(self, current_device: Callable[[], AbstractContextManager[Any]], pool: Any, block: Any) -> None:
        self.pool = pool
        self._current_device = current_device
        self._block = block
        self._graph: Any = None
        self._outputs: tuple[DeviceArray, ...] = ()

    def capture(self, stream: Any, run: Callable[[], Sequence[DeviceArray]]) -> None:
        """Note down what `run` does on a stream, which must be current; nothing of it is done."""
        stream.begin_capture()
        try:
            self._outputs = tuple(run())
        except BaseException:
            with suppress(Exception):  # the capture may be invalid by now, and the run's own error says more
                stream.end_capture()
            raise
        self._graph = stream.end_capture()

    def replay(self, *arrays: Array) -> tuple[DeviceArray, ...]:
        """One upload, one launch of the graph, and a copy of each output, for the next replay writes over them."""
        with self._current_device():
            self._block.set(pack(arrays))
            self._graph.launch()
            return tuple(_copied(each) for each in self._outputs)


def record_graph(
    xp: Any, current_device: Callable[[], AbstractContextManager[Any]], run: Callable[..., Sequence[DeviceArray]], arrays: Sequence[Array]
) -> tuple[RecordedGraph, tuple[DeviceArray, ...]]:
    """Rehearse a run, then record it. The rehearsal compiles kernels and fills the pool, which mustn't happen during a capture."""
    with current_device():
        stream, pool = xp.cuda.Stream(non_blocking=True), xp.cuda.MemoryPool()
        with stream, xp.cuda.using_allocator(pool.malloc):
            block = xp.array(pack(arrays))
            parts = unpack(block, arrays)
            rehearsed = tuple(run(*parts))
            stream.synchronize()
            recorded = RecordedGraph(current_device, pool, block)
            recorded.capture(stream, lambda: run(*parts))
    return recorded, rehearsed


def _copied(x: DeviceArray) -> DeviceArray:
    return BFloat16Array(x.bits.copy()) if isinstance(x, BFloat16Array) else x.copy()
