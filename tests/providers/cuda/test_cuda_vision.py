"""Vision models on the test double: YOLOX (ddddocr's detector) and PP-OCR, with no node on the CPU but shape arithmetic."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import miniort_cpu.plugin
from miniort import create_plugin_manager, hookimpl
from miniort.model.weights import WeightStore
from miniort.providers import Availability, ProviderInfo
from miniort.runtime.comparison import difference
from miniort.runtime.engines import SessionEngine
from miniort_cuda.provider import CUDAProvider

SMALLER = {
    "ddddocr_det": (1, 3, 416, 416),
    "rapidocr_det": (1, 3, 96, 128),
    "rapidocr_rec": (1, 3, 48, 96),
    "rapidocr_cls": (1, 3, 48, 192),
}
"""Models of the benchmark, and pictures as small as each takes: the double computes slowly."""


def _catalogue() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "vision_models.py"
    spec = importlib.util.spec_from_file_location("cuda_vision_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize("name", SMALLER)
def test_every_node_runs_on_the_device(name: str, level: str, cupy: Any) -> None:
    class DoubleOfCuda:
        @hookimpl
        def miniort_providers(self) -> list[ProviderInfo]:
            return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), lambda _: CUDAProvider(cupy, cupy.special))]

    plugins = create_plugin_manager(points=[])
    plugins.register(DoubleOfCuda())
    plugins.register(miniort_cpu.plugin)
    path, weights = _catalogue().MODELS[name].path(), WeightStore()
    ours, theirs = (SessionEngine(path, each, level, ["cpu"], weights=weights, plugins=plugins) for each in ("cuda", "cpu"))
    for node in ours.session.explain().nodes:
        reasons = "; ".join(refusal.reason for refusal in node.refusals)
        assert node.provider == "cuda" or "computes with shapes" in reasons or "on the host already" in reasons, node
    (each,) = ours.session.get_inputs()
    feeds = {each.name: np.random.default_rng(0).standard_normal(SMALLER[name]).astype(np.float32)}
    cupy.counts.clear()
    found = ours.run(feeds)
    if level == "all":
        assert (cupy.counts["upload"], cupy.counts["download"]) == (1, 1)
    for output, wanted in theirs.run(feeds).items():
        apart = difference(found[output], wanted)
        assert apart.passed, (output, apart)
