"""The provider `accelerate`: NumPy arrays on the host, memory from miniort's pool, kernels that call Apple's library."""

from __future__ import annotations

from miniort.errors import ProviderError
from miniort.host_provider import HostProvider
from miniort.kernels import KernelTable
from miniort.providers import ProviderOptions
from miniort_accelerate.kernels import KERNELS
from miniort_accelerate.library import Accelerate, load_accelerate

OPTIONS = ("index_width",)


class AccelerateProvider(HostProvider):
    """Kernels over NumPy arrays; nothing is copied between it and the CPU provider."""

    def __init__(self, library: Accelerate) -> None:
        lacking = {op for op, function in (("Erf", library.verff), ("Pow", library.vpowf)) if function is None}
        super().__init__(KernelTable("accelerate", (kernel for kernel in KERNELS if kernel.op not in lacking)))
        self.library = library


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
