"""The provider `cuda`: CuPy's arrays on one device, CuPy's memory pool, and our kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from miniort.errors import ProviderError
from miniort.graph.elementwise_body import FUSED_ELEMENTWISE
from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.providers import DeviceArray, DeviceProcessor, DeviceSampler, MemoryStats, ProviderOptions
from miniort.types import Array, DType, type_string
from miniort_cuda import element_types
from miniort_cuda.availability import OLDEST_CAPABILITY
from miniort_cuda.bfloat16 import BFloat16Array, widened
from miniort_cuda.bfloat16_kernels import for_bfloat16
from miniort_cuda.caches import DEVICE_LAYOUTS
from miniort_cuda.fused import FusedKernels
from miniort_cuda.kernels import KERNELS
from miniort_cuda.packing import pack, unpack
from miniort_cuda.recorded_graph import RecordedGraph, record_graph
from miniort_cuda.tf32 import TF32Products
from miniort_cuda.token_choice import PROCESSORS, SAMPLERS

OPTIONS = ("device_id", "use_tf32", "enable_cuda_graph")

TF32_CAPABILITY = (8, 0)
"""The first compute capability whose products can be computed in TF32."""

SMALL = 1 << 16
"""Bytes up to which arrays are packed to be uploaded together: tokens, masks and positions, but no pictures."""


class CUDAProvider:
    """One CUDA device. `xp` is the module `cupy` and `special` is `cupyx.scipy.special`, or what a test puts in their place.

    CuPy works on the device that is current in the calling thread. So everything here, each kernel too, runs inside
    `with xp.cuda.Device(...)`; a new one each time, because older CuPys keep the device to go back to in that object.
    """

    def __init__(self, xp: Any, special: Any, device_id: int = 0, use_tf32: bool = False, enable_cuda_graph: bool = False) -> None:
        """ProviderError if there is no such device, or it's too old, for TF32 if that is wanted."""
        count = xp.cuda.runtime.getDeviceCount()
        if not 0 <= device_id < count:
            raise ProviderError(f"provider 'cuda': device_id {device_id} is not one of the {count} devices; they count from 0")
        capability = str(xp.cuda.Device(device_id).compute_capability)  # "86" is 8.6, "120" is 12.0
        version = (int(capability[:-1]), int(capability[-1]))
        if version < OLDEST_CAPABILITY:
            raise ProviderError(
                f"provider 'cuda': device {device_id} has compute capability {capability[:-1]}.{capability[-1]}, "
                f"and {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} is needed; choose another with device_id"
            )
        if use_tf32 and version < TF32_CAPABILITY:
            raise ProviderError(
                f"provider 'cuda': device {device_id} has compute capability {capability[:-1]}.{capability[-1]}, and use_tf32 needs "
                f"{TF32_CAPABILITY[0]}.{TF32_CAPABILITY[1]}; leave it out"
            )
        self._use_tf32 = use_tf32
        self.records_runs = enable_cuda_graph
        self._thread = threading.local()
        self._graphs: WeakSet[RecordedGraph] = WeakSet()
        self.xp = xp
        self.special = special
        self.fused = FusedKernels(xp) if hasattr(xp, "RawModule") else None
        self.device = f"cuda:{device_id}"
        self._device_id = device_id
        offered = (kernel for kernel in KERNELS if self.fused is not None or kernel.op != FUSED_ELEMENTWISE)
        self.kernels = KernelTable(
            "cuda", (replace(kernel, compile=self._on_device(for_bfloat16(kernel, kernel.compile, xp))) for kernel in offered)
        )

    def current_device(self) -> Any:
        """The device as the calling thread's current one, for a `with`."""
        return self.xp.cuda.Device(self._device_id)

    def running(self) -> AbstractContextManager[object]:
        """With `use_tf32`, what lets CuPy compute products of float32 matrices in TF32 during a run; else nothing."""
        return TF32Products(self.xp) if self._use_tf32 else nullcontext()

    def _on_device(self, compile_kernel: CompileKernel) -> CompileKernel:
        def compile_on_device(node: NodeContext) -> Run:
            with self.current_device():
                run = compile_kernel(node)

            def run_on_device(*inputs: Any) -> Any:
                with self.current_device():
                    return run(*inputs)

            return run_on_device

        return compile_on_device

    def allocate(self, shape: Sequence[int], dtype: DType) -> DeviceArray:
        """A new array with undefined contents from CuPy's pool."""
        self._expect_known(dtype)
        with self.current_device():
            if dtype == element_types.BFLOAT16:
                return BFloat16Array(self.xp.empty(tuple(shape), np.uint16))
            return self.xp.empty(tuple(shape), dtype)

    def upload(self, array: Array) -> DeviceArray:
        """A copy of a host array on the device. ProviderError for an element type that CuPy has no arrays of."""
        self._expect_known(array.dtype)
        with self.current_device():
            if array.dtype == element_types.BFLOAT16:
                return BFloat16Array(self.xp.array(np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)))
            return self.xp.array(array)

    def upload_together(self, *arrays: Array) -> tuple[DeviceArray, ...]:
        """Copies of several host arrays on the device, the small ones in one transfer: they're parts of one block there."""
        small = [index for index, array in enumerate(arrays) if array is not None and 0 < array.nbytes <= SMALL and array.ndim]
        if len(small) < 2:
            return tuple(None if array is None else self.upload(array) for array in arrays)
        for array in arrays:
            if array is not None:
                self._expect_known(array.dtype)
        together = [arrays[index] for index in small]
        with self.current_device():
            parts = dict(zip(small, unpack(self.xp.array(pack(together)), together), strict=True))
        return tuple(parts[index] if index in parts else None if each is None else self.upload(each) for index, each in enumerate(arrays))

    @property
    def is_recording(self) -> bool:
        """Whether the calling thread is recording a run, or rehearsing one that it's about to record."""
        return getattr(self._thread, "recording", False)

    def record(self, run: Callable[..., Sequence[DeviceArray]], *arrays: Array) -> tuple[RecordedGraph, tuple[DeviceArray, ...]]:
        """Record what `run` does with copies of host arrays as a CUDA graph; see `RecordsRuns`."""
        for array in arrays:
            self._expect_known(array.dtype)
        self.synchronize()  # the stream of the recording doesn't wait for what the run reads
        self._thread.recording = True
        try:
            recorded, rehearsed = record_graph(self.xp, self.current_device, run, arrays)
        finally:
            self._thread.recording = False
        self._graphs.add(recorded)
        return recorded, rehearsed

    def cache_layout(self, name: str) -> Callable[..., Any] | None:
        """What makes a cache of this layout on the device, `create(spec, **options)`; None if there is no device version."""
        create = DEVICE_LAYOUTS.get(name)
        return None if create is None else partial(create, self)

    def last_logits(self, logits: DeviceArray) -> DeviceArray:
        """Logits of the last position, [batch, vocabulary] float32: of [batch, n, vocabulary] or [batch, vocabulary]."""
        with self.current_device():
            rows = widened(logits) if isinstance(logits, BFloat16Array) else logits
            rows = rows[:, -1] if rows.ndim == 3 else rows
            return rows if rows.dtype == np.float32 else rows.astype(np.float32)

    def token_sampler(self, name: str) -> Callable[..., DeviceSampler] | None:
        """What makes the sampler of this name for the device; None if there is no device version."""
        return self._made_on_device(SAMPLERS.get(name))

    def logits_processor(self, name: str) -> Callable[..., DeviceProcessor] | None:
        """What makes the logits processor of this name for the device; None if there is no device version."""
        return self._made_on_device(PROCESSORS.get(name))

    def _made_on_device(self, create: Callable[..., Callable[..., Any]] | None) -> Callable[..., Callable[..., Any]] | None:
        """A factory whose functions run while this device is current."""
        if create is None:
            return None

        def make(**options: Any) -> Callable[..., Any]:
            run = create(self.xp, **options)

            def run_on_device(*arguments: Any) -> Any:
                with self.current_device():
                    return run(*arguments)

            return run_on_device

        return make

    def download(self, array: DeviceArray) -> Array:
        """A copy of a device array as a NumPy array; waits for the work that makes it."""
        with self.current_device():
            if isinstance(array, BFloat16Array):
                return self.xp.asnumpy(array.bits).view(element_types.BFLOAT16)  # type: ignore[no-any-return]
            host: Array = self.xp.asnumpy(array)
        return host

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        self.current_device().synchronize()

    def memory(self) -> MemoryStats:
        """Bytes of CuPy's pool for this device, which other users of CuPy in this process share, and of the pools of recorded runs.

        The pool doesn't count a peak. It gives nothing back by itself, so what it holds is the least upper bound that it can tell.
        """
        with self.current_device():
            pools = [self.xp.get_default_memory_pool(), *(graph.pool for graph in self._graphs)]
            reserved = sum(pool.total_bytes() for pool in pools)
            return MemoryStats(active=sum(pool.used_bytes() for pool in pools), reserved=reserved, peak=reserved)

    def close(self) -> None:
        """Wait for the device, then give the pool's free blocks back to it."""
        self.synchronize()
        with self.current_device():
            self.xp.get_default_memory_pool().free_all_blocks()

    def _expect_known(self, dtype: DType) -> None:
        if dtype not in element_types.ALL:
            raise ProviderError(f"provider 'cuda' has no arrays of {type_string(dtype)} yet; leave such nodes to the provider 'cpu'")


def open_provider(options: ProviderOptions) -> CUDAProvider:
    """The provider on the device that the option `device_id` names, 0 if it isn't given; other options are switches. Imports CuPy."""
    options.reject_unknown("cuda", OPTIONS)
    text = str(options.options.get("device_id", 0))
    if not text.isdecimal():
        raise ProviderError(f"provider 'cuda': device_id must be a number such as 0, found {text!r}")
    switches = {name: options.switch("cuda", name, False) for name in ("use_tf32", "enable_cuda_graph")}
    try:
        import cupy
        from cupyx.scipy import special
    except ImportError as error:
        raise ProviderError(f"provider 'cuda': CuPy can't be imported: {error}") from error
    return CUDAProvider(cupy, special, int(text), **switches)
