"""The provider kit and whole generations on the stand-in, and the same BLAS calls on a BLAS that we didn't write."""

from __future__ import annotations

import atexit
import ctypes
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miniort_cache_layouts.plugin
import miniort_cpu.plugin
import miniort_models.plugin
import miniort_samplers.plugin
from miniort import create_plugin_manager, hookimpl
from miniort.generation import Generator, generate, open_decoder
from miniort.plugins import PluginManager
from miniort.providers import Availability, ProviderInfo
from miniort.testing import ProviderConformance
from miniort.testing.operators import operators_of
from miniort_accelerate.kernels import KERNELS
from miniort_accelerate.library import ILP64, Accelerate, load_accelerate
from miniort_accelerate.provider import AccelerateProvider

HERE = Path(__file__)
LAYOUTS = ("static", "paged", "concat_bhtd")
ON_MACOS = platform.system() == "Darwin"


@cache
def library() -> Accelerate:
    """The framework on macOS, the stand-in elsewhere."""
    if ON_MACOS:
        return load_accelerate()
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    target = folder / "stand_in.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", target, HERE.with_name("stand_in.c"), "-lm"], check=True)
    return Accelerate(ctypes.CDLL(str(target)))


class OnTheLibrary:
    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        return [ProviderInfo("accelerate", 200, lambda: Availability(True, "given"), lambda _: AccelerateProvider(library()))]


def plugins() -> PluginManager:
    manager = create_plugin_manager(points=[])
    for module in (OnTheLibrary(), miniort_cpu.plugin, miniort_samplers.plugin, miniort_cache_layouts.plugin, miniort_models.plugin):
        manager.register(module)
    return manager


OURS = operators_of(KERNELS)


class TestKit(ProviderConformance):
    providers = ("accelerate", "cpu")
    operators = tuple(each for each in OURS if each.version == max(other.version for other in OURS if other.op == each.op))
    examples = 6
    plugins = plugins()


@pytest.mark.slow
class TestKitThoroughly(TestKit):
    operators = tuple(OURS)
    examples = 8


def greedy(decoder: Any, layout: str, prompt: np.ndarray, count: int, batch: int = 1) -> list[list[int]]:
    generator = Generator(decoder, decoder.new_cache(layout, batch=batch), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(prompt)
    return [step.ids.tolist() for step in generate(generator, count)]


@pytest.mark.parametrize(
    "folder", ["gpt2_optimum", "gpt2_optimum_legacy", "gpt2_ort_convert_int8", "llama_genai_int4_asym", "llama_optimum", "qwen2_genai_int4"]
)
def test_generation_gives_the_cpu_s_tokens(folder: str, data: Path) -> None:
    manager = plugins()
    prompt = np.random.default_rng(0).integers(0, 500, (2, 9))
    ours, theirs = (open_decoder(data / "fixtures" / folder, providers=each, plugins=manager) for each in (["accelerate", "cpu"], ["cpu"]))
    assert "accelerate" in {node.provider for session in ours.sessions.values() for node in session.explain().nodes}
    wanted = greedy(theirs, "concat_bhtd", prompt, 6, batch=2)
    for layout in LAYOUTS:
        assert greedy(ours, layout, prompt, 6, batch=2) == wanted, layout


class OnOpenBlas:
    """The stand-in, whose BLAS functions with 64-bit indices are those of the OpenBLAS that comes with NumPy."""

    def __init__(self, blas: ctypes.CDLL, stand_in: ctypes.CDLL) -> None:
        self._blas = blas
        self._stand_in = stand_in

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cblas_"):
            return getattr(self._blas, f"scipy_{name.removesuffix(ILP64)}64_")
        return getattr(self._stand_in, name)


@pytest.fixture
def openblas(stand_in: ctypes.CDLL) -> Accelerate:
    found = list(Path(np.__file__).parent.parent.glob("numpy.libs/libscipy_openblas64_*"))
    if not found:
        pytest.skip("this NumPy brings no OpenBLAS with 64-bit indices")
    return Accelerate(OnOpenBlas(ctypes.CDLL(str(found[0])), stand_in), wide_indices=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    ("a", "b"), [((3, 5), (5, 4)), ((1, 65), (65, 33)), ((2, 7, 5), (5, 4)), ((2, 3, 1, 9), (2, 1, 9, 6)), ((33, 1), (1, 17))]
)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_on_openblas(openblas: Accelerate, dtype: str, a: tuple[int, ...], b: tuple[int, ...], turned: tuple[bool, bool]) -> None:
    from miniort_accelerate.kernels.matrix import multiply

    rng = np.random.default_rng(0)

    def array(shape: tuple[int, ...], turn: bool) -> np.ndarray:
        stored = (*shape[:-2], shape[-1], shape[-2]) if turn else shape
        values = rng.standard_normal(stored).astype(dtype)
        return values.swapaxes(-1, -2) if turn else values

    x, y = array(a, turned[0]), array(b, turned[1])
    wanted = x @ y
    wide = np.full((*wanted.shape[:-1], wanted.shape[-1] + 3), 0.5, dtype)  # rows that don't follow each other without a gap
    multiply(openblas, x, y, wide[..., : wanted.shape[-1]], 2.0, 1.0)
    np.testing.assert_allclose(wide[..., : wanted.shape[-1]], 2 * wanted + 0.5, rtol=1e-4 if dtype == "f4" else 1e-12, atol=1e-5)
    assert (wide[..., wanted.shape[-1] :] == 0.5).all()


def test_wide_indices_bind_other_functions(stand_in: ctypes.CDLL) -> None:
    assert Accelerate(stand_in, wide_indices=True).largest_index == 2**63 - 1
    name = f"cblas_sgemm{ILP64}"
    assert getattr(stand_in, name).argtypes[3] is ctypes.c_long
