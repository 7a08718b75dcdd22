"""Large images: pools, normalization and arithmetic that are divided over threads give what onnxruntime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from miniort import InferenceSession, SessionOptions

NODES: dict[str, tuple[str, list[tuple[int, ...]], dict[str, Any]]] = {
    # name: op, its inputs' shapes, attributes
    "max pool": ("MaxPool", [(2, 24, 100, 90)], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max pool of each place": ("MaxPool", [(1, 24, 100, 90)], {"kernel_shape": [1, 1]}),
    "average pool": ("AveragePool", [(2, 24, 100, 90)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]}),
    "average pool of one channel": ("AveragePool", [(1, 1, 500, 400)], {"kernel_shape": [3, 3]}),
    "global average pool": ("GlobalAveragePool", [(2, 24, 100, 90)], {}),
    "batch normalization": ("BatchNormalization", [(2, 24, 100, 90), (24,), (24,), (24,), (24,)], {}),
    "sum": ("Add", [(2, 24, 100, 90), (2, 24, 100, 90)], {}),
    "product per channel": ("Mul", [(1, 24, 100, 90), (1, 24, 1, 1)], {}),
    "product of row and column": ("Mul", [(1, 700), (600, 1)], {}),
    "product of vector and image": ("Mul", [(90,), (3, 100, 30, 90)], {}),
    "quotient": ("Div", [(300_000,), (1,)], {}),
    "relu": ("Relu", [(1, 24, 100, 90)], {}),
    "hard swish": ("HardSwish", [(1, 24, 100, 90)], {}),
    "sigmoid": ("Sigmoid", [(7, 41, 1001)], {}),
}


@pytest.fixture(autouse=True)
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is divided over threads where it's large is divided here too."""
    for module in ("ufuncs", "kernels.pooling", "kernels.image_normalization", "kernels.activation"):
        monkeypatch.setattr(f"miniort_cpu.{module}.SMALLEST_RANGE", 1 << 14)


@pytest.mark.parametrize("case", NODES)
@pytest.mark.parametrize("threads", [1, 3])
def test_shared_work(case: str, threads: int) -> None:
    op, shapes, attributes = NODES[case]
    generator = np.random.default_rng(4)
    feeds = {f"x{index}": generator.uniform(0.5, 2, shape).astype(np.float32) for index, shape in enumerate(shapes)}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in feeds.items()]
    graph = helper.make_graph(
        [helper.make_node(op, list(feeds), ["y"], **attributes)], "g", values, [helper.make_empty_tensor_value_info("y")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    (actual,) = InferenceSession(model, SessionOptions(intra_op_num_threads=threads), providers=["cpu"]).run(None, feeds)
    assert actual.shape == wanted.shape
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
