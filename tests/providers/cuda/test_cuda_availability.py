"""What `check()` says in each situation, with a stand-in for the driver's library, compiled here, and without one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from miniort.errors import ProviderError
from miniort.providers import Availability
from miniort_cuda import plugin
from miniort_cuda.availability import check
from miniort_cuda.driver import Device, Driver, read_driver

SOURCE = Path(__file__).with_name("stand_in_driver.c")

ReadDriver = Callable[[], Driver]


@pytest.fixture
def driver(tmp_path: Path) -> Callable[..., ReadDriver]:
    """`driver(DEVICES=0)` reads a stand-in that was compiled with that definition."""

    def build(**definitions: int) -> ReadDriver:
        library = tmp_path / "libcuda_stand_in.so"
        options = [f"-D{name}={value}" for name, value in definitions.items()]
        subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", *options, "-o", library, SOURCE], check=True)
        return lambda: read_driver(lambda: ctypes.CDLL(str(library)))

    return build


def no_driver() -> Driver:
    return read_driver(lambda: ctypes.CDLL("there_is_no_such_library.so"))


def check_with(read: ReadDriver, cupy: bool = True, cuda_major: int | None = 12) -> Availability:
    return check(lambda: cupy, lambda: cuda_major, read)


def test_the_driver_s_answers_are_read(driver: Callable[..., ReadDriver]) -> None:
    assert driver()() == Driver(cuda=(12, 4), devices=(Device("Stand-in GPU", (8, 6)), Device("Second GPU", (8, 6))))


def test_available(driver: Callable[..., ReadDriver]) -> None:
    found = check_with(driver())
    assert found == Availability(True, "Stand-in GPU, compute capability 8.6, driver for CUDA 12.4")


def test_cupy_missing(driver: Callable[..., ReadDriver]) -> None:
    found = check_with(driver(), cupy=False)
    assert not found.ok
    assert found.reason.startswith("CuPy is not installed; `pip install miniort[cuda]`")


def test_driver_missing() -> None:
    found = check_with(no_driver)
    assert not found.ok
    assert found.reason.startswith("no NVIDIA driver was found, though CuPy is installed")


def test_both_missing_does_not_send_people_to_install_cupy_first() -> None:
    found = check_with(no_driver, cupy=False)
    assert not found.ok
    assert found.reason.startswith("CuPy is not installed and no NVIDIA driver was found")
    assert "pip install miniort[cuda]" in found.reason


@pytest.mark.parametrize("definitions", [{"DEVICES": 0}, {"INIT": 100}])
def test_no_device(driver: Callable[..., ReadDriver], definitions: dict[str, int]) -> None:
    found = check_with(driver(**definitions))
    assert not found.ok
    assert found.reason.startswith("the NVIDIA driver shows no device")


def test_device_too_old(driver: Callable[..., ReadDriver]) -> None:
    found = check_with(driver(MAJOR=6))
    assert found == Availability(False, "Stand-in GPU is too old: its compute capability is 6.6, and 7.0 is needed")


@pytest.mark.parametrize("status", [0, 35])
def test_driver_older_than_the_wheel_s_cuda(driver: Callable[..., ReadDriver], status: int) -> None:
    found = check_with(driver(DRIVER_CUDA=11080, INIT=status))
    assert not found.ok
    assert found.reason.startswith("the NVIDIA driver serves CUDA 11.8, but the installed CuPy is built with CUDA 12; update the driver")


def test_an_older_minor_version_is_no_obstacle(driver: Callable[..., ReadDriver]) -> None:
    assert check_with(driver(DRIVER_CUDA=12000)).ok
    assert not check_with(driver(DRIVER_CUDA=12090), cuda_major=13).ok


def test_cupy_from_source_is_not_held_to_a_wheel_s_cuda(driver: Callable[..., ReadDriver]) -> None:
    assert check_with(driver(DRIVER_CUDA=11080), cuda_major=None).ok


def test_a_driver_that_does_not_start_is_named(driver: Callable[..., ReadDriver]) -> None:
    with pytest.raises(ProviderError, match="cuInit failed with error 999"):
        driver(INIT=999)()
    found = check_with(driver(INIT=999))
    assert not found.ok
    assert "cuInit failed with error 999" in found.reason


def test_a_library_that_lacks_a_function_is_no_exception() -> None:
    found = check_with(lambda: read_driver(lambda: ctypes.CDLL(None)))  # this process, which has no cuInit
    assert not found.ok
    assert "cuInit" in found.reason


def test_reasons_are_one_line(driver: Callable[..., ReadDriver]) -> None:
    for found in (
        check_with(no_driver),
        check_with(no_driver, cupy=False),
        check_with(driver(DEVICES=0)),
        check_with(driver(), cupy=False),
    ):
        assert "\n" not in found.reason


def test_the_plugin_offers_the_provider_and_its_check_answers_here() -> None:
    (info,) = plugin.miniort_providers()
    assert (info.name, info.priority) == ("cuda", 300)
    assert isinstance(info.check(), Availability)


def test_importing_the_plugin_and_checking_imports_no_cupy() -> None:
    code = "import sys, miniort_cuda.plugin as p; p.miniort_providers()[0].check(); sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
