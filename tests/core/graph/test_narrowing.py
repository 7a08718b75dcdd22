"""What a Slice behind ops leaves out isn't computed, and what it keeps is what it was."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
RNG = np.random.default_rng(0)


def model_of(
    nodes: list[onnx.NodeProto], outputs: list[str], weights: dict[str, np.ndarray], inputs: dict[str, list[int | str]]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "narrowing",
        [
            *(helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()),
            helper.make_tensor_value_info("first", INT64, [1]),
        ],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def last(value: str, output: str, axis: str = "time") -> onnx.NodeProto:
    return helper.make_node("Slice", [value, "first", "end", axis], [output])


BOUNDS = {"end": np.array([2**62]), "time": np.array([1]), "head_time": np.array([2])}


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], sliced: dict[str, int]) -> None:
    """The optimised model gives what the model gives, and slices so many outputs of each op: none where it computes all."""
    plain = InferenceSession(model, SessionOptions("none"))
    narrowed = InferenceSession(model)
    for first in (-1, 0, -2, 3):
        given = {**feeds, "first": np.array([first])}
        for found, wanted in zip(narrowed.run(None, given), plain.run(None, given), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)
    producers = {name: node.op_type for node in narrowed.model.graph for name in (output.name for output in node.outputs)}
    cut = [
        producers.get(node.inputs[0].name if node.inputs[0] else None, "input") for node in narrowed.model.graph if node.op_type == "Slice"
    ]
    assert {op: cut.count(op) for op in cut} == sliced


def test_a_residual_layer_is_computed_for_what_is_kept() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["before"]),
        helper.make_node("LayerNormalization", ["before", "scale", "bias"], ["normed"]),
        helper.make_node("MatMul", ["normed", "w"], ["product"]),
        helper.make_node("Add", ["product", "wide_bias"], ["biased"]),
        helper.make_node("Gelu", ["biased"], ["active"]),
        helper.make_node("MatMul", ["active", "v"], ["back"]),
        helper.make_node("Add", ["back", "before"], ["sum"]),
        last("sum", "y"),
    ]
    weights = {
        **BOUNDS,
        "scale": RNG.random(8, np.float32),
        "bias": RNG.random(8, np.float32),
        "w": RNG.random((8, 16), np.float32),
        "wide_bias": RNG.random(16, np.float32),
        "v": RNG.random((16, 8), np.float32),
    }
    x = {"x": RNG.random((2, 5, 8), np.float32)}
    check(model_of(nodes, ["y"], weights, {"x": ["batch", "time", 8]}), x, {"input": 1})


def test_what_others_read_is_computed_whole() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["first_op"]),
        helper.make_node("Neg", ["first_op"], ["whole"]),
        helper.make_node("Exp", ["whole"], ["sliced"]),
        last("sliced", "y"),
    ]
    x = {"x": RNG.random((2, 5, 8), np.float32)}
    check(model_of(nodes, ["y", "whole"], BOUNDS, {"x": ["batch", "time", 8]}), x, {"Neg": 1})


def test_the_queries_of_an_attention_and_the_rows_of_its_mask() -> None:
    nodes = [
        helper.make_node("Neg", ["q"], ["query"]),
        helper.make_node("Attention", ["query", "k", "v", "mask"], ["heads"]),
        helper.make_node("Transpose", ["heads"], ["turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["turned", "shape"], ["merged"]),
        last("merged", "y"),
    ]
    shape: list[int | str] = ["batch", 2, "time", 4]
    feeds = {name: RNG.random((2, 2, 5, 4), np.float32) for name in ("q", "k", "v")}
    feeds["mask"] = RNG.random((2, 1, 5, 5), np.float32)
    inputs: dict[str, list[int | str]] = {"q": shape, "k": shape, "v": shape, "mask": ["batch", 1, "time", "time"]}
    weights = {**BOUNDS, "shape": np.array([0, 0, 8])}
    check(model_of(nodes, ["y"], weights, inputs), feeds, {"input": 2})


def test_a_causal_attention_needs_to_know_where_its_queries_are() -> None:
    nodes = [helper.make_node("Attention", ["q", "k", "v"], ["heads"], is_causal=1), last("heads", "y", "head_time")]
    shape: list[int | str] = ["batch", 2, "time", 4]
    feeds = {name: RNG.random((2, 2, 5, 4), np.float32) for name in ("q", "k", "v")}
    check(model_of(nodes, ["y"], BOUNDS, {"q": shape, "k": shape, "v": shape}), feeds, {"Attention": 1})


@pytest.mark.parametrize(
    ("node", "weights"),
    [
        (helper.make_node("Softmax", ["x"], ["z"], axis=1), {}),
        (helper.make_node("CumSum", ["x", "axis"], ["z"]), {"axis": np.array(1)}),
        (helper.make_node("Transpose", ["x"], ["z"], perm=[1, 0, 2]), {}),
        (helper.make_node("LayerNormalization", ["x", "scale"], ["z"], axis=1), {"scale": RNG.random((4, 8), np.float32)}),
        (helper.make_node("Reshape", ["x", "shape"], ["z"]), {"shape": np.array([2, 8, 4])}),
        (helper.make_node("Add", ["x", "row"], ["z"]), {"row": RNG.random((1, 1, 8), np.float32)}),
        (helper.make_node("Add", ["x", "rows"], ["z"]), {"rows": RNG.random((4, 8), np.float32)}),
        (helper.make_node("Where", ["kept", "x", "zero"], ["z"]), {"kept": RNG.random((4, 1)) < 0.5, "zero": np.zeros((), np.float32)}),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_single_ops_keep_their_results(node: onnx.NodeProto, weights: dict[str, np.ndarray]) -> None:
    model = model_of([node, last("z", "y")], ["y"], {**BOUNDS, **weights}, {"x": [2, 4, 8]})
    feeds = {"x": RNG.random((2, 4, 8), np.float32)}
    plain, narrowed = InferenceSession(model, SessionOptions("none")), InferenceSession(model)
    for first in (-1, 0, 2):
        given = {**feeds, "first": np.array([first])}
        np.testing.assert_allclose(narrowed.run(None, given)[0], plain.run(None, given)[0], atol=1e-5)
