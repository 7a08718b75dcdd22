"""A whole session on the test double of CuPy: where nodes go, and how often something is copied between host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import miniort_cpu.plugin
from miniort import InferenceSession, SessionOptions, create_plugin_manager, hookimpl
from miniort.plugins import PluginManager
from miniort.providers import Availability, ProviderInfo
from miniort_cuda.provider import CUDAProvider

BATCH, TOKENS, WIDTH, WORDS = 2, 5, 8, 11


class DoubleOfCuda:
    """A plugin whose provider `cuda` runs on the test double."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        return [ProviderInfo("cuda", 300, lambda: Availability(True, "double"), lambda _: CUDAProvider(self.cupy, self.cupy.special))]


@pytest.fixture
def plugins(cupy: Any) -> PluginManager:
    manager = create_plugin_manager(points=[])
    manager.register(DoubleOfCuda(cupy))
    manager.register(miniort_cpu.plugin)
    return manager


def weight(name: str, *shape: int) -> onnx.TensorProto:
    values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32) / 4
    return numpy_helper.from_array(values, name)


def block() -> onnx.ModelProto:
    """Embedding, LayerNormalization, a feed-forward layer with its residual, the head, and the last position's probabilities."""
    nodes = [
        helper.make_node("Gather", ["embedding", "ids"], ["x"]),
        helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["normal"]),
        helper.make_node("MatMul", ["normal", "up"], ["hidden"]),
        helper.make_node("Gelu", ["hidden"], ["active"], approximate="tanh"),
        helper.make_node("MatMul", ["active", "down"], ["back"]),
        helper.make_node("Add", ["x", "back"], ["y"]),
        helper.make_node("Slice", ["y", "minus_one", "end", "one"], ["last"]),
        helper.make_node("Transpose", ["embedding"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["last", "head"], ["logits"]),
        helper.make_node("Reshape", ["logits", "rows"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"]),
    ]
    weights = [weight("embedding", WORDS, WIDTH), weight("scale", WIDTH), weight("bias", WIDTH)]
    weights += [weight("up", WIDTH, 4 * WIDTH), weight("down", 4 * WIDTH, WIDTH)]
    numbers = {"minus_one": [-1], "end": [2**62], "one": [1], "rows": [0, -1]}
    weights += [numpy_helper.from_array(np.array(values, np.int64), name) for name, values in numbers.items()]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "tokens"])]
    outputs = [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", WORDS])]
    graph = helper.make_graph(nodes, "block", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_a_model_runs_on_the_device_with_one_copy_in_and_one_out(plugins: PluginManager, cupy: Any) -> None:
    model = block()
    session = InferenceSession(model, providers=["cuda"], plugins=plugins)
    rng = np.random.default_rng(0)
    for tokens in (TOKENS, 1):
        feeds = {"ids": rng.integers(0, WORDS, (BATCH, tokens))}
        cupy.counts.clear()
        (found,) = session.run(None, feeds)
        (wanted,) = ReferenceEvaluator(model).run(None, feeds)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert (cupy.counts["upload"], cupy.counts["download"]) == (1, 1)


def test_activations_are_given_back_after_a_run(plugins: PluginManager, cupy: Any) -> None:
    session = InferenceSession(block(), providers=["cuda"], plugins=plugins)
    pool = cupy.get_default_memory_pool()
    weights = pool.used_bytes()
    session.run(None, {"ids": np.zeros((BATCH, TOKENS), np.int64)})
    assert pool.used_bytes() == weights > 0
    assert pool.total_bytes() > weights


def test_shape_arithmetic_stays_on_the_host(plugins: PluginManager, cupy: Any) -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["y"]),
        helper.make_node("Shape", ["y"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["rows"]),
        helper.make_node("Concat", ["rows", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["y", "target"], ["z"]),
    ]
    weights = [numpy_helper.from_array(np.array([value], np.int64), name) for name, value in (("first", 0), ("rest", -1))]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b", "c"])]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["a", "bc"])]
    graph = helper.make_graph(nodes, "reshape", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = InferenceSession(model, SessionOptions("none"), providers=["cuda", "cpu"], plugins=plugins)
    cupy.counts.clear()
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    (z,) = session.run(None, {"x": x})
    np.testing.assert_allclose(z, np.exp(x).reshape(2, 12), rtol=1e-6)
    assert (cupy.counts["upload"], cupy.counts["download"], cupy.counts["launch"]) == (1, 1, 1)


def test_all_that_is_known_before_the_device_works_is_uploaded_in_one_step(plugins: PluginManager, cupy: Any) -> None:
    """Two inputs, and a number that the host makes of a shape; it's read after the first result of the device, and also in a branch."""
    branch = helper.make_graph(
        [helper.make_node("Mul", ["a", "count"], ["m"]), helper.make_node("Add", ["m", "b"], ["branch_y"])],
        "branch",
        [],
        [helper.make_tensor_value_info("branch_y", TensorProto.FLOAT, ["n"])],
    )
    nodes = [
        helper.make_node("Exp", ["a"], ["e"]),
        helper.make_node("Size", ["b"], ["size"]),
        helper.make_node("Cast", ["size"], ["count"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["e", "count"], ["scaled"]),
        helper.make_node("Add", ["scaled", "b"], ["y"]),
        helper.make_node("If", ["flag"], ["z"], then_branch=branch, else_branch=branch),
    ]
    floats = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("a", "b")]
    inputs = [*floats, helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("y", "z")]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = InferenceSession(model, SessionOptions("none"), providers=["cuda", "cpu"], plugins=plugins)
    feeds = {"a": np.array([0.0, 1.0, 2.0], np.float32), "b": np.array([3.0, 4.0, 5.0], np.float32), "flag": np.array(True)}
    cupy.counts.clear()
    found = session.run(None, feeds)
    for have, want in zip(found, ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)
    uploads = [copy for copy in session.explain().copies if copy.target == "cuda:0"]
    assert [set(copy.value.split(", ")) for copy in uploads] == [{"a", "b", "count"}]
    assert cupy.counts["upload"] <= 2  # the number has no axes, and so goes by itself
