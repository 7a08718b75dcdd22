"""The provider `accelerate`: NumPy arrays on the host, memory from miniort's pool, kernels that call Apple's library."""

from __future__ import annotations

from collections.abc import Sequence

from miniort.errors import ProviderError
from miniort.kernels import KernelTable
from miniort.pool import BufferPool
from miniort.providers import HOST, MemoryStats, ProviderOptions
from miniort.types import Array, DType
from miniort_accelerate.kernels import KERNELS
from miniort_accelerate.library import Accelerate, load_accelerate


class AccelerateProvider:
    """Kernels over NumPy arrays; nothing is copied between it and the CPU provider."""

    def __init__(self, library: Accelerate) -> None:
        self.library = library
        self.device = HOST
        self.kernels: KernelTable = KERNELS
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
        """Nothing to wait for: every call returns when it's done."""

    def memory(self) -> MemoryStats:
        """Bytes of the pool."""
        return self._pool.memory()

    def close(self) -> None:
        """Give the pool's free blocks back to the system."""
        self._pool.clear()


def open_provider(options: ProviderOptions) -> AccelerateProvider:
    """The provider on Apple's library. It has no options."""
    options.reject_unknown("accelerate")
    try:
        return AccelerateProvider(load_accelerate())
    except OSError as error:
        raise ProviderError(f"provider 'accelerate': the framework can't be loaded: {error}") from error
