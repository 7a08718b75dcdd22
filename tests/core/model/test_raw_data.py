"""Where a model's file holds its weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort.model.raw_data import raw_data_places


def test_every_weight_is_where_it_is_said_to_be() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 5), (200, 700), (1,))]
    weights = [numpy_helper.from_array(array, f"w{index}") for index, array in enumerate(arrays)]
    weights.insert(1, helper.make_tensor("in another field", TensorProto.FLOAT, [2], [1, 2]))
    node = helper.make_node("Identity", ["w0"], ["y"])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph([node], "g", [], [output], weights), producer_name="a test")
    file = np.frombuffer(model.SerializeToString(), np.uint8)
    found = [file[offset : offset + length].tobytes() for offset, length in raw_data_places(file)]
    assert found == [array.tobytes() for array in arrays]


def test_what_is_no_model() -> None:
    assert raw_data_places(np.empty(0, np.uint8)) == []
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=[numpy_helper.from_array(np.zeros(100, np.float32))]))
    for cut in (1, 50):
        with pytest.raises((ValueError, IndexError)):
            raw_data_places(np.frombuffer(model.SerializeToString()[:-cut], np.uint8))
