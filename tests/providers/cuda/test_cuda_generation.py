"""Decoders on the test double: the CPU's tokens from every layout that has a device version, weights and cache that stay, and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from miniort import InferenceSession, SessionOptions
from miniort.errors import CacheError, PluginError
from miniort.generation import Decoder, Generator, generate, open_decoder
from miniort.generation.cache import CacheSpec
from miniort.plugins import PluginManager
from miniort.testing import cache_layout_machine
from miniort.testing.cache_layouts import QUICK
from miniort_cli.report import device_memory, device_rows
from miniort_cuda.caches import DEVICE_LAYOUTS
from miniort_cuda.caches.memory import DeviceCache
from miniort_cuda.provider import CUDAProvider

LAYOUTS = tuple(DEVICE_LAYOUTS)
PACKAGED = ("gpt2_optimum", "gpt2_optimum_legacy", "gpt2_ort_convert_int8", "llama_genai_int4_asym", "llama_optimum", "qwen2_genai_int4")


def greedy(decoder: Decoder, layout: str, prompt: np.ndarray, count: int, after: Callable[[], None] = lambda: None) -> list[int]:
    generator = Generator(decoder, decoder.new_cache(layout), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(prompt)
    tokens = []
    for step in generate(generator, count):
        tokens.append(int(step.ids[0]))
        after()
    return tokens


def expect_the_cpu_s_tokens_and_two_copies(folder: Path, plugins: PluginManager, cupy: Any, layouts: Sequence[str], count: int) -> None:
    prompt = np.random.default_rng(0).integers(0, 500, (1, 9))
    decoder = open_decoder(folder, providers=["cuda", "cpu"], plugins=plugins)
    on_cpu = open_decoder(folder, providers=["cpu"], plugins=plugins)
    wanted = greedy(on_cpu, "concat_bhtd", prompt, count)
    for layout in layouts:
        steps: list[tuple[int, int]] = []

        def note(steps: list[tuple[int, int]] = steps) -> None:
            steps.append((cupy.counts["upload"], cupy.counts["download"]))
            cupy.counts.clear()

        assert isinstance(decoder.new_cache(layout), DeviceCache)
        assert greedy(decoder, layout, prompt, count, note) == wanted, layout
        assert set(steps[1:]) == {(1, 1)}, f"{layout}: a decode step is one upload and one download"
    for session in decoder.sessions.values():
        explanation = session.explain()
        for node in explanation.nodes:
            reasons = "; ".join(refusal.reason for refusal in node.refusals)
            assert node.provider == "cuda" or "computes with shapes" in reasons or "on the host already" in reasons, node
    decode = list(decoder.sessions.values())[-1].explain()
    assert [(copy.source, copy.target) for copy in decode.copies] == [("host", "cuda:0"), ("cuda:0", "host")]


@pytest.mark.parametrize("folder", PACKAGED)
def test_fixtures(folder: str, data: Path, plugins: PluginManager, cupy: Any) -> None:
    expect_the_cpu_s_tokens_and_two_copies(data / "fixtures" / folder, plugins, cupy, LAYOUTS, 6)


def test_the_demo(plugins: PluginManager, cupy: Any) -> None:
    decoder = open_decoder("demo", providers=["cuda", "cpu"], plugins=plugins)
    prompt = np.array([decoder.open_tokenizer().encode("The")])
    assert greedy(decoder, "static", prompt, 4) == greedy(open_decoder("demo", providers=["cpu"], plugins=plugins), "static", prompt, 4)


@pytest.mark.slow
def test_more_fixtures(collection: Path, plugins: PluginManager, cupy: Any) -> None:
    folders = sorted({path.parent for path in collection.rglob("*.onnx")} - set(collection.glob("*/dynamo_nocache")))
    assert folders
    for folder in folders:
        expect_the_cpu_s_tokens_and_two_copies(folder, plugins, cupy, LAYOUTS, 12)


def test_a_left_padded_batch_rewound_and_forked(data: Path, plugins: PluginManager) -> None:
    with np.load(data / "fixtures" / "llama_optimum" / "reference.npz") as file:
        reference = dict(file)
    decoder = open_decoder(data / "fixtures" / "llama_optimum", providers=["cuda", "cpu"], plugins=plugins)
    for layout in LAYOUTS:
        generator = Generator(decoder, decoder.new_cache(layout, batch=2), decoder.new_sampler("greedy"), end_tokens=())
        generator.append_tokens(reference["b2_input_ids"], reference["b2_attention_mask"])
        tokens = np.stack([step.ids for step in generate(generator, 8)], axis=1)
        assert tokens.tolist() == reference["b2_greedy_tokens"][:, :8].tolist(), layout
        start = generator.tokens.shape[1] - 4
        other = generator.fork()
        for each in (generator, other):
            each.rewind(start)
            again = np.stack([step.ids for step in generate(each, 4)], axis=1)
            assert again.tolist() == tokens[:, 4:].tolist(), layout


def test_weights_are_uploaded_once_for_prefill_and_decode(data: Path, plugins: PluginManager, cupy: Any) -> None:
    decoder = open_decoder(data / "fixtures" / "gpt2_optimum_legacy", providers=["cuda", "cpu"], plugins=plugins)
    uploads = cupy.counts["upload"]
    prefill = data / "fixtures" / "gpt2_optimum_legacy" / "decoder_model.onnx"
    InferenceSession(prefill, providers=["cuda", "cpu"], plugins=plugins, weights=decoder.weights)
    again = cupy.counts["upload"] - uploads
    cupy.counts.clear()
    InferenceSession(prefill, providers=["cuda", "cpu"], plugins=plugins)
    assert again < cupy.counts["upload"] / 4, "only what this session alone folds is uploaded again"


def test_a_layout_without_a_device_version_works_by_way_of_the_host(data: Path, plugins: PluginManager, cupy: Any) -> None:
    folder = data / "fixtures" / "llama_optimum"
    decoder = open_decoder(folder, providers=["cuda", "cpu"], plugins=plugins)
    prompt = np.random.default_rng(0).integers(0, 500, (1, 9))
    assert greedy(decoder, "concat_bthd", prompt, 4) == greedy(decoder, "concat_bhtd", prompt, 4)


def test_options_of_device_layouts_are_checked_as_those_of_the_others(plugins: PluginManager) -> None:
    decoder = open_decoder("demo", providers=["cuda", "cpu"], plugins=plugins)
    with pytest.raises(PluginError, match=r"cache layout 'paged' has no option 'pages'; its options: page_size"):
        decoder.new_cache("paged", pages=3)
    with pytest.raises(PluginError, match="page_size must be at least 1, found 0"):
        decoder.new_cache("paged", page_size=0)
    cache = decoder.new_cache("static", max_length=4)
    spec = decoder.cache_spec(1)
    with pytest.raises(CacheError, match="the cache holds 4 tokens at most"):
        cache.append(0, *(np.zeros((1, spec.kv_heads, 5, spec.head_dim), spec.dtype) for _ in range(2)))


def test_statistics_count_copies_and_device_memory(data: Path, plugins: PluginManager) -> None:
    decoder = open_decoder(data / "fixtures" / "llama_optimum", providers=["cuda", "cpu"], plugins=plugins)
    rows = dict(device_rows(decoder.sessions))
    assert rows["copies in decoder"] == "1 to devices, 1 to the host"
    assert rows["memory of cuda:0, decoder"].endswith(" at most")
    memory = device_memory(decoder.sessions)["decoder"]["cuda:0"]
    assert 0 < memory["active"] <= memory["reserved"] <= memory["peak"]
    assert device_rows(open_decoder("demo", providers=["cpu"], plugins=plugins).sessions) == []


@pytest.mark.parametrize("level", ["none", "all"])
def test_no_node_lacks_a_kernel_before_or_after_raising(level: str, data: Path, plugins: PluginManager) -> None:
    path = data / "fixtures" / "llama_optimum" / "model.onnx"
    session = InferenceSession(path, SessionOptions(level, strict=True), providers=["cuda", "cpu"], plugins=plugins)
    on_host = [node.op for node in session.explain().nodes if node.provider == "cpu"]
    reasons = {refusal.reason for node in session.explain().nodes for refusal in node.refusals}
    assert on_host
    assert reasons <= {"it computes with shapes, which stay on the host", "its input is on the host already"}


def on_the_double(layout: str, **options: Any) -> Callable[[CacheSpec], DeviceCache]:
    """A factory of device caches, each on a double of its own: the kit looks at them through host arrays."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("kit_fake_cupy", Path(__file__).with_name("fake_cupy.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cupy = module.FakeCupy()
    provider = CUDAProvider(cupy, cupy.special)
    return lambda cache_spec: DEVICE_LAYOUTS[layout](provider, cache_spec, **options)


FEW = settings(QUICK, max_examples=4)
MACHINES: dict[str, dict[str, int]] = {"concat_bhtd": {}, "static": {"step": 2}, "paged": {"page_size": 3}}


def machine_of(layout: str, profile: settings) -> Any:
    device = attrgetter("memory") if layout == "static" else None
    return cache_layout_machine(on_the_double(layout, **MACHINES[layout]), profile=profile, device=device)


TestConcat, TestStatic, TestPaged = (machine_of(layout, FEW).TestCase for layout in MACHINES)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MACHINES)
def test_layouts_thoroughly(layout: str) -> None:
    machine_of(layout, QUICK).TestCase().runTest()
