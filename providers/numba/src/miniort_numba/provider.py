"""The provider `numba`: NumPy arrays on the host, memory from miniort's pool, kernels that Numba compiles."""

from __future__ import annotations

from collections.abc import Sequence

from miniort.errors import ProviderError
from miniort.kernels import merge_tables
from miniort.pool import BufferPool
from miniort.providers import HOST, MemoryStats, ProviderOptions, default_threads
from miniort.types import Array, DType
from miniort_numba import fused_kernels, kernels
from miniort_numba.team import Crew, hire

KERNELS = merge_tables("numba", kernels.KERNELS, fused_kernels.KERNELS)


class NumbaProvider:
    """Kernels over NumPy arrays; nothing is copied between it and the CPU provider. ProviderError if an option is given: there is none.

    `crew`: the threads that share the work of one kernel, as many as the options ask for, else the cores that the process may use.
    """

    device = HOST

    def __init__(self, options: ProviderOptions) -> None:
        options.reject_unknown("numba")
        if options.threads is not None and options.threads < 0:
            raise ProviderError(f"the number of threads (intra_op_num_threads) must not be negative, found {options.threads}")
        self.kernels = KERNELS
        self.crew: Crew = hire(options.threads or default_threads())
        self._pool = BufferPool()

    def allocate(self, shape: Sequence[int], dtype: DType) -> Array:
        """A new C-contiguous array with undefined contents."""
        return self._pool.allocate(shape, dtype)

    def upload(self, array: Array) -> Array:
        """The array itself."""
        return array

    def download(self, array: Array) -> Array:
        """The array itself."""
        return array

    def synchronize(self) -> None:
        """Nothing to wait for: a kernel has finished when it returns."""

    def memory(self) -> MemoryStats:
        """Bytes of the pool."""
        return self._pool.memory()

    def close(self) -> None:
        """Give the pool's free blocks back to the system. The threads are the process's, and sleep."""
        self._pool.clear()
