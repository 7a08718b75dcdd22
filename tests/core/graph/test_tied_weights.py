"""An output head that is the embedding once more, transposed, is read where the embedding is; one that differs anywhere isn't."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions

ROWS, WIDTH = 3000, 400
TABLE = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)


def model_of(head: np.ndarray, readers: int = 1) -> onnx.ModelProto:
    nodes = [helper.make_node("Gather", ["table", "ids"], ["x"])]
    nodes += [helper.make_node("MatMul", ["x", "head"], [f"y{number}"]) for number in range(readers)]
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, ["n", ROWS]) for number in range(readers)],
        [numpy_helper.from_array(TABLE, "table"), numpy_helper.from_array(head, "head")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def weights_read(session: InferenceSession) -> int:
    return sum(value.nbytes for value in {id(each): each for each in session.plan.initial if hasattr(each, "nbytes")}.values())


@pytest.mark.parametrize("readers", [1, 2])
def test_the_copy_is_not_held(readers: int) -> None:
    model = model_of(np.ascontiguousarray(TABLE.T), readers)
    session = InferenceSession(model)
    assert weights_read(session) == TABLE.nbytes
    assert any("in place of the copy head" in change.reason for change in session.changes)
    ids = {"ids": np.array([5, 2999, 0])}
    for found, wanted in zip(session.run(None, ids), InferenceSession(model, SessionOptions("none")).run(None, ids), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize("place", [(0, 0), (399, 2999), (200, 1700)])
def test_one_other_number_is_another_weight(place: tuple[int, int]) -> None:
    head = np.ascontiguousarray(TABLE.T)
    head[place] += 1
    session = InferenceSession(model_of(head))
    assert weights_read(session) == 2 * TABLE.nbytes
    np.testing.assert_allclose(session.run(None, {"ids": np.arange(4)})[0], TABLE[:4] @ head, atol=1e-3)


def test_mapped_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model_of(np.ascontiguousarray(TABLE.T)), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    session = InferenceSession(path)
    assert weights_read(session) == TABLE.nbytes
    np.testing.assert_allclose(session.run(None, {"ids": np.arange(4)})[0], TABLE[:4] @ TABLE.T, atol=1e-3)
