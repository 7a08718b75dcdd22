"""Weights of every element type, inline and in external files."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions
from miniort.types import Array

VALUES: dict[str, Array] = {
    "FLOAT": np.array([[0.5, -1, 3], [1e30, -0.0, np.inf]], np.float32),
    "DOUBLE": np.array([[0.5, -1, 3], [1e300, 0, -np.inf]]),
    "FLOAT16": np.array([[0.5, -1, 3], [65504, 0, 6e-8]], np.float16),
    "BFLOAT16": np.array([[0.5, -1, 3], [1e30, 0, 2]], ml_dtypes.bfloat16),
    "FLOAT8E4M3FN": np.array([[0.5, -1, 3], [448, 0, 2]], ml_dtypes.float8_e4m3fn),
    "FLOAT8E5M2": np.array([[0.5, -1, 3], [57344, 0, 2]], ml_dtypes.float8_e5m2),
    "INT8": np.array([[0, -1, 3], [127, -128, 5]], np.int8),
    "UINT16": np.array([[0, 1, 3], [65535, 4, 5]], np.uint16),
    "INT32": np.array([[0, -1, 3], [2**31 - 1, -(2**31), 5]], np.int32),
    "INT64": np.array([[0, -1, 3], [2**63 - 1, -(2**63), 5]], np.int64),
    "UINT64": np.array([[0, 1, 3], [2**64 - 1, 4, 5]], np.uint64),
    "BOOL": np.array([[True, False, True], [False, False, True]]),
    "INT4": np.array([[0, -1, 3], [7, -8, 5], [1, 2, -3]], ml_dtypes.int4),
    "UINT4": np.array([[0, 1, 3], [7, 15, 8], [1, 2, 9]], ml_dtypes.uint4),
    "FLOAT4E2M1": np.array([[0, -1, 3], [6, -0.5, 4], [1, 2, 1.5]], ml_dtypes.float4_e2m1fn),
    "INT2": np.array([[0, -1, 1], [-2, 0, 1]], ml_dtypes.int2),
    "UINT2": np.array([[0, 1, 2], [3, 0, 1]], ml_dtypes.uint2),
    "COMPLEX64": np.array([[0.5 - 1j, 3], [2j, 1]], np.complex64),
}


def model_with(tensor: TensorProto) -> onnx.ModelProto:
    """y = Identity(w), w the given weight."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", tensor.data_type, list(tensor.dims))],
        [tensor],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)


def assert_same_bits(actual: Array, expected: Array) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_inline(name: str, raw: bool, level: str) -> None:
    value = VALUES[name]
    if raw:
        tensor = numpy_helper.from_array(value, "w")
        assert tensor.data_type == TensorProto.DataType.Value(name)
    else:
        tensor = helper.make_tensor("w", TensorProto.DataType.Value(name), value.shape, value.ravel().tolist())
    session = InferenceSession(model_with(tensor), SessionOptions(graph_optimization_level=level))
    assert_same_bits(session.run(None, {})[0], value)


@pytest.mark.parametrize("name", VALUES)
def test_external(name: str, tmp_path: Path) -> None:
    value = VALUES[name]
    inline = numpy_helper.from_array(value, "w")
    (tmp_path / "data").write_bytes(b"\0" * 8 + inline.raw_data)
    tensor = TensorProto(name="w", data_type=inline.data_type, dims=value.shape, data_location=TensorProto.EXTERNAL)
    for key, entry in (("location", "data"), ("offset", "8"), ("length", str(len(inline.raw_data)))):
        tensor.external_data.add(key=key, value=entry)
    session = InferenceSession(model_with(tensor), base_dir=tmp_path)
    assert_same_bits(session.run(None, {})[0], value)
    del tensor.external_data[2]
    assert_same_bits(InferenceSession(model_with(tensor), base_dir=tmp_path).run(None, {})[0], value)


@pytest.mark.parametrize("level", ["none", "all"])
def test_text(level: str) -> None:
    tensor = helper.make_tensor("w", TensorProto.STRING, [2, 2], ["", "a", "größer", "😀"])
    (y,) = InferenceSession(model_with(tensor), SessionOptions(graph_optimization_level=level)).run(None, {})
    assert y.dtype == object
    assert y.tolist() == [["", "a"], ["größer", "😀"]]
    assert all(type(item) is str for item in y.ravel())


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value_int": -3}, np.array(-3)),
        ({"value_ints": [1, 2]}, np.array([1, 2])),
        ({"value_float": 0.5}, np.array(0.5, np.float32)),
        ({"value_floats": [0.5, 2.0]}, np.array([0.5, 2], np.float32)),
        ({"value_string": "größer"}, np.array("größer", object)),
        ({"value_strings": ["", "😀"]}, np.array(["", "😀"], object)),
        ({"value": numpy_helper.from_array(np.zeros((0, 3), np.int8))}, np.zeros((0, 3), np.int8)),
    ],
)
def test_constants_of_every_kind(attribute: dict[str, object], expected: Array, level: str) -> None:
    """Once handed on to another node, once as the graph's output itself."""
    number = helper.np_dtype_to_tensor_dtype(expected.dtype) if expected.dtype != object else TensorProto.STRING
    outputs = [helper.make_tensor_value_info(name, number, list(expected.shape)) for name in ("y", "z")]
    nodes = [
        helper.make_node("Constant", [], ["c"], **attribute),
        helper.make_node("Identity", ["c"], ["y"]),
        helper.make_node("Constant", [], ["z"], **attribute),
    ]
    graph = helper.make_graph(nodes, "g", [], outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    for actual in InferenceSession(proto, SessionOptions(graph_optimization_level=level)).run(None, {}):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert actual.tolist() == expected.tolist()
