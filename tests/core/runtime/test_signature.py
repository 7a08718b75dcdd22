"""Inputs and outputs are told as onnxruntime tells them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser

from miniort import InferenceSession, SessionOptions
from miniort.errors import InputError

FIXTURES = Path(__file__).parents[2] / "data" / "fixtures"
MODELS = [
    "gpt2_optimum/model.onnx",
    "gpt2_optimum_legacy/decoder_model.onnx",
    "gpt2_optimum_legacy/decoder_with_past_model.onnx",
    "llama_optimum/model.onnx",
]


def oracle(model: str | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", MODELS)
def test_decoders(name: str) -> None:
    ours, theirs = InferenceSession(FIXTURES / name), oracle(str(FIXTURES / name))
    for mine, reference in ((ours.get_inputs(), theirs.get_inputs()), (ours.get_outputs(), theirs.get_outputs())):
        assert [(each.name, each.type) for each in mine] == [(each.name, each.type) for each in reference]
        for each, other in zip(mine, reference, strict=True):
            assert len(each.shape) == len(other.shape)
            for size, wanted in zip(each.shape, other.shape, strict=True):
                if isinstance(wanted, int):
                    assert size == wanted, each.name


@pytest.mark.parametrize("level", ["none", "all"])
def test_types_and_shapes_of_every_kind(level: str) -> None:
    info = helper.make_tensor_value_info
    proto = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", [f"x{index}"], [f"y{index}"]) for index in range(6)],
            "g",
            [
                info("x0", TensorProto.FLOAT, ["batch", 3, None]),
                info("x1", TensorProto.INT64, []),
                info("x2", TensorProto.STRING, ["n"]),
                info("x3", TensorProto.BFLOAT16, [2]),
                info("x4", TensorProto.BOOL, [0]),
                helper.make_tensor_sequence_value_info("x5", TensorProto.FLOAT, ["n"]),
            ],
            [
                info("y0", TensorProto.FLOAT, ["batch", 3, None]),
                info("y1", TensorProto.INT64, []),
                info("y2", TensorProto.STRING, ["n"]),
                info("y3", TensorProto.BFLOAT16, [2]),
                info("y4", TensorProto.BOOL, [0]),
                helper.make_tensor_sequence_value_info("y5", TensorProto.FLOAT, ["n"]),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 16)],
        ir_version=8,
    )
    ours, theirs = InferenceSession(proto, SessionOptions(level)), oracle(proto.SerializeToString())
    for mine, reference in ((ours.get_inputs(), theirs.get_inputs()), (ours.get_outputs(), theirs.get_outputs())):
        assert [(each.name, each.type, list(each.shape)) for each in mine] == [
            (each.name, each.type, list(each.shape)) for each in reference
        ]


def test_inputs_with_defaults_are_listed_by_themselves() -> None:
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["": 16]>
        g (float[N] x, float[M] d) => (float[K] y) <float[1] d = {7}> { y = Add(x, d) }""")
    ours, theirs = InferenceSession(proto), oracle(proto.SerializeToString())
    assert [each.name for each in ours.get_inputs()] == [each.name for each in theirs.get_inputs()] == ["x"]
    mine, reference = ours.get_overridable_initializers(), theirs.get_overridable_initializers()
    assert [(each.name, each.type) for each in mine] == [(each.name, each.type) for each in reference] == [("d", "tensor(float)")]


def test_providers_are_told_in_order() -> None:
    proto = parser.parse_model('<ir_version: 8, opset_import: ["": 16]> g (float[N] x) => (float[N] y) { y = Neg(x) }')
    assert InferenceSession(proto, providers=["CPUExecutionProvider"]).get_providers() == ["cpu"]


def test_inputs_that_disagree_about_a_named_size() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[n] x, float[n, 2] y) => (float[n] z) { z = Identity(x) }""")
    feeds = {"x": np.zeros(3, np.float32), "y": np.zeros((4, 2), np.float32)}
    with pytest.raises(InputError, match=r"disagree about the size 'n' \(axis 0 of 'x', axis 0 of 'y'\): \[3, 4\].*basic"):
        InferenceSession(model).run(None, feeds)
    [z] = InferenceSession(model, SessionOptions("basic")).run(None, feeds)
    assert z.shape == (3,)


def test_question_marks_are_no_name() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["?", "?"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["?", "?"])
    model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y]), ir_version=10)
    session = InferenceSession(model)
    assert session.get_inputs()[0].shape == [None, None]
    assert session.run(None, {"x": np.zeros((2, 3), np.float32)})[0].shape == (2, 3)
