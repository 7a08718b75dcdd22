"""The provider `numba`: NumPy arrays on the host, memory from miniort's pool, kernels that Numba compiles."""

from __future__ import annotations

from miniort.host_provider import HostProvider
from miniort.kernels import merge_tables
from miniort.providers import ProviderOptions
from miniort_numba import fused_kernels, kernels
from miniort_numba.team import Crew, hire

KERNELS = merge_tables("numba", kernels.KERNELS, fused_kernels.KERNELS)


class NumbaProvider(HostProvider):
    """Kernels over NumPy arrays; nothing is copied between it and the CPU provider. ProviderError if an option is given: there is none.

    `crew`: the threads that share the work of one kernel, as many as the options ask for, else the cores that the process may use. They're
    the process's, and sleep when the provider is closed.
    """

    def __init__(self, options: ProviderOptions) -> None:
        options.reject_unknown("numba")
        super().__init__(KERNELS)
        self.crew: Crew = hire(options.thread_count())
