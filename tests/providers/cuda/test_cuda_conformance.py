"""The provider kit on the test double: every op of the default domain that the provider has, at every schema version."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import miniort_cpu.plugin
from miniort import create_plugin_manager, hookimpl
from miniort.providers import Availability, ProviderInfo
from miniort.testing import ProviderConformance
from miniort.testing.operators import operators_of
from miniort_cuda.kernels import KERNELS
from miniort_cuda.provider import CUDAProvider

HERE = Path(__file__)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"cuda_conformance_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DoubleOfCuda:
    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        cupy = _load(HERE.with_name("fake_cupy.py")).FakeCupy()
        return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), lambda _: CUDAProvider(cupy, cupy.special))]


def _plugins() -> Any:
    manager = create_plugin_manager(points=[])
    manager.register(DoubleOfCuda())
    manager.register(miniort_cpu.plugin)
    return manager


OURS = [each for each in operators_of(KERNELS) if each.opset <= 28]


NEWEST = [each for each in OURS if each.version == max(other.version for other in OURS if other.op == each.op)]


class TestOnTheDouble(ProviderConformance):
    providers = ("cuda", "cpu")
    operators = NEWEST
    examples = 2
    plugins = _plugins()


@pytest.mark.slow
class TestThoroughlyOnTheDouble(TestOnTheDouble):
    operators = OURS
    examples = 5
