"""The CPU provider: NumPy kernels, and a pool of host memory for what they make."""

from __future__ import annotations

from contextlib import AbstractContextManager

from miniort.host_provider import HostProvider
from miniort.providers import ProviderOptions
from miniort_cpu.kernels import all_kernels
from miniort_cpu.threads import Running, Threads


class CPUProvider(HostProvider):
    """Arrays are NumPy arrays; large ones live in a pool. ProviderError if an option is given: there is none.

    `threads` share the work of large kernels. As many as the options ask for, else the cores that the process may use, or what
    OPENBLAS_NUM_THREADS and its like bound them to. While a session runs, BLAS has no more.
    """

    def __init__(self, options: ProviderOptions) -> None:
        options.reject_unknown("cpu")
        super().__init__(all_kernels())
        self.threads = Threads(options.thread_count())

    def running(self) -> AbstractContextManager[None]:
        """Gives BLAS the number of threads that suits the run; see `miniort_cpu.threads`."""
        return Running(self.threads)

    def close(self) -> None:
        """Give the pool's free memory back, and end the threads."""
        super().close()
        self.threads.close()
