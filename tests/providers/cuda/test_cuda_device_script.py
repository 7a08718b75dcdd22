"""The script for machines with a card, run on the test double: what it says, and that it notices what is wrong."""

from __future__ import annotations

import importlib.util
import py_compile
import shutil
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
from miniort.providers import Availability, ProviderInfo, ProviderOptions
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


def load_host_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("miniort_test_script_host_module", Path(__file__).with_name("host_module.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plugins_with(cupy: Any) -> PluginManager:
    class DoubleOfCuda:
        @hookimpl
        def miniort_providers(self) -> list[ProviderInfo]:
            return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), open_double)]

    def open_double(options: ProviderOptions) -> CUDAProvider:
        return CUDAProvider(cupy, cupy.special, enable_cuda_graph=bool(options.options.get("enable_cuda_graph")))

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


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile CUDA C for the host with")
def test_what_it_says_of_recorded_steps(script: ModuleType, cupy: Any, data: Path) -> None:
    folders = [data / "fixtures" / name for name in ("llama_genai_int4_asym", "gpt2_optimum_legacy")]
    lines: list[str] = []
    assert not script.check_recorded_steps(plugins_with(cupy), folders, 5, lines.append), "nothing is recorded without kernels in CUDA C"
    cupy.with_compiler(load_host_module().HostModule)
    assert script.check_recorded_steps(plugins_with(cupy), folders, 5, lines.append)
    assert lines[2] == "llama_genai_int4_asym, as a CUDA graph: tokens as on the CPU, 2 of 5 steps replayed"
    assert lines[3].startswith("gpt2_optimum_legacy, as a CUDA graph: tokens as on the CPU, not recorded: the graph takes no positions")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile CUDA C for the host with")
def test_it_checks_kernels_that_are_generated(script: ModuleType, compiling_plugins: PluginManager, cupy: Any) -> None:
    lines: list[str] = []
    assert script.check_chains(compiling_plugins, frozenset({"Gelu", "Pow", "Less", "Xor", "Not"}), lines.append)
    assert lines == ["chains: 15 of one op and one type, 0 wrong"]
    assert not script.check_chains(plugins_with(cupy), frozenset({"Add"}), lines.append)
    assert "  WRONG Add of float: it is in no chain" in lines


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
