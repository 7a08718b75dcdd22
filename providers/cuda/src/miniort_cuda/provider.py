"""The provider `cuda`: CuPy's arrays on one device, CuPy's memory pool, and our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miniort.errors import ProviderError
from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.providers import DeviceArray, MemoryStats, ProviderOptions
from miniort.types import Array, DType, type_string
from miniort_cuda import element_types
from miniort_cuda.availability import OLDEST_CAPABILITY
from miniort_cuda.kernels import KERNELS

OPTIONS = ("device_id",)


class CUDAProvider:
    """One CUDA device. `xp` is the module `cupy` and `special` is `cupyx.scipy.special`, or what a test puts in their place.

    CuPy works on the device that is current in the calling thread. So everything here, each kernel too, runs inside
    `with xp.cuda.Device(...)`; a new one each time, because older CuPys keep the device to go back to in that object.
    """

    def __init__(self, xp: Any, special: Any, device_id: int = 0) -> None:
        """ProviderError if there is no such device, or it's too old."""
        count = xp.cuda.runtime.getDeviceCount()
        if not 0 <= device_id < count:
            raise ProviderError(f"provider 'cuda': device_id {device_id} is not one of the {count} devices; they count from 0")
        capability = str(xp.cuda.Device(device_id).compute_capability)  # "86" is 8.6, "120" is 12.0
        if (int(capability[:-1]), int(capability[-1])) < OLDEST_CAPABILITY:
            raise ProviderError(
                f"provider 'cuda': device {device_id} has compute capability {capability[:-1]}.{capability[-1]}, "
                f"and {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} is needed; choose another with device_id"
            )
        self.xp = xp
        self.special = special
        self.device = f"cuda:{device_id}"
        self._device_id = device_id
        self.kernels = KernelTable("cuda", (replace(kernel, compile=self._on_device(kernel.compile)) for kernel in KERNELS))

    def _current_device(self) -> Any:
        return self.xp.cuda.Device(self._device_id)

    def _on_device(self, compile_kernel: CompileKernel) -> CompileKernel:
        def compile_on_device(node: NodeContext) -> Run:
            with self._current_device():
                run = compile_kernel(node)

            def run_on_device(*inputs: Any) -> Any:
                with self._current_device():
                    return run(*inputs)

            return run_on_device

        return compile_on_device

    def allocate(self, shape: Sequence[int], dtype: DType) -> DeviceArray:
        """A new array with undefined contents from CuPy's pool."""
        self._expect_known(dtype)
        with self._current_device():
            return self.xp.empty(tuple(shape), dtype)

    def upload(self, array: Array) -> DeviceArray:
        """A copy of a host array on the device. ProviderError for an element type that CuPy has no arrays of."""
        self._expect_known(array.dtype)
        with self._current_device():
            return self.xp.array(array)

    def download(self, array: DeviceArray) -> Array:
        """A copy of a device array as a NumPy array; waits for the work that makes it."""
        with self._current_device():
            host: Array = self.xp.asnumpy(array)
        return host

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        self._current_device().synchronize()

    def memory(self) -> MemoryStats:
        """Bytes of CuPy's pool for this device, which other users of CuPy in this process share.

        The pool doesn't count a peak. It gives nothing back by itself, so what it holds is the least upper bound that it can tell.
        """
        with self._current_device():
            pool = self.xp.get_default_memory_pool()
            reserved = pool.total_bytes()
            return MemoryStats(active=pool.used_bytes(), reserved=reserved, peak=reserved)

    def close(self) -> None:
        """Wait for the device, then give the pool's free blocks back to it."""
        self.synchronize()
        with self._current_device():
            self.xp.get_default_memory_pool().free_all_blocks()

    def _expect_known(self, dtype: DType) -> None:
        if dtype not in element_types.ALL:
            raise ProviderError(f"provider 'cuda' has no arrays of {type_string(dtype)} yet; leave such nodes to the provider 'cpu'")


def open_provider(options: ProviderOptions) -> CUDAProvider:
    """The provider on the device that the option `device_id` names (0 if it isn't given). Imports CuPy."""
    options.reject_unknown("cuda", OPTIONS)
    text = str(options.options.get("device_id", 0))
    if not text.isdecimal():
        raise ProviderError(f"provider 'cuda': device_id must be a number such as 0, found {text!r}")
    try:
        import cupy
        from cupyx.scipy import special
    except ImportError as error:
        raise ProviderError(f"provider 'cuda': CuPy can't be imported: {error}") from error
    return CUDAProvider(cupy, special, int(text))
