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

OPTIONS = ("index_width",)


class AccelerateProvider:
    """Kernels over NumPy arrays; nothing is copied between it and the CPU provider."""

    def __init__(self, library: Accelerate) -> None:
        self.library = library
        self.device = HOST
        lacking = {op for op, function in (("Erf", library.verff), ("Pow", library.vpowf)) if function is None}
        self.kernels: KernelTable = KernelTable("accelerate", (kernel for kernel in KERNELS if kernel.op not in lacking))
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
    """The provider on Apple's library. `index_width` 64 binds BLAS with 64-bit indices; 32 is the default."""
    options.reject_unknown("accelerate", OPTIONS)
    width = str(options.options.get("index_width", 32))
    if width not in ("32", "64"):
        raise ProviderError(f"provider 'accelerate': index_width must be 32 or 64, found {width!r}")
    try:
        return AccelerateProvider(load_accelerate(wide_indices=width == "64"))
    except OSError as error:
        raise ProviderError(f"provider 'accelerate': the framework can't be loaded: {error}") from error
