"""A test double of the modules `cupy` and `cupyx.scipy.special`, for machines without a GPU.

It computes with NumPy, but keeps what makes CuPy's arrays different from NumPy's: they refuse to become host arrays by themselves,
functions refuse host arrays, results are arrays even where they have no axes, each array lives on one device and may be touched only
while that device is the thread's current one, and memory comes from a pool per device. Uploads, downloads and launches are counted.
It is stricter than CuPy in one way: what would wait for the device unasked (`bool`, `int`, iteration) raises.
"""

from __future__ import annotations

import importlib.util
import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

POOL_BLOCK = 512  # bytes; CuPy's pool rounds up to these

FUNCTIONS = frozenset(
    {"abs", "add", "arange", "argmax", "argmin", "ascontiguousarray", "broadcast_to", "ceil", "clip", "concatenate", "cos", "cumsum"}
    | {"divide", "empty_like", "equal", "exp", "expand_dims", "expm1", "floor", "floor_divide", "fmod", "full", "greater", "greater_equal"}
    | {"isinf", "isnan", "less", "less_equal", "log", "log1p", "logical_and", "logical_not", "logical_or", "logical_xor", "matmul"}
    | {"maximum", "minimum", "multiply", "negative", "not_equal", "ones", "ones_like", "power", "reciprocal", "remainder", "repeat"}
    | {"rint", "sign", "sin", "sort", "sqrt", "subtract", "take", "take_along_axis", "tanh", "where", "zeros", "zeros_like"}
)
"""What kernels may call: functions that NumPy and CuPy both have (each was looked up in CuPy 14)."""

IN_PLACE = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__"})

MOST_COPIED_BY_SLICES = 8

METHODS = frozenset(
    {"astype", "copy", "max", "mean", "min", "prod", "repeat", "reshape", "squeeze", "sum", "swapaxes", "transpose", "view"}
)

OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "radd", "rsub", "rmul", "rtruediv", "iadd", "isub", "imul", "itruediv"),
    *("neg", "lt", "le", "gt", "ge", "eq", "ne", "and", "lshift", "rshift"),
)


def refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("implicit conversion of a device array to a host value is not allowed")


