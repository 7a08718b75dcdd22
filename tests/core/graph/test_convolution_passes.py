"""What follows a convolution is folded into its weights or fused with it, and the graph gives what it gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions, WeightStore, load_model
from miniort.graph.convolution_fusion import FUSE_CONVOLUTIONS
from miniort.graph.passes import Level, PassContext, run_passes

SETTINGS = settings(max_examples=30, deadline=None, derandomize=True)
Arrays = dict[str, np.ndarray]


@dataclass
class Graph:
    """A graph of one input `x` [2, 4, 12, 11] that grows node by node."""

    generator: np.random.Generator
    opset: int = 17
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: Arrays = field(default_factory=dict)
    inputs: Arrays = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs["x"] = self.normal(2, 4, 12, 11)

    def normal(self, *shape: int) -> np.ndarray:
        return self.generator.standard_normal(shape).astype(np.float32)

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array, np.float32)
        return name

    def feed(self, array: np.ndarray) -> str:
        name = f"i{len(self.inputs)}"
        self.inputs[name] = array
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def conv(self, x: str, features: int = 6, channels: int = 4, groups: int = 1, kernel: int = 3, bias: bool = True, **more: Any) -> str:
        w = self.constant(self.normal(features, channels // groups, kernel, kernel))
        inputs = [x, w, self.constant(self.normal(features))] if bias else [x, w]
        return self.add("Conv", *inputs, group=groups, **{"pads": [kernel // 2] * 4, **more})

    def batch_normalization(self, x: str, channels: int, constant: bool = True) -> str:
        put = self.constant if constant else self.feed
        names = [put(array) for array in (self.normal(channels), self.normal(channels), self.normal(channels))]
        return self.add("BatchNormalization", x, *names, put(np.abs(self.normal(channels)) + 0.5))

    def model(self) -> onnx.ModelProto:
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in self.inputs.items()]
        outputs = [helper.make_empty_tensor_value_info(name) for name in self.outputs]
        weights = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", values, outputs, weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def ops(self, *outputs: str) -> list[str]:
        """The ops of the optimised graph, which gives what the unoptimised one gives."""
        self.outputs = list(outputs)
        sessions = [InferenceSession(self.model(), SessionOptions(level), providers=["cpu"]) for level in ("none", "all")]
        for wanted, actual in zip(*(session.run(None, self.inputs) for session in sessions), strict=True):
            assert actual.shape == wanted.shape
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(wanted).max())))
        return [node.op for node in sessions[1].explain().nodes]


@pytest.fixture
def graph() -> Graph:
    return Graph(np.random.default_rng(0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_batch_normalization_is_folded(graph: Graph, bias: bool, groups: int) -> None:
    y = graph.batch_normalization(graph.conv("x", groups=groups, bias=bias), 6)
    assert graph.ops(y) == ["Conv"]


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_normalization_is_folded_into_a_transposed_convolution(graph: Graph, groups: int) -> None:
    w = graph.constant(graph.normal(4, 3, 2, 2))
    y = graph.batch_normalization(graph.add("ConvTranspose", "x", w, group=groups, strides=[2, 2]), 3 * groups)
    assert graph.ops(y) == ["ConvTranspose"]


@SETTINGS
@given(st.data())
def test_lines_around_convolutions(data: st.DataObject) -> None:
    """Mul, Div, Add, Sub of numbers and of numbers per channel, before and after, with and without padding, shared or given out."""
    graph = Graph(np.random.default_rng(data.draw(st.integers(0, 99))))
    kernel, groups = data.draw(st.sampled_from([(1, 1), (3, 1), (3, 2), (3, 4)]))

    def line(value: str, channels: int) -> str:
        op, swapped = data.draw(st.sampled_from(["Mul", "Div", "Add", "Sub", "BatchNormalization"])), data.draw(st.booleans())
        if op == "BatchNormalization":
            return graph.batch_normalization(value, channels)
        shape = data.draw(st.sampled_from([(), (1,), (channels, 1, 1), (1, channels, 1, 1), (2, 1, 1, 1), (1, 1, 1, 1, 1)]))
        other = graph.constant(graph.generator.uniform(0.5, 2, shape))
        return graph.add(op, *((other, value) if swapped and op != "Div" else (value, other)))

    value, channels, outputs, rank = "x", 4, [], 4
    for step in range(data.draw(st.integers(2, 5))):
        if step == 1 or data.draw(st.integers(0, 3)) == 0:
            attributes: dict[str, Any] = data.draw(
                st.sampled_from([{"pads": [kernel // 2] * 4}, {"pads": [0] * 4}, {"auto_pad": "VALID"}, {"auto_pad": "SAME_UPPER"}])
            )
            w = graph.constant(graph.normal(8, channels // groups, kernel, kernel))
            value = graph.add("Conv", value, w, group=groups, **attributes)
            channels = 8
        else:
            value = line(value, channels)
            rank = max([rank, *(len(graph.constants[name].shape) for name in graph.nodes[-1].input[:2] if name in graph.constants)])
            if rank > 4:
                break
        if data.draw(st.integers(0, 4)) == 0:
            outputs.append(value)
        if data.draw(st.integers(0, 4)) == 0:
            outputs.append(graph.add("Neg", value))
    graph.ops(*outputs, value) if value not in outputs else graph.ops(*outputs)


@pytest.mark.parametrize("swapped", [False, True])
def test_scales_of_caffe_are_merged(graph: Graph, swapped: bool) -> None:
    """Nothing is constant, so nothing can be folded."""
    axes = numpy_helper.from_array(np.array([1, 2], np.int64), "axes")
    w, value = graph.feed(graph.normal(6, 4, 3, 3)), "x"
    value = graph.batch_normalization(graph.add("Conv", value, w), 6, constant=False)
    graph.nodes.append(helper.make_node("Constant", [], ["axes"], value=axes))
    for op in ("Mul", "Add"):
        other = graph.add("Unsqueeze", graph.feed(graph.normal(6)), "axes")
        value = graph.add(op, *((other, value) if swapped else (value, other)))
    ops = graph.ops(graph.add("Relu", value))
    assert ops == ["Mul", "Mul", "Add", "miniort.FusedConv"]


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1), (1, 1, 1), (4, 12, 1)])
def test_constant_scales_behind_normalization_are_merged(graph: Graph, shape: tuple[int, ...]) -> None:
    value = graph.batch_normalization("x", 4)
    for op in ("Mul", "Add", "Mul"):
        value = graph.add(op, value, graph.constant(graph.normal(*shape)))
    merged = shape in ((4, 1, 1), (1, 4, 1, 1))
    assert graph.ops(graph.add("Relu", value)) == ["BatchNormalization", *(() if merged else ("Mul", "Add", "Mul")), "Relu"]


def test_what_somebody_else_reads_is_not_folded(graph: Graph) -> None:
    convolution = graph.conv("x")
    y = graph.batch_normalization(convolution, 6)
    assert graph.ops(y, convolution) == ["Conv", "BatchNormalization"]


def test_weights_that_two_convolutions_share_are_folded_for_each(graph: Graph) -> None:
    w = graph.constant(graph.normal(4, 4, 1, 1))
    first = graph.batch_normalization(graph.add("Conv", "x", w), 4)
    second = graph.batch_normalization(graph.add("Conv", first, w), 4)
    third = graph.add("Conv", second, w)
    assert graph.ops(third) == ["Conv"] * 3


def test_an_infinite_factor_is_not_folded(graph: Graph) -> None:
    """0 · ∞ in a weight would spoil channels that the graph itself leaves alone."""
    y = graph.add("Mul", graph.conv("x"), graph.constant(np.array([np.inf])))
    graph.outputs = [y]
    assert "Mul" in [node.op for node in InferenceSession(graph.model(), providers=["cpu"]).explain().nodes]


ACTIVATIONS: dict[str, dict[str, float]] = {
    "Relu": {},
    "Sigmoid": {},
    "Tanh": {},
    "HardSwish": {},
    "LeakyRelu": {"alpha": 0.3},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
}


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_activations_are_fused(graph: Graph, op: str) -> None:
    assert graph.ops(graph.add(op, graph.conv("x"), **ACTIVATIONS[op])) == ["miniort.FusedConv"]
    assert graph.ops(graph.add(op, graph.conv("x"))) == ["miniort.FusedConv"]


@pytest.mark.parametrize("bounds", [("", ""), ("low", ""), ("", "high"), ("low", "high")])
def test_clip_is_fused(graph: Graph, bounds: tuple[str, str]) -> None:
    names = [graph.constant(np.array(0.1 if name == "low" else 0.9)) if name else "" for name in bounds]
    assert graph.ops(graph.add("Clip", graph.conv("x"), *names)) == ["miniort.FusedConv"]


def test_swish_is_fused(graph: Graph) -> None:
    convolution = graph.conv("x")
    assert graph.ops(graph.add("Mul", convolution, graph.add("Sigmoid", convolution))) == ["miniort.FusedConv"]


@SETTINGS
@given(st.data())
def test_fusions(data: st.DataObject) -> None:
    """Normalization with given statistics, sums in either order with tensors of all shapes, activations; some values are given out."""
    graph = Graph(np.random.default_rng(data.draw(st.integers(0, 99))))
    groups, features = data.draw(st.sampled_from([(1, 4), (2, 4), (4, 4), (4, 8)]))
    outputs, value = [], graph.conv("x", features, groups=groups, bias=data.draw(st.booleans()))
    for step in ["BatchNormalization", "Add", "activation", "Add"]:
        if data.draw(st.integers(0, 5)) == 0:
            outputs.append(value)
        if not data.draw(st.booleans()):
            continue
        if step == "BatchNormalization":
            value = graph.batch_normalization(value, features, constant=data.draw(st.booleans()))
        elif step == "Add":
            shape = data.draw(st.sampled_from([(2, features, 12, 11), (1, features, 1, 1), (), (1, 12, 11), (3, 2, features, 12, 11)]))
            other = graph.feed(graph.normal(*shape)) if data.draw(st.booleans()) else graph.constant(graph.normal(*shape))
            value = graph.add("Add", *((other, value) if data.draw(st.booleans()) else (value, other)))
        else:
            op = data.draw(st.sampled_from(sorted(ACTIVATIONS)))
            value = graph.add(op, value, **ACTIVATIONS[op])
    graph.ops(*dict.fromkeys([*outputs, value]))


def test_a_residual_sum_is_fused_with_the_later_convolution(graph: Graph) -> None:
    first = graph.conv("x", 4)
    second = graph.conv(graph.add("Relu", first), 4)
    y = graph.add("Relu", graph.add("Add", first, second))
    assert graph.ops(y) == ["Conv", "Relu", "miniort.FusedConv"]


def test_a_convolution_added_to_itself(graph: Graph) -> None:
    convolution = graph.conv("x")
    assert graph.ops(graph.add("Add", convolution, convolution)) == ["Conv", "Add"]


def test_nothing_is_fused_for_a_provider_without_the_op(graph: Graph) -> None:
    graph.outputs = [graph.add("Relu", graph.conv("x"))]
    weights = WeightStore()
    model = load_model(graph.model())
    context = PassContext(lambda op, domain, *_: (op, domain) != ("FusedConv", "miniort"), lambda *_: None, weights, model.opset_imports)
    assert not run_passes(model, [FUSE_CONVOLUTIONS], Level.ALL, context)
    assert [node.op_type for node in model.graph] == ["Conv", "Relu"]
    elsewhere = PassContext(lambda *_: True, lambda *_: None, weights, model.opset_imports, provider_of=lambda node: node.op_type)
    assert not run_passes(model, [FUSE_CONVOLUTIONS], Level.ALL, elsewhere)
    assert [node.op_type for node in model.graph] == ["Conv", "Relu"]


@SETTINGS
@given(st.sampled_from(["Div", "Mul"]), st.sampled_from(["last", "inner"]), st.booleans(), st.booleans(), st.booleans())
def test_hard_swish_in_every_order(scale: str, where: str, swap: bool, swap_sum: bool, attribute: bool) -> None:
    graph = Graph(np.random.default_rng(1), opset=10 if attribute else 17)
    three, factor = graph.constant(np.array([3.0])), graph.constant(np.array(6.0 if scale == "Div" else 1 / 6))
    total = graph.add("Add", *((three, "x") if swap_sum else ("x", three)))
    if attribute:
        value = graph.add("Clip", total, min=0.0, max=6.0)
    else:
        value = graph.add("Clip", total, graph.constant(np.array(0.0)), graph.constant(np.array(6.0)))
    if where == "inner":
        value = graph.add(scale, value, factor)
    value = graph.add("Mul", *((value, "x") if swap else ("x", value)))
    if where == "last":
        value = graph.add(scale, value, factor)
    assert graph.ops(value) == ["HardSwish"]


def test_hard_swish_of_hard_sigmoid(graph: Graph) -> None:
    gate = graph.add("HardSigmoid", "x", alpha=1 / 6, beta=0.5)
    assert graph.ops(graph.add("Mul", "x", gate)) == ["HardSwish"]


def test_hard_sigmoid_of_clip(graph: Graph) -> None:
    total = graph.add("Add", "x", graph.constant(np.array(3.0)))
    clipped = graph.add("Clip", total, graph.constant(np.array(0.0)), graph.constant(np.array(6.0)))
    assert graph.ops(graph.add("Div", clipped, graph.constant(np.array(6.0)))) == ["HardSigmoid"]


@pytest.mark.parametrize(("three", "low", "high", "six"), [(2.9, 0, 6, 6), (3, -1, 6, 6), (3, 0, 5, 6), (3, 0, 6, 5)])
def test_what_is_no_hard_swish_stays(graph: Graph, three: float, low: float, high: float, six: float) -> None:
    total = graph.add("Add", "x", graph.constant(np.array(three)))
    clipped = graph.add("Clip", total, graph.constant(np.array(low)), graph.constant(np.array(high)))
    y = graph.add("Div", graph.add("Mul", "x", clipped), graph.constant(np.array(six)))
    assert "HardSwish" not in graph.ops(y)


def test_a_hard_swish_whose_clip_is_given_out_stays(graph: Graph) -> None:
    total = graph.add("Add", "x", graph.constant(np.array(3.0)))
    clipped = graph.add("Clip", total, graph.constant(np.array(0.0)), graph.constant(np.array(6.0)))
    y = graph.add("Div", graph.add("Mul", "x", clipped), graph.constant(np.array(6.0)))
    assert "HardSwish" not in graph.ops(y, clipped)
