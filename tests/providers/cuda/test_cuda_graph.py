"""A decode step that is recorded as a CUDA graph: the CPU's tokens from replays, what they cost, and what isn't recorded.

All on the test double, whose capture does nothing until a graph is launched. Its products need our own kernels, and so g++.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
from collections.abc import Callable
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
from miniort.generation import Decoder, Generator, generate, open_decoder, search
from miniort.plugins import PluginManager
from miniort.providers import Availability, ProviderInfo
from miniort_cli.report import replay_rows
from miniort_cuda.caches.reserved import ReservedBuffers
from miniort_cuda.provider import CUDAProvider

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile CUDA C for the host with")

RECORDABLE = ("gpt2_optimum", "llama_optimum", "llama_genai_int4_asym", "qwen2_genai_int4")
BEFORE_REPLAYS = 3
"""Tokens until steps are replayed: the prompt's, one step that meets the cache, one that is recorded."""


@pytest.fixture(scope="module")
def host() -> ModuleType:
    spec = importlib.util.spec_from_file_location("miniort_test_graph_host_module", Path(__file__).with_name("host_module.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plugins(cupy: Any, host: ModuleType) -> PluginManager:
    """With kernels in CUDA C, and a provider that records."""
    cupy.with_compiler(host.HostModule)

    class DoubleOfCuda:
        @hookimpl
        def miniort_providers(self) -> list[ProviderInfo]:
            def open_double(_: object) -> CUDAProvider:
                return CUDAProvider(cupy, cupy.special, enable_cuda_graph=True)

            return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), open_double)]

    manager = create_plugin_manager(points=[])
    for module in (DoubleOfCuda(), miniort_cpu.plugin, miniort_samplers.plugin, miniort_cache_layouts.plugin, miniort_models.plugin):
        manager.register(module)
    return manager


def open_on(providers: list[str], folder: Path | str, plugins: PluginManager) -> Decoder:
    return open_decoder(folder, providers=providers, plugins=plugins)


def started(decoder: Decoder, layout: str = "static", rows: int = 1, **options: Any) -> Generator:
    generator = Generator(decoder, decoder.new_cache(layout, rows, **options), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(np.random.default_rng(0).integers(0, 200, (rows, 9)))
    return generator


def tokens_of(generator: Generator, count: int) -> list[list[int]]:
    return [step.ids.tolist() for step in generate(generator, count)]


def counts_of(decoder: Decoder) -> tuple[int, int]:
    counts = decoder.replay_counts
    assert counts is not None
    return counts.recorded, counts.replayed


def expect_replays(folder: Path | str, plugins: PluginManager, cupy: Any, count: int = 8) -> None:
    decoder = open_on(["cuda", "cpu"], folder, plugins)
    wanted = tokens_of(started(open_on(["cpu"], folder, plugins)), count)
    found = []
    for place, step in enumerate(generate(started(decoder), count)):
        found.append(step.ids.tolist())
        if place >= BEFORE_REPLAYS:
            assert (cupy.counts["upload"], cupy.counts["graph launch"], cupy.counts["download"]) == (1, 1, 1)
            assert cupy.counts["downloaded bytes"] == 8
            assert cupy.counts["launch"] <= 7, "the logits are copied, and the token is chosen"
        cupy.counts.clear()
    assert found == wanted
    assert decoder.replay_counts is not None
    assert decoder.replay_counts.obstacle is None
    assert counts_of(decoder) == (1, count - BEFORE_REPLAYS)


@needs_compiler
@pytest.mark.parametrize("folder", RECORDABLE)
def test_replays_give_the_cpu_s_tokens_with_one_upload_one_launch_and_one_download(
    folder: str, data: Path, plugins: PluginManager, cupy: Any
) -> None:
    expect_replays(data / "fixtures" / folder, plugins, cupy)


@needs_compiler
def test_the_demo(plugins: PluginManager, cupy: Any) -> None:
    expect_replays("demo", plugins, cupy, count=5)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", ["gpt_neox/optimum", "gpt_neox/ort_optimizer", "gpt2/dynamo_cache", "llama/dynamo_bf16", "llama/fp16", "opt/optimum"]
)
def test_more_exporters_and_families(folder: str, collection: Path, plugins: PluginManager, cupy: Any) -> None:
    expect_replays(collection / folder, plugins, cupy)


