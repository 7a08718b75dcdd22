"""The CPU provider: NumPy kernels, and a pool of host memory for what they make."""

from __future__ import annotations

from miniort.pool import BufferPool
from miniort.providers import HOST, MemoryStats, ProviderOptions
from miniort.types import Array
from miniort_cpu.kernels import all_kernels


class CPUProvider:
    """Arrays are NumPy arrays; large ones live in a pool. ProviderError if an option is given: there is none.

    The number of threads is the BLAS library's own affair (`OPENBLAS_NUM_THREADS` and its like): NumPy can't change it.
    """

    device = HOST

    def __init__(self, options: ProviderOptions) -> None:
        options.reject_unknown("cpu")
        self.kernels = all_kernels()
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
        """Give the pool's free memory back."""
        self._pool.clear()
