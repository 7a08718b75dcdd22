"""A raised model is written in one opset, is valid, and gives what the model in its own opset gives, here and in onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions

X = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
SWISH = "sig = Sigmoid(x) swish = Mul(x, sig)"
"""What is raised to an op of opset 24."""

FORMS = {  # opset, nodes that make y of `swish` [2, 3, 8]
    "Squeeze and Unsqueeze": (11, "u = Unsqueeze <axes = [0, 4]>(swish) y = Squeeze <axes = [0]>(u)"),
    "ReduceMean": (11, "y = ReduceMean <axes = [1, 2], keepdims = 0>(swish)"),
    "ReduceMean over all": (13, "y = ReduceMean <keepdims = 0>(swish)"),
    "ReduceSum": (12, "y = ReduceSum <axes = [-1], keepdims = 1>(swish)"),
    "Split": (11, "a, b = Split <axis = 2, split = [3, 5]>(swish) n = Neg(b) y = Concat <axis = 2>(n, a)"),
    "Split into equal parts": (13, "a, b = Split <axis = 2>(swish) n = Neg(b) y = Concat <axis = 2>(n, a)"),
    "Slice": (9, "y = Slice <starts = [1, 0], ends = [3, -1], axes = [1, 2]>(swish)"),
    "Pad": (10, "y = Pad <pads = [0, 0, 1, 0, 1, 0], value = 2.5>(swish)"),
    "Clip": (10, "y = Clip <min = -0.25, max = 0.5>(swish)"),
    "Clip at one end": (10, "y = Clip <max = 0.5>(swish)"),
    "TopK": (9, "y, i = TopK <k = 3, axis = -1>(swish)"),
    "Softmax": (11, "y = Softmax <axis = 2>(swish)"),
    "Dropout": (10, "y = Dropout <ratio = 0.5>(swish)"),
    "Upsample": (9, 'y = Upsample <mode = "nearest">(swish, scales)'),
    "Resize": (10, 'y = Resize <mode = "linear">(swish, scales)'),
}


def model(body: str, opset: int) -> onnx.ModelProto:
    text = f"""<ir_version: 6, opset_import: ["": {opset}]>
        g (float[2, 3, 8] x) => (float[] y) <float[3] scales = {{1.0, 2.0, 2.0}}> {{ {SWISH} {body} }}"""
    proto = parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


def run_elsewhere(proto: onnx.ModelProto, feeds: dict[str, Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    opset, body = FORMS[name]
    proto = model(body, opset)
    plain, raised = (InferenceSession(proto, SessionOptions(level), providers=["cpu"]) for level in ("none", "all"))
    assert "Swish" in [node.op_type for node in raised.model.graph]
    assert raised.model.opset_imports[""] == 24
    assert all(node.version is None for node in raised.model.graph)
    written = ir.to_proto(raised.model)
    onnx.checker.check_model(written, full_check=True)
    (wanted,) = plain.run(["y"], {"x": X})
    np.testing.assert_allclose(raised.run(["y"], {"x": X})[0], wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(run_elsewhere(written, {"x": X})[0], wanted, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_said_keeps_its_opset() -> None:
    session = InferenceSession(model("y = Softmax <axis = 1>(swish)", 11), providers=["cpu"])
    assert session.model.opset_imports[""] == 11
    assert "Sigmoid" in [node.op_type for node in session.model.graph]
    reasons = [change.reason for change in session.changes if change.graph_pass == "bound-opset"]
    assert any("Softmax of opset 11" in reason for reason in reasons)
    onnx.checker.check_model(ir.to_proto(session.model), full_check=True)


def test_a_model_with_nothing_to_raise_keeps_its_opset() -> None:
    text = "g (float[2, 3] x) => (float[1, 2, 3] y) { y = Unsqueeze <axes = [0]>(x) }"
    proto = parser.parse_model(f'<ir_version: 6, opset_import: ["": 11]> {text}')
    assert InferenceSession(proto, providers=["cpu"]).model.opset_imports[""] == 11


def test_bodies_of_branches_are_converted_too() -> None:
    text = f"""<ir_version: 6, opset_import: ["": 11]> g (float[2, 3, 8] x, bool c) => (float[2, 3, 1] y) {{ {SWISH} y = If (c) <
        then_branch = t () => (float[2, 3, 1] a) {{ a = ReduceMean <axes = [2]>(swish) }},
        else_branch = e () => (float[2, 3, 1] b) {{ b = ReduceMax <axes = [2]>(x) }}> }}"""
    proto = parser.parse_model(text)
    plain, raised = (InferenceSession(proto, SessionOptions(level), providers=["cpu"]) for level in ("none", "all"))
    assert raised.model.opset_imports[""] == 24
    onnx.checker.check_model(ir.to_proto(raised.model), full_check=True)
    for condition in (True, False):
        feeds = {"x": X, "c": np.array(condition)}
        np.testing.assert_allclose(raised.run(None, feeds)[0], plain.run(None, feeds)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2_optimum/model", "gpt2_optimum_legacy/decoder_model_merged", "llama_optimum/model"])
def test_raised_decoders_are_valid_and_run_elsewhere(data: Any, name: str) -> None:
    path = data / "fixtures" / f"{name}.onnx"
    raised = InferenceSession(path, providers=["cpu"])
    written = ir.to_proto(raised.model)
    onnx.checker.check_model(written, full_check=True)
    ids = np.arange(6).reshape(1, 6) + 40
    known = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(6)[None],
        "use_cache_branch": np.array([False]),
    }
    empty = 1 if "merged" in name else 0  # its graph for prompts wants a past all the same
    past: dict[str, Any] = {
        arg.name: np.zeros([1, int(str(arg.shape[1])), empty, int(str(arg.shape[3]))], np.float32)
        for arg in raised.get_inputs()
        if "past" in arg.name
    }
    feeds = {arg.name: (known | past)[arg.name] for arg in raised.get_inputs()}
    for wanted, actual in zip(raised.run(None, feeds), run_elsewhere(written, feeds), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-4)
