"""The CUDA C sources: compiled for the host and run against NumPy over odd sizes, and compiled by NVRTC for every capability we take."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from miniort.generation import Generator, generate, open_decoder
from miniort.plugins import PluginManager
from miniort_cuda.fused import SOURCES, FusedKernels, source
from miniort_cuda.provider import CUDAProvider

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile CUDA C for the host with")


def f(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.fixture
def fused(compiling_cupy: Any) -> tuple[Any, FusedKernels]:
    """The kernels on a double that has a compiler, and its provider."""
    provider = CUDAProvider(compiling_cupy, compiling_cupy.special)
    assert provider.fused is not None
    return provider, provider.fused


@pytest.mark.parametrize("size", [1, 31, 33, 257, 1000])
@pytest.mark.parametrize("threads", [32, 96])
def test_normalization_of_odd_sizes(host: ModuleType, size: int, threads: int) -> None:
    x, scale, bias = 3 + f(5, size), f(size, seed=1), f(size, seed=2)
    y = np.full_like(x, np.nan)
    wide = x.astype(np.float64)
    for name, centred, arguments in (
        ("layer_normalization", True, (x, scale, bias, y, np.int64(size), np.float32(1e-5))),
        ("layer_normalization", True, (x, scale, 0, y, np.int64(size), np.float32(1e-5))),
        ("rms_normalization", False, (x, scale, y, np.int64(size), np.float32(1e-5))),
    ):
        host.launch(source("normalization"), name, (5,), threads, arguments)
        part = wide - wide.mean(axis=1, keepdims=True) if centred else wide
        wanted = part / np.sqrt((part * part).mean(axis=1, keepdims=True) + 1e-5) * scale
        wanted = wanted + (bias if len(arguments) == 6 and arguments[2] is bias else 0)
        np.testing.assert_allclose(y, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("size", [1, 5, 32, 33, 129, 1000])
def test_softmax_of_odd_sizes(host: ModuleType, size: int) -> None:
    x = 10 * f(3, size)
    x[0, 0] = -np.inf if size > 1 else 0
    y = np.full_like(x, np.nan)
    host.launch(source("softmax"), "softmax", (3,), 64, (x, y, np.int64(size)))
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-7)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any, scale: float) -> np.ndarray:
    repeat = q.shape[1] // k.shape[1]
    scores = q.astype(np.float64) @ k.repeat(repeat, 1).astype(np.float64).swapaxes(2, 3) * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    peak = np.maximum(scores.max(axis=-1, keepdims=True), -1e30)
    e = np.exp(scores - peak)
    total = e.sum(axis=-1, keepdims=True)
    return (e / np.where(total == 0, 1, total)) @ v.repeat(repeat, 1).astype(np.float64)


@pytest.mark.parametrize("length", [1, 31, 300])
@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (80, 33), (256, 256)])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "all-hidden"])
def test_attention_of_one_query(fused: tuple[Any, FusedKernels], length: int, dim: int, value_dim: int, kind: str) -> None:
    provider, kernels = fused
    batch, heads, kv_heads = 2, 4, 2
    q = f(batch, heads, 1, dim)
    reserved = length + 3  # keys are a slice of a larger buffer, as the static layout's are
    k, v = f(batch, kv_heads, reserved, dim, seed=1), f(batch, kv_heads, reserved, value_dim, seed=2)
    rng = np.random.default_rng(length)
    masks = {
        "none": None,
        "bool": rng.random((batch, 1, 1, length)) < 0.6,
        "float": rng.standard_normal((1, heads, 1, length)).astype(np.float32),
        "all-hidden": np.zeros((1, 1, 1, length), np.bool_),
    }
    mask = masks[kind]
    slices = [provider.upload(each)[:, :, :length] for each in (k, v)]
    found = kernels.attention(provider.upload(q), *slices, None if mask is None else provider.upload(mask), 0.0)
    assert found is not None
    wanted = attention(q, k[:, :, :length], v[:, :, :length], mask, 1 / sqrt(dim))
    np.testing.assert_allclose(provider.download(found), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 5), (3, 300), (250, 270), (511, 512)])
def test_attention_looks_only_between_visible_keys(fused: tuple[Any, FusedKernels], first: int, last: int) -> None:
    """What is hidden may be anything: in a cache that has room for more, nothing was written there."""
    provider, kernels = fused
    q, k, v = f(1, 2, 1, 8), f(1, 2, 512, 8, seed=1), f(1, 2, 512, 8, seed=2)
    mask = np.zeros((1, 1, 1, 512), np.bool_)
    mask[..., first:last] = True
    mask[..., first + 1 : last - 1 : 3] = False
    for each in (k, v):
        each[:, :, ~mask[0, 0, 0]] = np.nan
    found = kernels.attention(*(provider.upload(each) for each in (q, k, v, mask)), 0.0)
    assert found is not None
    wanted = attention(q, np.nan_to_num(k), np.nan_to_num(v), mask, 1 / sqrt(8))
    np.testing.assert_allclose(provider.download(found), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (3, 7, 33), (4, 130, 5), (1, 300, 64), (2, 64, 9000)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_few_rows_times_a_matrix(
    fused: tuple[Any, FusedKernels], rows: int, inner: int, columns: int, transposed: bool, dtype: Any
) -> None:
    provider, kernels = fused
    a, b = f(rows, 1, inner).astype(dtype), f(inner, columns, seed=1).astype(dtype)
    matrix = provider.upload(np.ascontiguousarray(b.T)).transpose() if transposed else provider.upload(b)
    found = kernels.few_rows_product(provider.upload(a), matrix)
    assert found is not None
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == np.float32 else 2e-3
    np.testing.assert_allclose(provider.download(found), a.astype(np.float64) @ b, rtol=tolerance, atol=tolerance)


def test_float16_is_read_as_what_it_is(fused: tuple[Any, FusedKernels]) -> None:
    """All numbers there are, small ones and infinities as well: as a column times one row of 1."""
    provider, kernels = fused
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    found = kernels.few_rows_product(provider.upload(np.ones((1, 1), np.float16)), provider.upload(numbers[None]))
    np.testing.assert_array_equal(provider.download(found)[0], numbers)


def test_attention_in_float16(fused: tuple[Any, FusedKernels]) -> None:
    provider, kernels = fused
    q, k, v = (f(*shape, seed=seed).astype(np.float16) for seed, shape in enumerate([(1, 4, 1, 16), (1, 2, 40, 16), (1, 2, 40, 16)]))
    mask = np.where(np.arange(40) < 30, 0, -np.inf).astype(np.float16).reshape((1, 1, 1, 40))
    found = kernels.attention(*(provider.upload(each) for each in (q, k, v, mask)), 0.0)
    assert found.dtype == np.float16
    np.testing.assert_allclose(provider.download(found), attention(q, k, v, mask.astype(np.float32), 0.25), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("columns", "features", "block"), [(16, 1, 16), (40, 7, 16), (300, 33, 32), (64, 5, 64)])
@pytest.mark.parametrize("points", [False, True])
def test_product_with_few_bits(fused: tuple[Any, FusedKernels], bits: int, columns: int, features: int, block: int, points: bool) -> None:
    provider, kernels = fused
    rng = np.random.default_rng(columns)
    blocks, per_byte = -(-columns // block), 8 // bits
    numbers = rng.integers(0, 1 << bits, (features, blocks * block))
    packed = sum(numbers[:, part::per_byte] << (bits * part) for part in range(per_byte)).astype(np.uint8)
    point = rng.integers(0, 1 << bits, (features, -(-blocks // per_byte) * per_byte))
    packed_points = sum(point[:, part::per_byte] << (bits * part) for part in range(per_byte)).astype(np.uint8)
    scales, a = f(features, blocks), f(3, columns)
    shift = point[:, :blocks].repeat(block, 1) if points else 1 << (bits - 1)
    w = ((numbers - shift) * scales.repeat(block, 1))[:, :columns]
    found = kernels.block_quantized_product(
        provider.upload(a),
        provider.upload(packed.reshape(features, blocks, -1)),
        provider.upload(scales),
        provider.upload(packed_points) if points else None,
        columns,
        bits,
    )
    assert found is not None
    np.testing.assert_allclose(provider.download(found), a @ w.T, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "half"), [(8, 4), (10, 3), (64, 32), (2, 1)])
def test_rotary_embedding(fused: tuple[Any, FusedKernels], size: int, half: int, interleaved: bool) -> None:
    provider, kernels = fused
    x, cos, sin = f(2, 3, 5, size), f(2, 3, half, seed=1), f(2, 3, half, seed=2)
    found = kernels.rotated(*(provider.upload(each) for each in (x, cos, sin)), interleaved)
    a, b = (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    c, s = cos[:, :, None], sin[:, :, None]
    wanted = x.copy()
    first, second = a * c - b * s, a * s + b * c
    if interleaved:
        wanted[..., 0 : 2 * half : 2], wanted[..., 1 : 2 * half : 2] = first, second
    else:
        wanted[..., :half], wanted[..., half : 2 * half] = first, second
    np.testing.assert_allclose(provider.download(found), wanted, rtol=1e-5, atol=1e-6)


def test_what_a_kernel_does_not_take_is_left_to_the_formula(fused: tuple[Any, FusedKernels]) -> None:
    provider, kernels = fused
    half = provider.upload(f(2, 4).astype(np.float16))
    x, q = provider.upload(f(2, 4)), provider.upload(f(1, 2, 2, 8))
    assert kernels.softmax(half, -1) is None
    assert kernels.softmax(x, 0) is None
    assert kernels.softmax(provider.upload(f(4, 2)).transpose(), -1) is None
    assert kernels.normalized(x, provider.upload(f(2, 4)), None, 1e-5, True) is None
    assert kernels.attention(q, q, q, None, 0.0) is None
    assert kernels.few_rows_product(half, x) is None, "of one type"
    assert kernels.attention(provider.upload(f(1, 2, 1, 8).astype(np.float16)), q, q, None, 0.0) is None
    assert kernels.few_rows_product(provider.upload(f(5, 4)), provider.upload(f(4, 4))) is None
    assert kernels.few_rows_product(x, provider.upload(f(8, 8))[::2, ::2]) is None
    assert kernels.few_rows_product(x, provider.upload(f(1, 4, 4))) is None
    assert kernels.block_quantized_product(provider.upload(f(9, 4)), x, x, None, 4, 4) is None


def test_the_shim_notices_threads_that_miss_a_barrier(tmp_path: Path) -> None:
    code = 'extern "C" __global__ void bad(int n) { if ((int)threadIdx.x < n) __syncthreads(); }'
    program = (
        "import importlib.util, numpy, sys\n"
        f"spec = importlib.util.spec_from_file_location('h', {str(Path(__file__).with_name('host_module.py'))!r})\n"
        "h = importlib.util.module_from_spec(spec); spec.loader.exec_module(h)\n"
        f"h.launch({code!r}, 'bad', (1,), 4, [numpy.int32(int(sys.argv[1]))])\n"
    )
    assert subprocess.run([sys.executable, "-c", program, "4"], check=False, capture_output=True).returncode == 0
    assert subprocess.run([sys.executable, "-c", program, "2"], check=False, capture_output=True).returncode != 0


@pytest.mark.parametrize("folder", ["gpt2_optimum", "llama_optimum", "llama_genai_int4_asym"])
def test_a_whole_generation_with_them(folder: str, data: Path, compiling_cupy: Any, compiling_plugins: PluginManager) -> None:
    found = []
    for providers in (["cuda", "cpu"], ["cpu"]):
        decoder = open_decoder(data / "fixtures" / folder, providers=providers, plugins=compiling_plugins)
        generator = Generator(decoder, decoder.new_cache("static"), decoder.new_sampler("greedy"), end_tokens=())
        generator.append_tokens(np.random.default_rng(1).integers(0, 500, (1, 9)))
        found.append([int(step.ids[0]) for step in generate(generator, 8)])
    assert found[0] == found[1]
    used = {
        "gpt2_optimum": {"layer_normalization", "chain_Add_Gelu", "chain_Add_Add"},
        "llama_optimum": {"rms_normalization", "rotary_embedding", "chain_Swish_Mul"},
    }
    wanted = used.get(folder, {"block_quantized_product"}) | {"attention_splits", "attention_joined"}
    assert wanted <= set(compiling_cupy.launches), "the kernels are what ran"


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_nvrtc_compiles_it(nvrtc: Callable[[str, int], None], name: str, capability: int) -> None:
    nvrtc(source(name), capability)
