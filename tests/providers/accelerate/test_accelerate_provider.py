"""Whether the provider can be used, what it says where it can't, and its memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import onnx
import onnx.defs
import pytest

from miniort.errors import ProviderError
from miniort.kernels import NEWEST_TESTED
from miniort.providers import HOST, Availability, Provider, ProviderOptions
from miniort_accelerate import plugin
from miniort_accelerate.availability import check
from miniort_accelerate.kernels import KERNELS
from miniort_accelerate.library import Accelerate
from miniort_accelerate.provider import AccelerateProvider, open_provider

NOT_MACOS = platform.system() != "Darwin"


@pytest.mark.parametrize("system", ["Linux", "Windows"])
def test_other_systems(system: str) -> None:
    assert check(lambda: system) == Availability(False, f"Accelerate is a macOS framework; this is {system}")


def test_macos(accelerate: Accelerate) -> None:
    assert check(lambda: "Darwin", lambda: accelerate).ok


def test_macos_where_the_library_does_not_load() -> None:
    def load() -> Accelerate:
        raise OSError("image not found")

    assert check(lambda: "Darwin", load) == Availability(False, "the Accelerate framework can't be used: image not found")


@pytest.mark.skipif(not NOT_MACOS, reason="looks at systems that don't have the framework")
def test_here_it_is_inert_and_says_why() -> None:
    (info,) = plugin.miniort_providers()
    assert (info.name, info.priority) == ("accelerate", 200)
    assert info.check() == Availability(False, f"Accelerate is a macOS framework; this is {platform.system()}")
    with pytest.raises(ProviderError, match="the framework can't be loaded"):
        info.open(ProviderOptions())


def test_importing_the_plugin_loads_neither_kernels_nor_numpy_code_of_ours() -> None:
    code = "import sys, miniort_accelerate.plugin; sys.exit(any(name.startswith('miniort_accelerate.kernels') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_has_no_options() -> None:
    with pytest.raises(ProviderError, match="no option 'device_id'"):
        open_provider(ProviderOptions(options={"device_id": "0"}))


def test_it_is_a_provider_of_the_host(provider: AccelerateProvider) -> None:
    assert isinstance(provider, Provider)
    assert provider.device == HOST
    array = np.arange(3)
    assert provider.upload(array) is array
    assert provider.download(array) is array
    provider.synchronize()


def test_results_come_from_the_pool_and_return_there(provider: AccelerateProvider) -> None:
    assert provider.memory().active == 0
    array = provider.allocate((512, 512), np.dtype(np.float32))
    assert provider.memory().active == array.nbytes
    del array
    assert provider.memory().active == 0
    assert provider.memory().reserved > 0
    provider.close()
    assert provider.memory().reserved == 0


@pytest.mark.parametrize("op", sorted({kernel.op for kernel in KERNELS}))
def test_versions_since_opset_11_are_covered_once_and_types_are_the_schema_s(op: str) -> None:
    for opset in range(11, NEWEST_TESTED[""] + 1):
        if not onnx.defs.has(op, opset, ""):
            continue
        schema = onnx.defs.get_schema(op, opset, "")
        (kernel,) = [kernel for kernel in KERNELS.find("", op) if kernel.covers(schema.since_version)]
        assert set(kernel.types) <= {constraint.type_param_str for constraint in schema.type_constraints}
