"""Large layers of two directions run them side by side, and give what onnxruntime gives."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions
from miniort_cpu.threads import Threads

TIME, BATCH, WIDTH, HIDDEN = 5, 2, 24, 256


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("divided", [False, True])
def test_directions_side_by_side(monkeypatch: pytest.MonkeyPatch, op: str, gates: int, threads: int, divided: bool) -> None:
    monkeypatch.setattr(Threads, "divides_products", lambda threads: divided)
    generator = np.random.default_rng(0)
    hidden = HIDDEN * 2 if gates == 1 else HIDDEN  # large enough for two threads
    x = generator.standard_normal((TIME, BATCH, WIDTH)).astype(np.float32)
    shapes = {"w": (2, gates * hidden, WIDTH), "r": (2, gates * hidden, hidden), "b": (2, 2 * gates * hidden)}
    weights = [numpy_helper.from_array(generator.uniform(-0.1, 0.1, shape).astype(np.float32), name) for name, shape in shapes.items()]
    node = helper.make_node(op, ["x", *shapes], ["y", "last"], hidden_size=hidden, direction="bidirectional")
    outputs = [helper.make_empty_tensor_value_info(name) for name in ("y", "last")]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)], outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    wanted = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    session = InferenceSession(model, SessionOptions(intra_op_num_threads=threads), providers=["cpu"])
    for expected, actual in zip(wanted, session.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
