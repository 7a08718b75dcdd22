"""How many launches the provider goes without by kernels that are generated: activations, what follows a convolution, and chains."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import miniort_cache_layouts.plugin
import miniort_cpu.plugin
import miniort_models.plugin
import miniort_samplers.plugin
from miniort import InferenceSession, SessionOptions, create_plugin_manager, hookimpl
from miniort.generation import Decoder, Generator, generate, open_decoder
from miniort.graph.elementwise_body import DOMAIN, FUSED_ELEMENTWISE
from miniort.kernels import KernelTable
from miniort.model.weights import WeightStore
from miniort.plugins import PluginManager
from miniort.providers import Availability, ProviderInfo
from miniort.runtime.comparison import difference
from miniort.runtime.engines import SessionEngine
from miniort.types import DType, dtype_to_onnx
from miniort_cuda.provider import CUDAProvider

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile CUDA C for the host with")

OPSET = 24

ACTIVATIONS: dict[str, dict[str, Any]] = {
    **{op: {} for op in ("Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Sigmoid", "Softplus", "Swish")},
    "Gelu by tanh": {"approximate": "tanh"},
}


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_one_launch(name: str, dtype: DType, compiling_cupy: Any, compiling_plugins: PluginManager) -> None:
    node = helper.make_node(name.split()[0], ["x"], ["y"], **ACTIVATIONS[name])
    infos = [helper.make_tensor_value_info(each, dtype_to_onnx(dtype), ["a", "b"]) for each in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:]), opset_imports=[helper.make_opsetid("", OPSET)])
    x = (4 * np.random.default_rng(0).standard_normal((5, 33))).astype(dtype)
    x[0, 0] = -200
    ours, theirs = (InferenceSession(model, providers=each, plugins=compiling_plugins) for each in (["cuda"], ["cpu"]))
    compiling_cupy.counts.clear()
    (found,), (wanted,) = (session.run(None, {"x": x}) for session in (ours, theirs))
    assert (compiling_cupy.counts["launch"] == 1) == (dtype != np.float64)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=1e-2 if dtype == np.float16 else 1e-5, atol=1e-6)


def test_contrib_activations_take_a_bias_in_the_same_launch(compiling_cupy: Any, compiling_plugins: PluginManager) -> None:
    x, bias = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((3, 8), (8,)))
    for op, count in (("BiasGelu", 2), ("FastGelu", 2), ("FastGelu", 1), ("Gelu", 1), ("QuickGelu", 1)):
        node = helper.make_node(op, ["x", "bias"][:count], ["y"], domain="com.microsoft")
        infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", [3, 8]), ("bias", [8]))]
        outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 8])]
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(helper.make_graph([node], "g", infos[:count], outputs), opset_imports=opsets)
        feeds = {"x": x, "bias": bias} if count == 2 else {"x": x}
        ours, theirs = (
            InferenceSession(model, SessionOptions("none"), providers=each, plugins=compiling_plugins) for each in (["cuda"], ["cpu"])
        )
        compiling_cupy.counts.clear()
        np.testing.assert_allclose(ours.run(None, feeds)[0], theirs.run(None, feeds)[0], rtol=1e-5, atol=1e-6, err_msg=op)
        assert compiling_cupy.counts["launch"] == 1, op


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize(
    ("parts", "activation"),
    [("bias", "Relu"), ("addend", "Clip"), ("scale", "Clip without bounds"), ("bias addend scale", "Swish"), ("", "HardSigmoid"), ("", "")],
)
def test_what_follows_a_convolution_is_one_launch(
    parts: str, activation: str, dtype: DType, compiling_cupy: Any, compiling_plugins: PluginManager
) -> None:
    parameters = {"Clip": [-0.5, 0.75], "Clip without bounds": [-np.inf, np.inf], "HardSigmoid": [0.3, 0.4], "Swish": [1.5]}
    rng = np.random.default_rng(0)
    values = {"x": (2, 4, 5, 3), "w": (6, 4, 1, 1), "bias": (6,), "addend": (2, 6, 5, 3)}
    values |= dict.fromkeys(("scale", "shift", "mean", "variance"), (6,))
    wanted_parts = {"x", "w", *parts.split(), *(("shift", "mean", "variance") if "scale" in parts else ())}
    feeds = {name: rng.uniform(0.5, 1.5, shape).astype(dtype) for name, shape in values.items() if name in wanted_parts}
    names = [name if name in feeds else "" for name in values]
    while not names[-1]:
        names.pop()
    attributes: dict[str, Any] = {"kernel_shape": [1, 1], "epsilon": 1e-3}
    if activation:
        attributes["activation"] = activation.split()[0]
    if activation in parameters:
        attributes["activation_params"] = [float(each) for each in parameters[activation]]
    node = helper.make_node("FusedConv", names, ["y"], domain=DOMAIN, **attributes)
    infos = [helper.make_tensor_value_info(name, dtype_to_onnx(dtype), array.shape) for name, array in feeds.items()]
    outputs = [helper.make_tensor_value_info("y", dtype_to_onnx(dtype), None)]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "g", infos, outputs), opset_imports=opsets)
    ours, theirs = (InferenceSession(model, SessionOptions("none"), each, plugins=compiling_plugins) for each in (["cuda"], ["cpu"]))
    compiling_cupy.launches.clear()
    (found,), (wanted,) = (session.run(None, feeds) for session in (ours, theirs))
    assert sum(count for name, count in compiling_cupy.launches.items() if name != "matmul") == 1
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=1e-2 if dtype == np.float16 else 1e-5, atol=1e-3)


class Double:
    """A plugin whose provider `cuda` runs on a double that compiles; `makes_chains` False: as it is where nobody makes any."""

    def __init__(self, cupy: Any, makes_chains: bool) -> None:
        self._cupy, self._makes_chains = cupy, makes_chains

    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), self._open)]

    def _open(self, _: Any) -> CUDAProvider:
        provider = CUDAProvider(self._cupy, self._cupy.special)
        if not self._makes_chains:
            provider.kernels = KernelTable("cuda", (kernel for kernel in provider.kernels if kernel.op != FUSED_ELEMENTWISE))
        return provider


def doubles(fake_cupy: ModuleType, host: ModuleType) -> list[tuple[Any, PluginManager]]:
    """A double and plugins with chains, and without."""
    found = []
    for makes_chains in (True, False):
        cupy = fake_cupy.FakeCupy()
        cupy.with_compiler(host.HostModule)
        manager = create_plugin_manager(points=[])
        for module in (miniort_cpu.plugin, miniort_samplers.plugin, miniort_cache_layouts.plugin, miniort_models.plugin):
            manager.register(module)
        manager.register(Double(cupy, makes_chains))
        found.append((cupy, manager))
    return found


def launches_of_steps(decoder: Decoder, cupy: Any) -> tuple[list[int], list[int]]:
    """Greedy tokens, and the launches of each step."""
    generator = Generator(decoder, decoder.new_cache("static"), decoder.new_sampler("greedy"), end_tokens=())
    generator.append_tokens(np.random.default_rng(0).integers(0, 500, (1, 9)))
    tokens, launches = [], []
    cupy.launches.clear()
    for each in generate(generator, 4):
        tokens.append(int(each.ids[0]))
        launches.append(sum(cupy.launches.values()))
        cupy.launches.clear()
    return tokens, launches


@pytest.mark.parametrize(
    ("folder", "layers", "saved"), [("gpt2_optimum", 3, 3), ("llama_optimum", 2, 1), ("qwen2_genai_int4", 2, 1), ("gpt_neox/optimum", 2, 4)]
)
def test_decoders_launch_less_and_give_the_same_tokens(
    folder: str, layers: int, saved: int, data: Path, collection: Path, fake_cupy: ModuleType, host: ModuleType
) -> None:
    """saved: launches that each layer goes without in a step."""
    path = collection / folder if "/" in folder else data / "fixtures" / folder
    found = []
    for cupy, plugins in doubles(fake_cupy, host):
        decoder = open_decoder(path, providers=["cuda", "cpu"], plugins=plugins)
        found.append(launches_of_steps(decoder, cupy))
    on_cpu = launches_of_steps(open_decoder(path, providers=["cpu"], plugins=plugins), cupy)
    (tokens, launches), (plain_tokens, plain_launches) = found
    assert tokens == plain_tokens == on_cpu[0]
    assert [plain - fused for plain, fused in zip(plain_launches[1:], launches[1:], strict=True)] == [layers * saved] * 3


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_chains_of_narrow_floats(dtype: DType, compiling_cupy: Any, compiling_plugins: PluginManager) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "bias"], ["a"]),
        helper.make_node("Swish", ["a"], ["s"]),
        helper.make_node("Mul", ["s", "half"], ["h"]),
        helper.make_node("Add", ["h", "x"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    constants = {"w": rng.standard_normal((8, 8)), "bias": rng.standard_normal(8), "half": np.array(0.5)}
    weights = [numpy_helper.from_array(np.asarray(array).astype(dtype), name) for name, array in constants.items()]
    infos = [helper.make_tensor_value_info(name, dtype_to_onnx(dtype), ["n", 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    ours, theirs = (InferenceSession(model, providers=each, plugins=compiling_plugins) for each in (["cuda"], ["cpu"]))
    assert [node.op for node in ours.explain().nodes] == ["MatMul", f"miniort.{FUSED_ELEMENTWISE}"]
    x = rng.standard_normal((5, 8)).astype(dtype)
    compiling_cupy.launches.clear()
    (found,), (wanted,) = (session.run(None, {"x": x}) for session in (ours, theirs))
    assert compiling_cupy.launches["chain_Add_Swish_Mul_Add"] == 1
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=0.02, atol=0.02)


def test_bfloat16_is_widened_and_rounded_in_a_launch_each(compiling_cupy: Any, compiling_plugins: PluginManager) -> None:
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.BFLOAT16, [4, 4]) for name in "aby"]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["y"])], "g", infos[:2], infos[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    a, b = (np.random.default_rng(seed).standard_normal((4, 4)).astype(ml_dtypes.bfloat16) for seed in (0, 1))
    session = InferenceSession(model, providers=["cuda"], plugins=compiling_plugins)
    compiling_cupy.launches.clear()
    (y,) = session.run(None, {"a": a, "b": b})
    assert compiling_cupy.launches["chain_Cast"] == 3
    assert sum(compiling_cupy.launches.values()) == 4
    np.testing.assert_array_equal(y, (a.astype(np.float32) @ b.astype(np.float32)).astype(ml_dtypes.bfloat16))


VISION = {"rapidocr_det": ((1, 3, 96, 128), 15), "rapidocr_rec": ((1, 3, 48, 96), 9)}
"""Models of the benchmark: the shape of a picture, and how many launches go."""


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
def test_vision_models_launch_less(name: str, fake_cupy: ModuleType, host: ModuleType) -> None:
    shape, saved = VISION[name]
    path, weights = _benchmark_models()[name].path(), WeightStore()
    found = []
    for cupy, plugins in doubles(fake_cupy, host):
        ours, theirs = (SessionEngine(path, each, "all", ["cpu"], weights=weights, plugins=plugins) for each in ("cuda", "cpu"))
        (each,) = ours.session.get_inputs()
        feeds = {each.name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        cupy.launches.clear()
        outputs = ours.run(feeds)
        found.append(sum(cupy.launches.values()))
        for output, wanted in theirs.run(feeds).items():
            assert difference(outputs[output], wanted).passed, output
    assert found[1] - found[0] == saved


def _benchmark_models() -> Any:
    path = Path(__file__).parents[3] / "benchmarks" / "vision_models.py"
    spec = importlib.util.spec_from_file_location("chains_vision_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.MODELS
