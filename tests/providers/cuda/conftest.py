"""Fixtures for the CUDA provider's tests: the test double of CuPy, and one node run by one kernel."""

from __future__ import annotations

import importlib.util
import math
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


@pytest.fixture(scope="session")
def fake_cupy() -> ModuleType:
    """The module beside this file. Test modules can't import each other by name."""
    spec = importlib.util.spec_from_file_location("miniort_test_fake_cupy", Path(__file__).with_name("fake_cupy.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cupy(fake_cupy: ModuleType) -> Any:
    return fake_cupy.FakeCupy()


@pytest.fixture
def plugins(cupy: Any) -> PluginManager:
    class DoubleOfCuda:
        @hookimpl
        def miniort_providers(self) -> list[ProviderInfo]:
            return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), lambda _: CUDAProvider(cupy, cupy.special))]

    manager = create_plugin_manager(points=[])
    for module in (DoubleOfCuda(), miniort_cpu.plugin, miniort_samplers.plugin, miniort_cache_layouts.plugin, miniort_models.plugin):
        manager.register(module)
    return manager


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
