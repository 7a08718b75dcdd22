"""The script for machines with a card, run on the test double: what it says, and that it notices what is wrong."""

from __future__ import annotations

import importlib.util
import py_compile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import miniort_cache_layouts.plugin
import miniort_cpu.plugin
import miniort_models.plugin
import miniort_samplers.plugin
from miniort import create_plugin_manager, hookimpl
from miniort.plugins import PluginManager
from miniort.providers import Availability, ProviderInfo
from miniort_cuda.provider import CUDAProvider

SCRIPT = Path(__file__).parents[1] / "cuda_device.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    py_compile.compile(str(SCRIPT), doraise=True)
    spec = importlib.util.spec_from_file_location("miniort_cuda_device", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plugins_with(cupy: Any) -> PluginManager:
    class DoubleOfCuda:
        @hookimpl
        def miniort_providers(self) -> list[ProviderInfo]:
            return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), lambda _: CUDAProvider(cupy, cupy.special))]

    manager = create_plugin_manager(points=[])
    for module in (DoubleOfCuda(), miniort_cpu.plugin, miniort_samplers.plugin, miniort_cache_layouts.plugin, miniort_models.plugin):
        manager.register(module)
    return manager


def test_what_it_says(script: ModuleType, cupy: Any, data: Path) -> None:
    lines: list[str] = []
    plugins, folder = plugins_with(cupy), data / "fixtures" / "llama_genai_int4_asym"
    assert script.run_kit(plugins, ("cuda", "cpu"), frozenset({"Relu", "Gelu"}), 30.0, lines.append)
    assert script.check_decoders(plugins, [folder], ("static",), 3, lines.append)
    script.measure_all(plugins, folder, ("static",), (4,), 3, lines.append)
    assert any(line.startswith("kit: ") and line.endswith("0 wrong") for line in lines)
    assert "llama_genai_int4_asym, static: tokens as on the CPU, 2 copies in a decode step" in lines
    assert any("prompt of 4: " in line and "ms a token" in line for line in lines)


def test_it_notices_a_wrong_kernel(script: ModuleType, fake_cupy: ModuleType, data: Path) -> None:
    class Wrong(fake_cupy.FakeCupy):  # type: ignore[misc,name-defined]
        @property
        def maximum(self) -> Any:
            return lambda x, y: self.launch(lambda a, b: np.maximum(a, b) + np.asarray(1, a.dtype), x, y)

    lines: list[str] = []
    assert not script.run_kit(plugins_with(Wrong()), ("cuda", "cpu"), frozenset({"Relu"}), 30.0, lines.append)
    assert any("WRONG Relu" in line for line in lines)


def test_without_a_card_it_says_why(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    from miniort_cuda.availability import check

    if check().ok:
        pytest.skip("there is a card here: run the script itself")
    assert script.main([]) == 2
    assert capsys.readouterr().out.startswith("no card to run on: ")
