"""The provider kit and whole generations on the provider `numba`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miniort_cache_layouts.plugin
import miniort_cpu.plugin
import miniort_models.plugin
import miniort_numba.plugin
import miniort_samplers.plugin
from miniort import SessionOptions, create_plugin_manager
from miniort.generation import Generator, generate, open_decoder
from miniort.plugins import PluginManager
from miniort.testing import ProviderConformance
from miniort.testing.operators import operators_of
from miniort_numba.provider import KERNELS

LAYOUTS = ("static", "paged", "concat_bhtd")


def plugins() -> PluginManager:
    manager = create_plugin_manager(points=[])
    for module in (
        miniort_numba.plugin,
        miniort_cpu.plugin,
        miniort_samplers.plugin,
        miniort_cache_layouts.plugin,
        miniort_models.plugin,
    ):
        manager.register(module)
    return manager


OURS = operators_of(KERNELS)


class TestKit(ProviderConformance):
    providers = ("numba", "cpu")
    operators = tuple(each for each in OURS if each.version == max(other.version for other in OURS if other.op == each.op))
    examples = 6
    plugins = plugins()


@pytest.mark.slow
class TestKitThoroughly(TestKit):
    operators = tuple(OURS)
    examples = 40


def greedy(decoder: Any, layout: str, prompt: np.ndarray, count: int) -> list[list[int]]:
    generator = Generator(decoder, decoder.new_cache(layout, batch=len(prompt)), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(prompt)
    return [step.ids.tolist() for step in generate(generator, count)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("folder", ["gpt2_optimum", "gpt2_optimum_legacy", "llama_optimum", "qwen2_genai_int4"])
def test_generation_gives_the_cpu_s_tokens(folder: str, threads: int, data: Path) -> None:
    manager, options = plugins(), SessionOptions(intra_op_num_threads=threads)
    prompt = np.random.default_rng(0).integers(0, 500, (2, 9))
    ours, theirs = (
        open_decoder(data / "fixtures" / folder, providers=each, plugins=manager, options=options) for each in (["numba", "cpu"], ["cpu"])
    )
    assert "numba" in {node.provider for session in ours.sessions.values() for node in session.explain().nodes}
    wanted = greedy(theirs, "concat_bhtd", prompt, 6)
    for layout in LAYOUTS:
        assert greedy(ours, layout, prompt, 6) == wanted, layout
