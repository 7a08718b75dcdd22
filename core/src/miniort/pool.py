"""A best-fit pool of host memory for the arrays of one provider.

A block goes back when the last reference to its array, or to any view of that, is dropped. So nobody has to tell the pool that a
value died: the runtime drops it, and whoever still has a view of it keeps it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import numpy as np

from miniort.providers import MemoryStats
from miniort.types import Array, DType

SMALLEST = 64 * 1024
"""Arrays below this many bytes come from NumPy, whose own cache of small blocks is faster than any of ours."""

WASTE = 2
"""A free block serves only what is at least 1/WASTE of its size."""


_HUGE_PAGE = 2 << 20
"""Bytes of a huge page; where it's another size, nothing breaks."""


def _new_block(size: int) -> mmap.mmap:
    """Fresh memory of the system. Where it can be, in huge pages: to touch 12 MB page by page takes 4 ms, in huge ones a tenth of it."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory, the default, has no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2 * _HUGE_PAGE:
        with suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


class _Lease(weakref.ref[Array]):
    """A block that is lent to an array: NumPy's views keep the array that they come from, so it dies when all of them are gone."""

    __slots__ = ("block",)

    block: mmap.mmap


class BufferPool:
    """Blocks of host memory, lent to arrays and taken back when those die. Safe to use from several threads.

    `keep` bounds the bytes that lie free; past it the smallest free blocks go back to the system. They also make way for a larger one that
    has to be made, so that a process whose inputs grow doesn't hold blocks of each size that they had.
    """

    def __init__(self, keep: int = 1 << 30) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._returned: deque[mmap.mmap] = deque()  # filled without the lock: an array may die while the lock is held
        self._free: list[tuple[int, int, mmap.mmap]] = []  # (bytes, tie-break, block), sorted
        self._free_bytes = 0
        self._reserved = 0
        self._peak = 0

    def allocate(self, shape: Sequence[int], dtype: DType) -> Array:
        """A C-contiguous array with undefined contents."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALLEST or dtype.hasobject:
            return np.empty(shape, dtype)
        block = self._take(nbytes)
        array = np.ndarray(shape, dtype, block)  # its base is the block, which is no array, so that views of it keep it
        lease = _Lease(array, self._give_back)
        lease.block = block
        self._leases[id(lease)] = lease
        return array

    def _give_back(self, lease: weakref.ref[Array]) -> None:
        self._returned.append(self._leases.pop(id(lease)).block)

    def _take(self, nbytes: int) -> mmap.mmap:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._collect_returned()
            index = bisect_left(self._free, (size,))
            if index < len(self._free) and self._free[index][0] <= size * WASTE:
                found, _, block = self._free.pop(index)
                self._free_bytes -= found
            else:
                self._make_way(size)
                block = _new_block(size)
                self._reserved += size
            self._peak = max(self._peak, self._reserved - self._free_bytes)
            return block

    def _collect_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            insort(self._free, (len(block), id(block), block))
            self._free_bytes += len(block)
        while self._free_bytes > self._keep:
            self._drop_smallest()

    def _make_way(self, size: int) -> None:
        """Give the free blocks that are smaller back.

        Where one of them is needed again, none that's larger makes way for it, so runs that repeat come to need nothing new.
        """
        while self._free and self._free[0][0] < size:
            self._drop_smallest()

    def _drop_smallest(self) -> None:
        nbytes, _, _block = self._free.pop(0)
        self._free_bytes -= nbytes
        self._reserved -= nbytes

    def memory(self) -> MemoryStats:
        """Bytes lent to arrays, held from the system, and the most ever lent at once."""
        with self._lock:
            self._collect_returned()
            return MemoryStats(active=self._reserved - self._free_bytes, reserved=self._reserved, peak=self._peak)

    def clear(self) -> None:
        """Give the free blocks back to the system; lent ones follow when their arrays die and the pool with them."""
        with self._lock:
            self._collect_returned()
            self._reserved -= self._free_bytes
            self._free_bytes = 0
            self._free.clear()
