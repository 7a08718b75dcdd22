"""What every provider needs whose arrays are NumPy arrays."""

from __future__ import annotations

from miniort.kernels import KernelTable
from miniort.pool import BufferPool
from miniort.providers import HOST, MemoryStats
from miniort.types import Array


class HostProvider:
    """Memory from a pool, and nothing to copy or to wait for: a base for providers, which give it their kernels.

    Providers of the host hand each other arrays as they are, so a session may mix them freely.
    """

    device = HOST

    def __init__(self, kernels: KernelTable) -> None:
        self.kernels = kernels
        self._pool = BufferPool()
        self.allocate = self._pool.allocate  # the method itself: one call less for every result

    def upload(self, array: Array) -> Array:
        """The array itself."""
        return array

    def download(self, array: Array) -> Array:
        """The array itself."""
        return array

    def synchronize(self) -> None:
        """Nothing to wait for: a kernel has finished when it returns."""

    def memory(self) -> MemoryStats:
        """Bytes of the pool; arrays too small for it aren't counted."""
        return self._pool.memory()

    def close(self) -> None:
        """Give the pool's free memory back to the system."""
        self._pool.clear()
