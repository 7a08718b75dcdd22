"""The provider `numba`: NumPy arrays on the host, memory from miniort's pool, kernels that Numba compiles."""

from __future__ import annotations

from miniort.host_provider import HostProvider
from miniort.kernels import merge_tables
from miniort.providers import ProviderOptions
from miniort_numba import (
    activation_kernels,
    convolution_kernels,
    finished_kernels,
    fused_kernels,
    integer_kernels,
    kernels,
    normalization_kernels,
    pooling_kernels,
    recurrent_kernels,
)
from miniort_numba.team import Crew, hire

KERNELS = merge_tables(
    "numba",
    kernels.KERNELS,
    fused_kernels.KERNELS,
    finished_kernels.KERNELS,
    convolution_kernels.KERNELS,
    pooling_kernels.KERNELS,
    normalization_kernels.KERNELS,
    activation_kernels.KERNELS,
    integer_kernels.KERNELS,
    recurrent_kernels.KERNELS,
)


class NumbaProvider(HostProvider):
    """Kernels over NumPy arrays; nothing is copied between it and the CPU provider. ProviderError if an option is given: there is none.

    `crew`: the threads that share the work of one kernel, as many as the options ask for, else the cores that the process may use. They're
    the process's, and sleep when the provider is closed.
    """

    def __init__(self, options: ProviderOptions) -> None:
        options.reject_unknown("numba")
        super().__init__(KERNELS)
        self.crew: Crew = hire(options.thread_count())