def _load_capture() -> ModuleType:
    """The module beside this file, which can't be imported by name."""
    spec = importlib.util.spec_from_file_location("miniort_test_fake_capture", Path(__file__).with_name("fake_capture.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


capture = _load_capture()


class FakeArray:
    """An array on a fake device. Only what CuPy's arrays have and our kernels use is there."""

    __slots__ = ("__weakref__", "_cupy", "_data", "_memory", "device_id")

    __array__ = __array_function__ = __bool__ = __int__ = __float__ = __index__ = __iter__ = __len__ = refuse
    __array_ufunc__ = None

    def __init__(self, cupy: FakeCupy, data: np.ndarray, memory: Memory, device_id: int) -> None:
        self._cupy, self._data, self._memory, self.device_id = cupy, data, memory, device_id

    shape = property(lambda self: self._data.shape)
    dtype = property(lambda self: self._data.dtype)
    ndim = property(lambda self: self._data.ndim)
    size = property(lambda self: self._data.size)
    nbytes = property(lambda self: self._data.nbytes)
    strides = property(lambda self: self._data.strides)
    flags = property(lambda self: self._data.flags)
    itemsize = property(lambda self: self._data.itemsize)
    T = property(lambda self: self.transpose())

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(f"the fake CuPy array has no {name!r}")
        method = getattr(np.ndarray, name)
        return lambda *arguments, **options: self._cupy.launch(method, self, *arguments, **options)

    def __getitem__(self, index: Any) -> FakeArray:
        return self._cupy.launch(np.ndarray.__getitem__, self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._cupy.write(self, index, value)

    def set(self, host: np.ndarray) -> None:
        """Upload into this array's memory."""
        self._cupy.upload_into(self, host)

    __hash__ = object.__hash__


def _operator(name: str) -> Any:
    method = getattr(np.ndarray, f"__{name}__")
    return lambda self, *operands: self._cupy.launch(method, self, *operands)


for _name in OPERATORS:
    setattr(FakeArray, f"__{_name}__", _operator(_name))


class Pool:
    """Bytes of one device."""

    def __init__(self) -> None:
        self.used = self.total = 0

    def used_bytes(self) -> int:
        return self.used

    def total_bytes(self) -> int:
        return self.total

    def free_all_blocks(self) -> None:
        self.total = self.used

    def malloc(self, nbytes: int) -> Memory:
        return Memory(self, nbytes)

    def take(self, nbytes: int) -> None:
        self.used += nbytes
        self.total = max(self.total, self.used)

    def give_back(self, nbytes: int) -> None:
        self.used -= nbytes


class Memory:
    """One block of a pool; views of an array share its block."""

    def __init__(self, pool: Pool, nbytes: int) -> None:
        rounded = -(-nbytes // POOL_BLOCK) * POOL_BLOCK
        pool.take(rounded)
        reference = weakref.ref(pool)  # its memory doesn't keep a pool
        weakref.finalize(self, lambda: (pool := reference()) is None or pool.give_back(rounded))


class FakeCupy:
    """The module `cupy`; `special` is `cupyx.scipy.special` for the same arrays."""

    def __init__(self, devices: int = 1, capability: str = "86") -> None:
        self.counts: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._pools = [Pool() for _ in range(devices)]
        self._thread = threading.local()
        self.synchronized: list[int] = []
        cupy = self

        class Device:
            compute_capability = capability

            def __init__(self, device_id: int) -> None:
                self.id = device_id

            def __enter__(self) -> Device:
                self._before = cupy.current_device
                cupy._thread.device = self.id
                return self

            def __exit__(self, *_: object) -> None:
                cupy._thread.device = self._before

            def synchronize(self) -> None:
                cupy.refuse_while_capturing("a device was waited for")
                cupy.synchronized.append(self.id)

        @contextmanager
        def using_allocator(malloc: Any) -> Iterator[None]:
            before = getattr(cupy._thread, "malloc", None)
            cupy._thread.malloc = malloc
            try:
                yield
            finally:
                cupy._thread.malloc = before

        as_strided = np.lib.stride_tricks.as_strided
        self.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=lambda *arguments: self.launch(as_strided, *arguments)))
        self.cuda = SimpleNamespace(
            Device=Device,
            MemoryPool=Pool,
            Stream=lambda non_blocking=False: capture.Stream(self, non_blocking),
            using_allocator=using_allocator,
            runtime=SimpleNamespace(getDeviceCount=lambda: devices),
        )
        self.compute_types: list[str] = []  # as they were set for float32
        linalg = SimpleNamespace(COMPUTE_TYPE_TBD="own", COMPUTE_TYPE_TF32="tf32")
        linalg.set_compute_type = lambda dtype, kind: self.compute_types.append(kind)
        self._core = SimpleNamespace(_routines_linalg=linalg)
        error_function = np.vectorize(math.erf, otypes=[np.float64])
        self.special = SimpleNamespace(erf=lambda x: self.launch(error_function, x))

    def with_compiler(self, module: Any) -> None:
        """Have `RawModule`: without it, the provider has no kernels in CUDA C."""

        def open_argument(argument: Any) -> Any:
            return self._open(argument) if isinstance(argument, FakeArray) else argument

        def raw_module(code: str, options: tuple[str, ...]) -> Any:
            self.refuse_while_capturing("a kernel was compiled")
            compiled = module(code, open_argument)

            def get_function(name: str) -> Any:
                run = compiled.get_function(name)

                def launch(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
                    self._counted(name)
                    if self._capture is None:
                        run(grid, block, arguments)
                        return
                    opened = tuple(open_argument(each) for each in arguments)
                    self._capture.note(lambda: run(grid, block, opened), self._memories(arguments))

                return launch

            return SimpleNamespace(get_function=get_function)

        self.RawModule = raw_module

    @property
    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    @property
    def stream(self) -> Any:
        """The thread's current stream, None for the default one."""
        return getattr(self._thread, "stream", None)

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._thread.stream = stream

    @property
    def _capture(self) -> Any:
        return None if self.stream is None else self.stream.capture

    def refuse_while_capturing(self, what: str) -> None:
        if self._capture is not None:
            raise RuntimeError(f"the current stream is capturing, and {what}")

    def get_default_memory_pool(self) -> Pool:
        return self._pools[self.current_device]

    def array(self, host: np.ndarray) -> FakeArray:
        """Upload. CuPy has no arrays of Python objects."""
        if not isinstance(host, np.ndarray) or host.dtype.kind not in "biuf":
            raise ValueError(f"unsupported: {host!r}")
        self.refuse_while_capturing("H2D transfers are disallowed")
        self.counts["upload"] += 1
        return self._new(np.array(host))

    def asnumpy(self, array: FakeArray) -> np.ndarray:
        """Download."""
        self.refuse_while_capturing("D2H transfers are disallowed")
        host = np.array(self._open(array))
        self.counts["download"] += 1
        self.counts["downloaded bytes"] += host.nbytes
        return host

    def upload_into(self, array: FakeArray, host: np.ndarray) -> None:
        self.refuse_while_capturing("H2D transfers are disallowed")
        data = self._open(array)
        assert (data.shape, data.dtype) == (host.shape, host.dtype)
        assert data.flags.c_contiguous
        self.counts["upload"] += 1
        data[...] = host

    def argsort(self, array: FakeArray, axis: int = -1) -> FakeArray:
        """CuPy has one kind, which is stable."""
        return self.launch(np.argsort, array, axis=axis, kind="stable")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> FakeArray:
        data = np.empty(shape, dtype)
        data.view(np.uint8).fill(0xFF) if data.size and data.ndim else None  # undefined contents: NaN, and -1
        return self._new(data)

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(f"the fake cupy has no {name!r}")
        return lambda *arguments, **options: self.launch(getattr(np, name), *arguments, **options)

    def launch(self, function: Any, *arguments: Any, **options: Any) -> FakeArray:
        """Compute on the current device. A result that shares an argument's memory is a view, and no launch."""
        sources = [a for argument in arguments for a in (argument if isinstance(argument, tuple | list) else [argument])]
        arrays = [source for source in sources if isinstance(source, FakeArray)]
        if self._capture is not None:
            self._refuse_what_cannot_be_captured(function, arguments)
            if function.__name__ in IN_PLACE:
                return self._note_in_place(function, arguments)
        opened = [self._open(argument) for argument in arguments]
        with np.errstate(all="ignore"):  # a GPU doesn't warn
            result = np.asarray(function(*opened, **options))
        for array in arrays:
            if array._data is result:
                return array
            if np.shares_memory(array._data, result):
                return FakeArray(self, result, array._memory, array.device_id)
        self._counted(function.__name__)
        if self._capture is None:
            return self._new(result)
        empty = capture.undefined(result)
        made = self._new(empty)
        self._capture.note(lambda: np.copyto(empty, function(*opened, **options)), self._memories(arrays))
        return made

    def write(self, array: FakeArray, index: Any, value: Any) -> None:
        """Assignment to a part of an array, which launches one kernel."""
        data, place, new = self._open(array), self._open(index), self._open(value)
        self._counted("__setitem__")
        if self._capture is None:
            data[place] = new
            return
        memories = self._memories([array, value, *(index if isinstance(index, tuple) else [index])])
        self._capture.note(lambda: data.__setitem__(place, new), memories)

    def _note_in_place(self, function: Any, arguments: Any) -> FakeArray:
        assert self._capture is not None
        opened = [self._open(argument) for argument in arguments]
        self._counted(function.__name__)
        self._capture.note(lambda: function(*opened), self._memories(arguments))
        target: FakeArray = arguments[0]
        return target

    def _refuse_what_cannot_be_captured(self, function: Any, arguments: Any) -> None:
        if function is np.matmul:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        if function is np.concatenate and len(arguments[0]) > MOST_COPIED_BY_SLICES:
            self.refuse_while_capturing("H2D transfers are disallowed")  # CuPy uploads the addresses of many small arrays

    def _counted(self, name: str) -> None:
        self.counts["launch"] += self._capture is None
        self.launches[name] += 1

    def _memories(self, values: Any) -> list[Memory]:
        return [value._memory for value in values if isinstance(value, FakeArray)]

    def _new(self, data: np.ndarray) -> FakeArray:
        malloc = getattr(self._thread, "malloc", None)
        if malloc is None:
            self.refuse_while_capturing("memory of the common pool was taken, which others will take as well")
        memory = (malloc or self.get_default_memory_pool().malloc)(data.nbytes)
        if self._capture is not None:
            self._capture.took(memory, malloc.__self__)
        return FakeArray(self, data, memory, self.current_device)

    def _open(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._open(item) for item in value)
        if isinstance(value, np.ndarray):
            raise TypeError("unsupported type: a host array was given to a device function")
        if not isinstance(value, FakeArray):
            return value
        if value.device_id != self.current_device:
            raise RuntimeError(f"an array of device {value.device_id} was touched while device {self.current_device} is current")
        return value._data