@needs_compiler
def test_a_left_padded_batch_rewound_and_forked(data: Path, plugins: PluginManager) -> None:
    with np.load(data / "fixtures" / "llama_optimum" / "reference.npz") as file:
        reference = dict(file)
    decoder = open_on(["cuda", "cpu"], data / "fixtures" / "llama_optimum", plugins)
    generator = Generator(decoder, decoder.new_cache("static", batch=2), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(reference["b2_input_ids"], reference["b2_attention_mask"])
    tokens = np.stack([step.ids for step in generate(generator, 8)], axis=1)
    assert tokens.tolist() == reference["b2_greedy_tokens"][:, :8].tolist()
    start = generator.tokens.shape[1] - 4
    other = generator.fork()
    for each in (other, generator):  # the fork's memory is its own, so it's recorded anew; what follows goes on with the first recording
        each.rewind(start)
        assert np.stack([step.ids for step in generate(each, 4)], axis=1).tolist() == tokens[:, 4:].tolist()
    assert counts_of(decoder) == (2, 5 + 2 + 4)


@needs_compiler
def test_a_cache_that_grows_is_recorded_again(data: Path, plugins: PluginManager) -> None:
    folder = data / "fixtures" / "llama_optimum"
    decoder = open_on(["cuda", "cpu"], folder, plugins)
    wanted = tokens_of(started(open_on(["cpu"], folder, plugins)), 20)
    assert tokens_of(started(decoder, step=4), 20) == wanted
    recorded, replayed = counts_of(decoder)
    assert recorded > 1
    assert replayed > 0


@needs_compiler
def test_a_step_shorter_than_the_recorded_one_is_recorded_again(data: Path, plugins: PluginManager) -> None:
    decoder = open_on(["cuda", "cpu"], data / "fixtures" / "llama_optimum", plugins)
    generator = started(decoder)
    tokens = tokens_of(generator, 6)
    assert counts_of(decoder) == (1, 3)
    generator.rewind(10)
    assert tokens_of(generator, 5) == tokens[1:]
    assert counts_of(decoder) == (2, 7)


@needs_compiler
def test_a_full_cache(data: Path, plugins: PluginManager) -> None:
    """Its last token has no room behind it, so that step is run as ever."""
    folder = data / "fixtures" / "llama_optimum"
    decoder = open_on(["cuda", "cpu"], folder, plugins)
    wanted = tokens_of(started(open_on(["cpu"], folder, plugins)), 6)
    assert tokens_of(started(decoder, max_length=14), 6) == wanted
    assert counts_of(decoder) == (1, 2)


@needs_compiler
def test_logits_that_are_read_later_are_those_of_their_step(data: Path, plugins: PluginManager) -> None:
    folder = data / "fixtures" / "gpt2_optimum"
    steps = list(generate(started(open_on(["cuda", "cpu"], folder, plugins)), 7))
    for found, wanted in zip(steps, generate(started(open_on(["cpu"], folder, plugins)), 7), strict=True):
        np.testing.assert_allclose(found.logits, wanted.logits, rtol=1e-3, atol=1e-4)


@needs_compiler
def test_logits_for_the_host(data: Path, plugins: PluginManager) -> None:
    """A processor without a device version brings them down."""
    folder = data / "fixtures" / "gpt2_optimum"
    found = []
    for providers in (["cuda", "cpu"], ["cpu"]):
        decoder = open_on(providers, folder, plugins)
        processors = decoder.new_processors({"repetition_penalty": {"penalty": 1.3}})
        generator = Generator(decoder, decoder.new_cache("static"), decoder.new_sampler("greedy"), processors, end_tokens=())
        generator.append_tokens([5, 6, 7])
        found.append(tokens_of(generator, 8))
        assert decoder.replay_counts is None or counts_of(decoder) == (1, 5)
    assert found[0] == found[1]


@needs_compiler
def test_a_number_of_the_host_that_was_recorded_would_be_noticed(
    data: Path, plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that writes where the host says: each replay writes to the same place."""
    right = ReservedBuffers.append
    lengths: list[int] = []

    def append(self: ReservedBuffers, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        self._place = lengths[-1]
        return right(self, layer, key[:, :, 0], value[:, :, 0])

    folder = data / "fixtures" / "llama_optimum"
    wanted = tokens_of(started(open_on(["cpu"], folder, plugins)), 12)
    monkeypatch.setattr(ReservedBuffers, "append", append)
    generator = started(open_on(["cuda", "cpu"], folder, plugins))
    found = []
    for _ in range(12):
        assert generator.cache is not None
        lengths.append(generator.cache.length)
        found.append(generator.step().tolist())
    assert found[:BEFORE_REPLAYS] == wanted[:BEFORE_REPLAYS]
    assert found != wanted


@needs_compiler
@pytest.mark.parametrize(
    ("folder", "layout", "reason"),
    [
        ("gpt2_optimum_legacy", "static", "the graph takes no positions, so it counts them by the length of its past"),
        ("gpt2_ort_convert_int8", "static", "calling cuBLAS API during stream capture is currently unsupported"),
        ("llama_optimum", "paged", "the cache's layout has no place of its own for each token; static has"),
    ],
)
def test_what_is_not_recorded_runs_as_ever_and_says_why(folder: str, layout: str, reason: str, data: Path, plugins: PluginManager) -> None:
    decoder = open_on(["cuda", "cpu"], data / "fixtures" / folder, plugins)
    wanted = tokens_of(started(open_on(["cpu"], data / "fixtures" / folder, plugins)), 6)
    assert tokens_of(started(decoder, layout), 6) == wanted
    assert counts_of(decoder) == (0, 0)
    assert decoder.replay_counts is not None
    assert reason in (decoder.replay_counts.obstacle or "")
    assert f"not recorded: {decoder.replay_counts.obstacle}" in dict(replay_rows(decoder))["steps replayed"]


@needs_compiler
@pytest.mark.slow
def test_a_window_that_is_counted_by_the_length_of_the_past_is_noticed(collection: Path, plugins: PluginManager) -> None:
    """And what the rehearsal wrote into the cache is put right."""
    folder = collection / "mistral" / "optimum"
    decoder = open_on(["cuda", "cpu"], folder, plugins)
    assert tokens_of(started(decoder), 12) == tokens_of(started(open_on(["cpu"], folder, plugins)), 12)
    assert decoder.replay_counts is not None
    assert "it counts positions or a window by length" in (decoder.replay_counts.obstacle or "")


@needs_compiler
def test_beams_are_not_recorded_in_each_step(data: Path, plugins: PluginManager) -> None:
    decoder = open_on(["cuda", "cpu"], data / "fixtures" / "llama_optimum", plugins)
    generator = Generator(decoder, decoder.new_cache("static"), decoder.new_sampler("beam", num_beams=2), end_tokens=())
    generator.append_tokens([5, 6, 7])
    search(generator, 5)
    assert counts_of(decoder) == (0, 0)


@needs_compiler
def test_memory_of_recordings_is_counted_and_given_back(data: Path, plugins: PluginManager, cupy: Any) -> None:
    decoder = open_on(["cuda", "cpu"], data / "fixtures" / "llama_optimum", plugins)
    provider = next(iter(decoder.sessions.values())).providers[0].provider
    generator = started(decoder)
    tokens_of(generator, 6)
    assert provider.memory().reserved > cupy.get_default_memory_pool().total_bytes()
    del generator
    gc.collect()
    assert provider.memory().reserved == cupy.get_default_memory_pool().total_bytes()


@needs_compiler
def test_statistics_say_how_many_steps_were_replayed(data: Path, plugins: PluginManager) -> None:
    decoder = open_on(["cuda", "cpu"], data / "fixtures" / "llama_optimum", plugins)
    tokens_of(started(decoder), 8)
    assert dict(replay_rows(decoder)) == {"steps replayed": "5, of 1 that was recorded"}
    assert replay_rows(open_decoder(data / "fixtures" / "llama_optimum", providers=["cpu"], plugins=plugins, replay=False)) == []


Prepare = Callable[[Any, Any], Any]


def captured(cupy: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
    """What a run gives during a capture, its graph, and the pool that both need."""
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        try:
            given = run()
        finally:
            graph = stream.end_capture()
    return given, (graph, pool)


def test_the_double_computes_nothing_until_a_graph_is_launched(cupy: Any) -> None:
    x = cupy.array(np.array([1.0, 2.0], np.float32))

    def run() -> Any:
        y = cupy.exp(x) * 2
        y += 1
        y[0] = 7.0
        return y

    y, (graph, _pool) = captured(cupy, run)
    assert np.isnan(cupy.asnumpy(y)).all()
    for value in (2.0, 3.0):
        x.set(np.array([0, value], np.float32))
        graph.launch()
        np.testing.assert_allclose(cupy.asnumpy(y), [7, 2 * np.exp(value) + 1], rtol=1e-6)


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda cupy, x: cupy.array(np.zeros(2, np.float32)),
        lambda cupy, x: cupy.asnumpy(x),
        lambda cupy, x: x.set(np.zeros(2, np.float32)),
        lambda cupy, x: cupy.matmul(x, x),
        lambda cupy, x: cupy.concatenate([x] * 9),
        lambda cupy, x: cupy.cuda.Device(0).synchronize(),
    ],
)
def test_the_double_refuses_what_cannot_be_captured(forbidden: Prepare, cupy: Any) -> None:
    x = cupy.array(np.ones(2, np.float32))
    with pytest.raises((RuntimeError, NotImplementedError), match="captur"):
        captured(cupy, lambda: forbidden(cupy, x))


def test_the_double_notices_memory_that_is_gone(cupy: Any) -> None:
    arrays = [cupy.array(np.ones(2, np.float32))]
    _, (graph, pool) = captured(cupy, lambda: cupy.exp(arrays[0]))
    graph.launch()
    del pool
    gc.collect()
    with pytest.raises(RuntimeError, match="the pool of a recorded run was given back"):
        graph.launch()
    _, (graph, _pool) = captured(cupy, lambda: cupy.exp(arrays[0]))
    arrays.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="memory that a recorded run reads was given back"):
        graph.launch()
    stream = cupy.cuda.Stream(non_blocking=True)
    y = cupy.array(np.ones(2, np.float32))
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="memory of the common pool"):
            cupy.exp(y)
        stream.end_capture()


def test_a_run_that_fails_while_it_is_recorded_leaves_the_provider_as_it_was(cupy: Any) -> None:
    provider = CUDAProvider(cupy, cupy.special, enable_cuda_graph=True)
    x = np.ones((2, 2), np.float32)
    with pytest.raises(NotImplementedError, match="cuBLAS"):
        provider.record(lambda a: [cupy.matmul(a, a)], x)
    assert not provider.is_recording
    assert provider.download(cupy.exp(provider.upload(x))).shape == (2, 2)
    assert list(provider._graphs) == []
