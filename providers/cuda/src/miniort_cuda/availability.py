"""Whether the CUDA provider can be used here. Asks the driver directly, so nothing imports CuPy only to be told no."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from miniort.providers import Availability
from miniort_cuda.driver import Driver, Version, read_driver

OLDEST_CAPABILITY: Version = (7, 0)
"""Volta: the oldest devices that CUDA 12 and 13 both still compile for, and the first with fast float16."""

INSTALL = "`pip install miniort[cuda]` (CUDA 12) or `pip install miniort[cuda13]`"

WHEELS = {"cupy-cuda12x": 12, "cupy-cuda13x": 13}
"""CuPy's wheels, and the major version of the CUDA that each is built with."""


def cupy_is_installed() -> bool:
    """Whether there is a CuPy to import; it isn't imported."""
    return importlib.util.find_spec("cupy") is not None


def cupy_cuda_major() -> int | None:
    """The major CUDA version of the CuPy wheel that is installed; None for a CuPy that was built from source."""
    for distribution, major in WHEELS.items():
        try:
            version(distribution)
        except PackageNotFoundError:
            continue
        return major
    return None


def check(
    cupy_is_installed: Callable[[], bool] = cupy_is_installed,
    cupy_cuda_major: Callable[[], int | None] = cupy_cuda_major,
    read_driver: Callable[[], Driver] = read_driver,
) -> Availability:
    """Whether device 0 can run our kernels, and why not, in one sentence. Never raises."""
    try:
        return _check(cupy_is_installed(), cupy_cuda_major(), read_driver)
    except Exception as error:
        # A check must not take a session down, whatever a broken installation raises.
        return Availability(False, f"looking for a CUDA device failed: {error}")


def _check(has_cupy: bool, cuda_major: int | None, read_driver: Callable[[], Driver]) -> Availability:
    try:
        driver = read_driver()
    except OSError:
        if has_cupy:
            return Availability(False, "no NVIDIA driver was found, though CuPy is installed; install the driver of your GPU")
        return Availability(False, f"CuPy is not installed and no NVIDIA driver was found; with an NVIDIA GPU and its driver, {INSTALL}")
    if not has_cupy:
        return Availability(False, f"CuPy is not installed; {INSTALL}")
    if cuda_major is not None and driver.cuda[0] < cuda_major:
        return Availability(
            False,
            f"the NVIDIA driver serves CUDA {_text(driver.cuda)}, but the installed CuPy is built with CUDA {cuda_major}; "
            "update the driver, or install the CuPy of an older CUDA",
        )
    if not driver.devices:
        return Availability(False, "the NVIDIA driver shows no device; see `nvidia-smi`, and CUDA_VISIBLE_DEVICES if it is set")
    device = driver.devices[0]
    if device.capability < OLDEST_CAPABILITY:
        return Availability(
            False,
            f"{device.name} is too old: its compute capability is {_text(device.capability)}, and {_text(OLDEST_CAPABILITY)} is needed",
        )
    return Availability(True, f"{device.name}, compute capability {_text(device.capability)}, driver for CUDA {_text(driver.cuda)}")


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
