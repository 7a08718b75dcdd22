"""Fixtures for the CUDA provider's tests: the test double of CuPy, and one node run by one kernel."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.defs
import pytest

import miniort_cache_layouts.plugin
import miniort_cpu.plugin
import miniort_models.plugin
import miniort_samplers.plugin
from miniort import create_plugin_manager, hookimpl
from miniort.kernels import Kernel, NodeContext
from miniort.plugins import PluginManager
from miniort.providers import Availability, ProviderInfo
from miniort.types import ValueInfo
from miniort_cuda.kernels import KERNELS
from miniort_cuda.provider import CUDAProvider

Attributes = Mapping[str, Any]


NVRTC = "nvidia-cuda-nvrtc-cu12==12.9.86"
CAPABILITIES = (70, 72, 75, 80, 86, 87, 89, 90)


def load(name: str) -> ModuleType:
    """The module beside this file. Test modules can't import each other by name."""
    spec = importlib.util.spec_from_file_location(f"miniort_test_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fake_cupy() -> ModuleType:
    return load("fake_cupy")


@pytest.fixture(scope="session")
def host() -> ModuleType:
    """What compiles CUDA C for the host."""
    return load("host_module")


@pytest.fixture
def cupy(fake_cupy: ModuleType) -> Any:
    return fake_cupy.FakeCupy()


@pytest.fixture
def compiling_cupy(fake_cupy: ModuleType, host: ModuleType) -> Any:
    """The double with a compiler, so that the provider has its kernels in CUDA C."""
    cupy = fake_cupy.FakeCupy()
    cupy.with_compiler(host.HostModule)
    return cupy


def plugins_with(cupy: Any) -> PluginManager:
    class DoubleOfCuda:
        @hookimpl
        def miniort_providers(self) -> list[ProviderInfo]:
            return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), lambda _: CUDAProvider(cupy, cupy.special))]

    manager = create_plugin_manager(points=[])
    for module in (DoubleOfCuda(), miniort_cpu.plugin, miniort_samplers.plugin, miniort_cache_layouts.plugin, miniort_models.plugin):
        manager.register(module)
    return manager


@pytest.fixture
def plugins(cupy: Any) -> PluginManager:
    return plugins_with(cupy)


@pytest.fixture
def compiling_plugins(compiling_cupy: Any) -> PluginManager:
    return plugins_with(compiling_cupy)


def find_kernel(op: str, version: int) -> Kernel:
    """The one kernel for a schema version."""
    (kernel,) = [kernel for kernel in KERNELS.find("", op) if kernel.covers(version)]
    return kernel


def node_context(
    provider: Any, op: str, version: int, inputs: Sequence[np.ndarray | None], attributes: Attributes, outputs: int
) -> NodeContext:
    return NodeContext(
        op=op,
        domain="",
        version=version,
        name=f"the_{op}",
        inputs=tuple(None if array is None else ValueInfo("x", array.dtype, array.shape) for array in inputs),
        outputs=tuple(ValueInfo(f"y{index}") for index in range(outputs)),
        provider=provider,
        attributes={name: tuple(value) if isinstance(value, list) else value for name, value in attributes.items()},
    )


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def run_on_numpy(op: str, opset: int, inputs: Sequence[np.ndarray | None], attributes: Attributes, outputs: int) -> list[np.ndarray]:
    """The kernel's own arithmetic, with NumPy as its namespace."""
    special = SimpleNamespace(erf=np.vectorize(math.erf, otypes=[np.float64]))
    version = onnx.defs.get_schema(op, opset, "").since_version
    node = node_context(SimpleNamespace(xp=np, special=special), op, version, inputs, attributes, outputs)
    return [np.asarray(array) for array in as_tuple(find_kernel(op, version).compile(node)(*inputs))]


def run_on_double(cupy: Any) -> Callable[..., list[np.ndarray]]:
    """The kernel through the provider on the test double, its operands uploaded as the runtime would."""
    provider = CUDAProvider(cupy, cupy.special)

    def run(op: str, opset: int, inputs: Sequence[np.ndarray | None], attributes: Attributes, outputs: int) -> list[np.ndarray]:
        version = onnx.defs.get_schema(op, opset, "").since_version
        (kernel,) = [kernel for kernel in provider.kernels.find("", op) if kernel.covers(version)]
        compiled = kernel.compile(node_context(provider, op, version, inputs, attributes, outputs))
        operands = [array if array is None or index in kernel.host_inputs else provider.upload(array) for index, array in enumerate(inputs)]
        return [provider.download(array) for array in as_tuple(compiled(*operands))]

    return run


@pytest.fixture(params=["numpy", "double"])
def run_node(request: pytest.FixtureRequest, cupy: Any) -> Callable[..., list[np.ndarray]]:
    """Runs one node: `run_node(op, opset, inputs, attributes, outputs)` -> output arrays."""
    return run_on_numpy if request.param == "numpy" else run_on_double(cupy)


@pytest.fixture(params=CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> int:
    """Each compute capability that we take."""
    return int(request.param)


@pytest.fixture(scope="session")
def nvrtc(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], None]:
    """f(CUDA C, compute capability): compiles it with NVIDIA's compiler out of its wheel, which needs no GPU and no driver."""
    folder = tmp_path_factory.mktemp("nvrtc")
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), NVRTC]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder)
    library = ctypes.CDLL(str(next(folder.rglob("libnvrtc.so.12"))))
    for name in ("nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcGetPTXSize"):
        getattr(library, name).restype = ctypes.c_int

    def compile_source(code: str, capability: int) -> None:
        program = ctypes.c_void_p()
        assert library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernels.cu", 0, None, None) == 0
        options = [f"--gpu-architecture=compute_{capability}".encode(), b"--std=c++14", b"--fmad=false"]
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        assert status == 0, log.value.decode()
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        assert size.value > 1000

    return compile_source
