"""Every way in which convolutions are computed, alone and fused, on one thread and on three, gives what onnxruntime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    # name: x's shape, w's shape, attributes
    "points": ((1, 64, 60, 70), (96, 64, 1, 1), {}),
    "points with strides": ((2, 48, 41, 37), (64, 48, 1, 1), {"strides": [2, 3]}),
    "points of few places": ((1, 256, 6, 5), (512, 256, 1, 1), {}),
    "points in groups": ((2, 64, 40, 30), (128, 16, 1, 1), {"group": 4}),
    "columns": ((1, 3, 90, 100), (24, 3, 5, 5), {"strides": [2, 2], "pads": [2, 2, 1, 3]}),
    "columns of several images": ((3, 8, 30, 40), (16, 8, 3, 3), {"pads": [1, 1, 1, 1], "dilations": [2, 1]}),
    "columns in groups": ((1, 32, 50, 60), (64, 8, 3, 3), {"pads": [1, 0, 1, 0], "group": 4}),
    "columns of few places": ((1, 64, 9, 7), (512, 64, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "columns in three dimensions": ((1, 6, 12, 14, 16), (20, 6, 3, 3, 3), {"pads": [1] * 6}),
    "rows": ((1, 64, 64, 64), (24, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
    "rows of several images": ((2, 48, 70, 60), (32, 48, 3, 5), {"pads": [1, 2, 0, 2], "strides": [2, 1]}),
    "rows of few places": ((1, 512, 8, 8), (256, 512, 3, 3), {"pads": [1, 1, 1, 1]}),
    "few windows": ((1, 8, 9, 7), (12, 8, 3, 3), {"pads": [0, 1, 2, 1]}),
    "few windows in groups": ((2, 8, 30), (12, 4, 5), {"pads": [1, 4], "strides": [3], "group": 2}),
    "few windows that leave a rest": ((1, 4, 11, 12), (6, 4, 3, 3), {"strides": [4, 5]}),
    "depthwise": ((1, 48, 61, 66), (48, 1, 5, 5), {"pads": [2, 2, 2, 2], "group": 48}),
    "depthwise of short rows": ((2, 40, 14, 9), (40, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 40}),
    "depthwise with strides": ((1, 24, 50, 47), (24, 1, 5, 3), {"pads": [2, 1, 2, 1], "strides": [3, 2], "group": 24}),
    "depthwise with dilations": ((1, 24, 50, 47), (24, 1, 3, 3), {"pads": [6, 4, 6, 4], "dilations": [6, 4], "group": 24}),
    "depthwise with both": ((1, 9, 40, 33), (9, 1, 3, 3), {"pads": [1, 2, 3, 4], "strides": [2, 2], "dilations": [3, 2], "group": 9}),
    "depthwise of several features": ((2, 10, 31, 20), (30, 1, 3, 4), {"pads": [1, 1, 1, 2], "group": 10}),
    "depthwise in one dimension": ((2, 30, 200), (30, 1, 7), {"pads": [3, 3], "strides": [2], "group": 30}),
    "depthwise with more padding than image": ((1, 5, 1, 2), (5, 1, 3, 3), {"pads": [3, 3, 3, 3], "group": 5}),
}


@pytest.fixture(autouse=True)
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is divided over threads where it's large is divided here too, in products of a few rows."""
    monkeypatch.setattr("miniort_cpu.threads.Threads.divides_products", lambda threads: threads.number > 1)
    monkeypatch.setattr("miniort_cpu.kernels.convolution.SMALLEST_RANGE", 2_000_000)
    monkeypatch.setattr("miniort_cpu.depthwise.SMALLEST_RANGE", 400_000)


def model(nodes: list[onnx.NodeProto], inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray]) -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in inputs.items()]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", values, [helper.make_empty_tensor_value_info("y")], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    serialized: bytes = proto.SerializeToString()
    return serialized


def compare(nodes: list[onnx.NodeProto], inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray]) -> list[list[str]]:
    """Run a model by onnxruntime and by miniort on one thread and three. -> the ops that miniort runs."""
    proto = model(nodes, inputs, constants)
    (wanted,) = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, inputs)
    ops = []
    for threads in (1, 3):
        session = InferenceSession(proto, SessionOptions(intra_op_num_threads=threads), providers=["cpu"])
        for _ in range(2):  # the second time memory is what the first left there
            (actual,) = session.run(None, inputs)
            assert actual.shape == wanted.shape
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=2e-5 * max(1.0, float(np.abs(wanted).max())))
        ops.append([node.op for node in session.explain().nodes])
    return ops


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("constant", [True, False])
def test_convolution(case: str, constant: bool) -> None:
    shape, weight, attributes = CASES[case]
    generator = np.random.default_rng(1)
    x, w = generator.standard_normal(shape).astype(np.float32), (generator.standard_normal(weight) / 8).astype(np.float32)
    bias = generator.standard_normal(weight[0]).astype(np.float32)
    given = {"x": x} if constant else {"x": x, "w": w, "b": bias}
    constants = {"w": w, "b": bias} if constant else {}
    compare([helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)], given, constants)


@pytest.mark.parametrize("case", CASES)
def test_fused_convolution(case: str) -> None:
    """Conv, batch normalization with given statistics, a sum and HardSwish, as one node."""
    shape, weight, attributes = CASES[case]
    generator = np.random.default_rng(2)
    x, w = generator.standard_normal(shape).astype(np.float32), (generator.standard_normal(weight) / 8).astype(np.float32)
    statistics = {name: generator.uniform(0.5, 1.5, weight[0]).astype(np.float32) for name in ("scale", "shift", "mean", "variance")}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], **attributes)]
    plain = model([helper.make_node("Conv", ["x", "w"], ["y"], **attributes)], {"x": x}, {"w": w})
    (result,) = onnxruntime.InferenceSession(plain, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    addend = generator.standard_normal(result.shape).astype(np.float32)
    nodes += [
        helper.make_node("BatchNormalization", ["c", *statistics], ["n"]),
        helper.make_node("Add", ["addend", "n"], ["s"]),
        helper.make_node("HardSwish", ["s"], ["y"]),
    ]
    assert compare(nodes, {"x": x, "addend": addend, **statistics}, {"w": w}) == [["miniort.FusedConv"]] * 2


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_without_overlap(rank: int, groups: int) -> None:
    generator = np.random.default_rng(3)
    kernel = [2, 3, 2][:rank]
    x = generator.standard_normal((2, 8, *[300, 20, 4][:rank])).astype(np.float32)
    w, bias = generator.standard_normal((8, 5, *kernel)).astype(np.float32), generator.standard_normal(5 * groups).astype(np.float32)
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], strides=kernel, group=groups)
    compare([node], {"x": x}, {"w": w, "b": bias})
