"""The NVIDIA driver's own library: which CUDA it serves, and which devices it sees. Bound with ctypes, so that CuPy isn't needed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miniort.errors import ProviderError

CUDA_ERROR_INSUFFICIENT_DRIVER = 35
CUDA_ERROR_NO_DEVICE = 100
COMPUTE_CAPABILITY_MAJOR = 75  # CUdevice_attribute
COMPUTE_CAPABILITY_MINOR = 76
NAME_BYTES = 256

Version = tuple[int, int]
"""Major and minor number: of CUDA, or of a device's compute capability."""


@dataclass(frozen=True)
class Device:
    """One device: its name, and its compute capability, such as (8, 6)."""

    name: str
    capability: Version


@dataclass(frozen=True)
class Driver:
    """What the driver says: the newest CUDA version that it serves, and the devices that it shows to this process."""

    cuda: Version
    devices: tuple[Device, ...]


def load_driver_library() -> ctypes.CDLL:
    """The driver's library. OSError if no driver is installed."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def read_driver(load: Callable[[], ctypes.CDLL] = load_driver_library) -> Driver:
    """Ask the driver. OSError if there is none; ProviderError if it's there but doesn't start.

    Source of the functions and numbers: CUDA Driver API, `cuda.h`.
    """
    library = load()
    integer = ctypes.POINTER(ctypes.c_int)
    _declare(library.cuInit, [ctypes.c_uint])
    _declare(library.cuDriverGetVersion, [integer])
    _declare(library.cuDeviceGetCount, [integer])
    _declare(library.cuDeviceGet, [integer, ctypes.c_int])
    _declare(library.cuDeviceGetName, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int])
    _declare(library.cuDeviceGetAttribute, [integer, ctypes.c_int, ctypes.c_int])

    version = _read(library.cuDriverGetVersion)
    cuda = (version // 1000, version % 1000 // 10)  # 12040 is 12.4
    status = library.cuInit(0)
    if status in (CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INSUFFICIENT_DRIVER):
        return Driver(cuda, ())
    _expect_success("cuInit", status)
    devices = [_read(library.cuDeviceGet, ordinal) for ordinal in range(_read(library.cuDeviceGetCount))]
    return Driver(cuda, tuple(_describe(library, device) for device in devices))


def _describe(library: ctypes.CDLL, device: int) -> Device:
    name = ctypes.create_string_buffer(NAME_BYTES)
    _expect_success("cuDeviceGetName", library.cuDeviceGetName(name, NAME_BYTES, device))
    major = _read(library.cuDeviceGetAttribute, COMPUTE_CAPABILITY_MAJOR, device)
    minor = _read(library.cuDeviceGetAttribute, COMPUTE_CAPABILITY_MINOR, device)
    return Device(name.value.decode(errors="replace"), (major, minor))


def _declare(function: Any, argument_types: list[Any]) -> None:
    function.argtypes = argument_types
    function.restype = ctypes.c_int


def _read(function: Any, *arguments: int) -> int:
    """The int that `function` writes to its first argument."""
    result = ctypes.c_int()
    _expect_success(function.__name__, function(ctypes.byref(result), *arguments))
    return result.value


def _expect_success(name: str, status: int) -> None:
    if status != 0:
        raise ProviderError(f"the NVIDIA driver's {name} failed with error {status}; `nvidia-smi` may say more")
