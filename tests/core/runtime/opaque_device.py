"""A device that isn't the host: arrays that NumPy can't look into, a provider for them, and counts of all copies.

Whatever converts such an array without being asked to, be it NumPy, a kernel of another provider or the runtime, gets an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.plugins import hookimpl
from miniort.providers import Availability, MemoryStats, ProviderInfo, ProviderOptions

HostArray = np.ndarray[Any, Any]
Make = Callable[[NodeContext], Callable[..., HostArray]]


class ImplicitConversion(BaseException):
    """Somebody touched the contents. No Exception, so that no `except Exception` on the way hides it."""


def _refuse(self: OpaqueArray, *_: Any, **__: Any) -> NoReturn:
    raise ImplicitConversion("an array of a device was touched on the host")


class OpaqueArray:
    """Has a shape and a dtype, and nothing else."""

    __slots__ = ("__weakref__", "_contents", "_device")

    def __init__(self, device: Device, contents: HostArray) -> None:
        self._device = device
        self._contents = contents

    @property
    def shape(self) -> tuple[int, ...]:
        return self._contents.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._contents.dtype

    __array__ = __array_ufunc__ = __array_function__ = _refuse
    __len__ = __iter__ = __bool__ = __getitem__ = __setitem__ = __contains__ = _refuse
    __int__ = __float__ = __index__ = __complex__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = __neg__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__
    __array_interface__ = __array_struct__ = __dlpack__ = property(_refuse)


class Device:
    """One device: what was copied to and from it, and which arrays its kernels were called with."""

    def __init__(self, name: str = "opaque", location: str = "opaque:0", priority: int = 900, only: Sequence[str] | None = None) -> None:
        self.name = name
        self.location = location
        self.priority = priority
        self.only = only
        self.uploads: list[tuple[int, ...]] = []
        self.downloads: list[tuple[int, ...]] = []
        self.calls: list[str] = []
        self.closed = 0
        self.available = Availability(True, "made up")

    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        return [ProviderInfo(self.name, self.priority, lambda: self.available, self._open)]

    def _open(self, options: ProviderOptions) -> OpaqueProvider:
        options.reject_unknown(self.name, ["colour"])
        return OpaqueProvider(self)

    def wrap(self, contents: HostArray) -> OpaqueArray:
        return OpaqueArray(self, np.asarray(contents))

    def unwrap(self, array: Any) -> HostArray:
        assert type(array) is OpaqueArray, f"a kernel of {self.name} was handed {type(array).__name__}"
        assert array._device is self, f"a kernel of {self.name} was handed an array of {array._device.name}"
        return array._contents

    def reset(self) -> None:
        for log in (self.uploads, self.downloads, self.calls):
            log.clear()


class OpaqueProvider:
    """The provider of a device."""

    def __init__(self, device: Device) -> None:
        self.device = device.location
        self.kernels = kernels_of(device)
        self._device = device

    def allocate(self, shape: Sequence[int], dtype: np.dtype[Any]) -> OpaqueArray:
        return self._device.wrap(np.empty(shape, dtype))

    def upload(self, array: HostArray) -> OpaqueArray:
        assert isinstance(array, np.ndarray | np.generic), f"upload was handed {type(array).__name__}"
        self._device.uploads.append(array.shape)
        return self._device.wrap(np.array(array))

    def download(self, array: OpaqueArray) -> HostArray:
        self._device.downloads.append(array.shape)
        return self._device.unwrap(array).copy()

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryStats:
        return MemoryStats(0, 0, 0)

    def close(self) -> None:
        self._device.closed += 1


def kernels_of(device: Device) -> KernelTable:
    """Kernels for part of the ops, enough for most of a decoder. Concat, Slice, Pow, Where, Cast, If and Loop are left to others."""
    table = KernelTable(device.name)
    wrap, unwrap = device.wrap, device.unwrap

    def register(op: str, versions: tuple[int, int | None], make: Make, **options: Any) -> None:
        host = frozenset(options.get("host_inputs", ()))

        def compile_kernel(node: NodeContext) -> Run:
            compute = make(node)

            def run(*inputs: Any) -> OpaqueArray:
                device.calls.append(op)
                for index in host & set(range(len(inputs))):
                    assert inputs[index] is None or isinstance(inputs[index], np.ndarray), f"{op} wants input {index} on the host"
                return wrap(
                    compute(*(x if x is None or index in host else unwrap(x) for index, x in enumerate(inputs))),
                )

            return run

        if device.only is None or op in device.only:
            table.register(op, versions, **options)(compile_kernel)

    floats = [np.dtype(np.float32)]
    for op, ufunc in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide), ("MatMul", np.matmul)):
        register(op, (7, None), lambda node, ufunc=ufunc: ufunc)  # type: ignore[misc]
    for op, unary in (("Neg", np.negative), ("Tanh", np.tanh), ("Sqrt", np.sqrt)):
        register(op, (6, None), lambda node, unary=unary: unary, types={"T": floats})  # type: ignore[misc]
    register("Relu", (6, None), lambda node: lambda x: np.maximum(x, 0), types={"T": floats})
    register("Identity", (1, None), lambda node: lambda x: x, view_of=0)
    register("Reshape", (5, None), _reshape, host_inputs=(1,), view_of=0)
    register("Unsqueeze", (13, None), lambda node: lambda x, axes: np.expand_dims(x, tuple(axes)), host_inputs=(1,), view_of=0)
    register("Transpose", (1, None), lambda node: lambda x: x.transpose(node.attribute("perm", None)), view_of=0)
    register("Gather", (11, None), lambda node: lambda x, i: np.take(x, i, axis=node.attribute("axis", 0)))
    register("Softmax", (13, None), _softmax)
    register("Gemm", (11, None), _gemm)
    register("LayerNormalization", (17, None), _layer_normalization)
    register("Clip", (13, None), lambda node: lambda x, low=None, high=None: np.clip(x, low, high))
    return table


def _reshape(node: NodeContext) -> Callable[..., HostArray]:
    return lambda x, shape: x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape.tolist())])


def _softmax(node: NodeContext) -> Callable[..., HostArray]:
    axis = node.attribute("axis", -1)

    def softmax(x: HostArray) -> HostArray:
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    return softmax


def _gemm(node: NodeContext) -> Callable[..., HostArray]:
    alpha, beta = np.float32(node.attribute("alpha", 1.0)), np.float32(node.attribute("beta", 1.0))

    def gemm(a: HostArray, b: HostArray, c: HostArray) -> HostArray:
        a, b = (a.T if node.attribute("transA", 0) else a), (b.T if node.attribute("transB", 0) else b)
        return alpha * (a @ b) + beta * c

    return gemm


def _layer_normalization(node: NodeContext) -> Callable[..., HostArray]:
    axis, epsilon = node.attribute("axis", -1), np.float32(node.attribute("epsilon", 1e-5))

    def normalize(x: HostArray, scale: HostArray, bias: HostArray) -> HostArray:
        axes = tuple(range(axis % x.ndim, x.ndim))
        centred = x - x.mean(axes, keepdims=True)
        return centred / np.sqrt((centred * centred).mean(axes, keepdims=True) + epsilon) * scale + bias

    return normalize
