"""The CPU provider: NumPy kernels, and a pool of host memory for what they make."""

from __future__ import annotations

from contextlib import AbstractContextManager

from miniort.errors import ProviderError
from miniort.pool import BufferPool
from miniort.providers import HOST, MemoryStats, ProviderOptions, default_threads
from miniort.types import Array
from miniort_cpu.kernels import all_kernels
from miniort_cpu.threads import Running, Threads


class CPUProvider:
    """Arrays are NumPy arrays; large ones live in a pool. ProviderError if an option is given: there is none.

    `threads` share the work of large kernels. As many as the options ask for, else the cores that the process may use, or what
    OPENBLAS_NUM_THREADS and its like bound them to. While a session runs, BLAS has no more.
    """

    device = HOST

    def __init__(self, options: ProviderOptions) -> None:
        options.reject_unknown("cpu")
        if options.threads is not None and options.threads < 0:
            raise ProviderError(f"the number of threads (intra_op_num_threads) must not be negative, found {options.threads}")
        self.threads = Threads(options.threads or default_threads())
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

    def running(self) -> AbstractContextManager[None]:
        """Gives BLAS the number of threads that suits the run; see `miniort_cpu.threads`."""
        return Running(self.threads)

    def close(self) -> None:
        """Give the pool's free memory back, and end the threads."""
        self._pool.clear()
        self.threads.close()
