"""Tokens chosen on the device: the host's choice, ids that come down and not logits, and what sends the logits down after all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miniort_samplers.plugin
from miniort.errors import GenerationError
from miniort.generation import Decoder, Generator, TokenHistory, generate, open_decoder, score
from miniort.plugins import PluginManager
from miniort_cuda.provider import CUDAProvider

HISTORY = TokenHistory(np.zeros((3, 1), np.int64), np.ones((3, 1), np.int64), 1)
DRAWN: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top_k": {"k": 40},
    "top_p": {"p": 0.9},
    "min_p": {"p": 0.01},
}


def open_both(data: Path, plugins: PluginManager, folder: str = "llama_optimum") -> tuple[Decoder, Decoder]:
    """One decoder on the double and one on the CPU."""
    path = data / "fixtures" / folder
    return open_decoder(path, providers=["cuda", "cpu"], plugins=plugins), open_decoder(path, providers=["cpu"], plugins=plugins)


def started(decoder: Decoder, sampler: str, processors: Mapping[str, Mapping[str, Any]], rows: int, layout: str = "static") -> Generator:
    generator = Generator(
        decoder, decoder.new_cache(layout, rows), decoder.new_sampler(sampler), decoder.new_processors(processors), end_tokens=(), seed=7
    )
    generator.append_tokens(np.random.default_rng(0).integers(0, 500, (rows, 9)))
    return generator


@pytest.mark.parametrize(("sampler", "processors"), [("greedy", {}), ("categorical", {}), ("categorical", DRAWN)])
@pytest.mark.parametrize("rows", [1, 2])
def test_ids_come_down_and_they_are_the_cpu_s(
    sampler: str, processors: Mapping[str, Mapping[str, Any]], rows: int, data: Path, plugins: PluginManager, cupy: Any
) -> None:
    on_cuda, on_cpu = open_both(data, plugins)
    wanted = [step.ids.tolist() for step in generate(started(on_cpu, sampler, processors, rows), 8)]
    steps = generate(started(on_cuda, sampler, processors, rows), 8)
    found = [next(steps).ids.tolist()]
    for step in iter(lambda: _counted(steps, cupy), None):
        found.append(step.ids.tolist())
        uploads = 2 if sampler == "categorical" and rows > 1 else 1  # several rows' random numbers are uploaded
        assert (cupy.counts["upload"], cupy.counts["download"], cupy.counts["downloaded bytes"]) == (uploads, 1, 8 * rows)
    assert found == wanted


def _counted(steps: Any, cupy: Any) -> Any:
    cupy.counts.clear()
    return next(steps, None)


@pytest.mark.parametrize("folder", ["gpt2_optimum_legacy", "qwen2_genai_int4"])
def test_two_graphs_and_a_quantized_one(folder: str, data: Path, plugins: PluginManager, cupy: Any) -> None:
    on_cuda, on_cpu = open_both(data, plugins, folder)
    generator = started(on_cuda, "greedy", {}, 1)
    first = generator.step()
    cupy.counts.clear()
    second = generator.step()
    assert cupy.counts["downloaded bytes"] == 8
    assert [first.tolist(), second.tolist()] == [step.ids.tolist() for step in generate(started(on_cpu, "greedy", {}, 1), 2)]


def test_logits_come_down_when_they_are_read(data: Path, plugins: PluginManager, cupy: Any) -> None:
    on_cuda, on_cpu = open_both(data, plugins)
    generator, other = started(on_cuda, "greedy", {}, 2), started(on_cpu, "greedy", {}, 2)
    for found, wanted in zip(generate(generator, 3), generate(other, 3), strict=True):
        np.testing.assert_allclose(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
        assert [row.chosen.id for row in score(found, 2)] == wanted.ids.tolist()
        cupy.counts.clear()
        assert found.logits.dtype == np.float32
        assert cupy.counts["download"] == 0, "they were there already"
    np.testing.assert_allclose(generator.logits(), other.logits(), rtol=1e-4, atol=1e-5)
    for each in (generator, other):
        each.reorder([1, 1, 0])
    assert generator.step().tolist() == other.step().tolist()


def test_a_processor_without_a_device_version_brings_the_logits_down(data: Path, plugins: PluginManager, cupy: Any) -> None:
    on_cuda, on_cpu = open_both(data, plugins)
    processors = {"repetition_penalty": {"penalty": 1.3}, "temperature": {"temperature": 0.5}}
    generator = started(on_cuda, "greedy", processors, 1)
    wanted = [int(step.ids[0]) for step in generate(started(on_cpu, "greedy", processors, 1), 5)]
    assert [int(step.ids[0]) for step in generate(generator, 4)] == wanted[:4]
    cupy.counts.clear()
    assert generator.step().tolist() == wanted[4:]
    assert cupy.counts["downloaded bytes"] == on_cuda.vocabulary_size * 4  # type: ignore[operator]


def test_a_decoder_on_the_cpu_has_samplers_of_the_cpu(data: Path, plugins: PluginManager) -> None:
    on_cuda, on_cpu = open_both(data, plugins)
    assert on_cpu.token_chooser is None
    generator = started(on_cpu, "greedy", {}, 1)
    mixed = Generator(on_cpu, on_cpu.new_cache(), on_cuda.new_sampler("greedy"), end_tokens=())
    mixed.append_tokens(generator.tokens)
    assert mixed.step().tolist() == generator.step().tolist()


@pytest.mark.parametrize("wrong", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("name", ["greedy", "categorical"])
def test_where_no_token_can_be_chosen_the_host_is_asked(name: str, wrong: float, data: Path, plugins: PluginManager, cupy: Any) -> None:
    logits = np.full((2, 5), wrong, np.float32)
    logits[0] = 1
    rngs = [np.random.default_rng(row) for row in range(2)]
    provider = CUDAProvider(cupy, cupy.special)
    create = provider.token_sampler(name)
    assert create is not None
    found = create()(provider.upload(logits), rngs)
    try:
        wanted = host_samplers()[name]()(logits, rngs)
    except GenerationError:
        assert found is None
    else:
        assert found is not None
        assert found.tolist() == wanted.tolist()


def host_samplers() -> dict[str, Any]:
    return {info.name: info.create for info in miniort_samplers.plugin.miniort_samplers()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[("temperature", {"temperature": each}) for each in (0.5, 1e-38, 3.0)],
        *[("top_k", {"k": each}) for each in (1, 3, 50, 99)],
        *[("top_p", {"p": each}) for each in (0.0, 0.3, 0.95, 1.0)],
        *[("min_p", {"p": each}) for each in (0.0, 0.2, 1.0)],
    ],
)
def test_processors_keep_what_the_host_s_keep(name: str, options: Mapping[str, Any], cupy: Any) -> None:
    logits = np.random.default_rng(3).normal(scale=3, size=(3, 50)).astype(np.float32)
    logits[1] = np.round(logits[1])  # many are equally likely
    logits[2, ::3] = -np.inf
    provider = CUDAProvider(cupy, cupy.special)
    create = provider.logits_processor(name)
    assert create is not None
    found = provider.download(create(**options)(provider.upload(logits)))
    (info,) = [each for each in miniort_samplers.plugin.miniort_logits_processors() if each.name == name]
    np.testing.assert_array_equal(found, info.create(**options)(HISTORY, logits))


def test_names_without_a_device_version(cupy: Any) -> None:
    provider = CUDAProvider(cupy, cupy.special)
    assert provider.token_sampler("beam") is None
    assert provider.logits_processor("grammar") is None
