"""On random graphs the optimised model gives what the unoptimised one gives, to the bit where nothing is raised, and what
onnxruntime gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from miniort import InferenceSession, SessionOptions
from miniort.plugins import PluginManager

UNARY = ["Neg", "Abs", "Tanh", "Relu", "Identity", "Identity"]
BINARY = ["Add", "Sub", "Mul", "Max"]
OPSETS = [13, 17, 21]


@dataclass
class Builder:
    """A graph that grows: its nodes, its float values with the shapes that they have with the feeds, and its vectors of sizes."""

    draw: Any
    prefix: str = ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    floats: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ints: dict[str, int] = field(default_factory=dict)  # vectors of int64, by length
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    names: list[int] = field(default_factory=lambda: [0])

    def fresh(self) -> str:
        self.names[0] += 1
        return f"{self.prefix}v{self.names[0]}"

    def pick(self, shapes: dict[str, Any]) -> str:
        return str(self.draw(st.sampled_from(sorted(shapes))))

    def add(self, op: str, inputs: list[str], shape: tuple[int, ...], **attributes: Any) -> str:
        out = self.fresh()
        self.nodes.append(helper.make_node(op, inputs, [out], **attributes))
        self.floats[out] = shape
        return out

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """An initializer or a Constant node."""
        out = self.fresh()
        if self.draw(st.booleans()):
            self.initializers.append(numpy_helper.from_array(array, out))
        else:
            self.nodes.append(helper.make_node("Constant", [], [out], value=numpy_helper.from_array(array)))
        return out

    def float_constant(self) -> None:
        shape = self.draw(st.sampled_from([(), (1,), (2,), (3,), (2, 3), (1, 3), (3, 1)]))
        seed = self.draw(st.integers(0, 3))  # few, so that equal ones happen
        self.floats[self.constant(np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32))] = shape

    def unary(self) -> None:
        x = self.pick(self.floats)
        self.add(self.draw(st.sampled_from(UNARY)), [x], self.floats[x])

    def binary(self) -> None:
        x = self.pick(self.floats)
        fitting = {name: shape for name, shape in self.floats.items() if broadcast(self.floats[x], shape) is not None}
        y = self.pick(fitting)
        shape = broadcast(self.floats[x], fitting[y])
        assert shape is not None
        if int(np.prod(shape)) <= 64:
            self.add(self.draw(st.sampled_from(BINARY)), [x, y], shape)

    def chosen(self) -> None:
        """The elements of two values where one is less than the other."""
        x = self.pick(self.floats)
        y = self.pick({name: shape for name, shape in self.floats.items() if broadcast(self.floats[x], shape) is not None})
        shape = broadcast(self.floats[x], self.floats[y])
        assert shape is not None
        if int(np.prod(shape)) <= 64:
            less = self.fresh()
            self.nodes.append(helper.make_node("Less", [x, y], [less]))
            self.add("Where", [less, x, y], shape)

    def chain(self) -> None:
        """Elementwise ops one behind the other. Others may read what is between, or it may be an output."""
        x = self.pick(self.floats)
        for _ in range(self.draw(st.integers(2, 5))):
            y = self.pick({name: shape for name, shape in self.floats.items() if broadcast(self.floats[x], shape) is not None})
            shape = broadcast(self.floats[x], self.floats[y])
            assert shape is not None
            if int(np.prod(shape)) <= 64 and self.draw(st.booleans()):
                x = self.add(self.draw(st.sampled_from(BINARY)), [x, y], shape)
            else:
                x = self.add(self.draw(st.sampled_from(UNARY)), [x], self.floats[x])

    def again(self) -> None:
        """An equal node once more."""
        node = self.draw(st.sampled_from([node for node in self.nodes if len(node.output) == 1] or [None]))
        if node is not None and node.op_type not in ("If", "Loop", "Constant") and node.output[0] in self.floats:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.output[0] = self.fresh()
            self.nodes.append(copy)
            self.floats[copy.output[0]] = self.floats[node.output[0]]

    def transpose(self) -> None:
        x = self.pick({name: shape for name, shape in self.floats.items() if shape} or {"": None})
        if not x:
            return
        order = self.draw(st.permutations(range(len(self.floats[x]))))
        self.add("Transpose", [x], tuple(self.floats[x][axis] for axis in order), perm=order)

    def flatten(self) -> None:
        x = self.pick(self.floats)
        self.add("Reshape", [x, self.constant(np.array([-1]))], (int(np.prod(self.floats[x], dtype=int)),))

    def unsqueeze(self) -> None:
        x = self.pick(self.floats)
        if len(self.floats[x]) < 3:
            self.add("Unsqueeze", [x, self.constant(np.array([0]))], (1, *self.floats[x]))

    def concat(self) -> None:
        x = self.pick(self.floats)
        shape = self.floats[x]
        if shape and int(np.prod(shape)) <= 32:
            self.add("Concat", [x, x], (shape[0] * 2, *shape[1:]), axis=0)

    def shape_of(self) -> None:
        x = self.pick(self.floats)
        out = self.fresh()
        self.nodes.append(helper.make_node("Shape", [x], [out]))
        self.ints[out] = len(self.floats[x])

    def reshape_by_computed_shape(self) -> None:
        """Reshape(x, Concat(Slice(Shape(x)), [-1])): what exporters write to flatten the last axes."""
        x = self.pick(self.floats)
        shape = self.floats[x]
        if len(shape) < 2:
            return
        whole, first, target = self.fresh(), self.fresh(), self.fresh()
        bounds = [self.constant(np.array([0])), self.constant(np.array([1]))]
        rest = self.constant(np.array([-1]))
        self.nodes += [
            helper.make_node("Shape", [x], [whole]),
            helper.make_node("Slice", [whole, *bounds], [first]),
            helper.make_node("Concat", [first, rest], [target], axis=0),
        ]
        self.ints[target] = 2
        self.add("Reshape", [x, target], (shape[0], int(np.prod(shape[1:]))))

    def sizes_as_floats(self) -> None:
        if self.ints:
            name = self.pick(self.ints)
            self.add("Cast", [name], (self.ints[name],), to=TensorProto.FLOAT)

    def number(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def swish(self) -> None:
        """The parts of what passes raise: each may be read by others, or be an output."""
        x = self.pick(self.floats)
        shape = self.floats[x]
        self.add("Mul", [x, self.add("Sigmoid", [x], shape)], shape)

    def gelu(self) -> None:
        x = self.pick(self.floats)
        shape = self.floats[x]
        inner = self.add("Erf", [self.add("Div", [x, self.number(2**0.5)], shape)], shape)
        outer = self.add("Mul", [x, self.add("Add", [inner, self.number(1.0)], shape)], shape)
        self.add("Mul", [outer, self.number(0.5)], shape)

    def normalize(self) -> None:
        """x / √(mean of x² + epsilon) over all of x, put into rows of one."""
        x = self.pick(self.floats)
        size = int(np.prod(self.floats[x], dtype=int))
        row = self.add("Reshape", [x, self.constant(np.array([1, 1, size]))], (1, 1, size))
        mean = self.add("ReduceMean", [self.add("Mul", [row, row], (1, 1, size))], (1, 1, 1), keepdims=1)
        root = self.add("Sqrt", [self.add("Add", [mean, self.number(1e-3)], (1, 1, 1))], (1, 1, 1))
        self.add("Mul", [self.add("Div", [row, root], (1, 1, size)), self.number(0.75)], (1, 1, size))

    def products(self) -> None:
        """Two products of one value with constant matrices."""
        x = self.pick({name: shape for name, shape in self.floats.items() if len(shape) >= 2} or {"": None})
        if x:
            for width in (2, 3):
                shape = self.floats[x]
                weight = np.random.default_rng(width).uniform(-1, 1, (shape[-1], width)).astype(np.float32)
                self.add("MatMul", [x, self.constant(weight)], (*shape[:-1], width))

    def attend(self) -> None:
        """Attention of one head: rows of [rows, width] to each other."""
        x = self.pick({name: shape for name, shape in self.floats.items() if len(shape) == 2} or {"": None})
        if not x:
            return
        rows, width = self.floats[x]
        four = self.add("Reshape", [x, self.constant(np.array([1, 1, rows, width]))], (1, 1, rows, width))
        turned = self.add("Transpose", [four], (1, 1, width, rows), perm=[0, 1, 3, 2])
        scores = self.add("Mul", [self.add("MatMul", [four, turned], (1, 1, rows, rows)), self.number(0.5)], (1, 1, rows, rows))
        weights = self.add("Softmax", [scores], (1, 1, rows, rows), axis=-1)
        self.add("MatMul", [weights, four], (1, 1, rows, width))

    def body(self, tag: str, floats: dict[str, tuple[int, ...]], result: tuple[int, ...]) -> tuple[Builder, str]:
        """A few nodes that read this graph's values, and one of the wanted shape at the end."""
        inner = Builder(self.draw, f"{self.prefix}{tag}", floats={**self.floats, **floats}, names=self.names)
        for _ in range(self.draw(st.integers(0, 3))):
            self.draw(st.sampled_from([Builder.unary, Builder.binary, Builder.float_constant, Builder.transpose]))(inner)
        x = inner.pick({name: shape for name, shape in inner.floats.items() if shape == result})
        return inner, inner.add(self.draw(st.sampled_from(UNARY)), [x], result)

    def if_(self, condition: str) -> None:
        shape = self.floats[self.pick(self.floats)]
        graphs = []
        for tag in ("t", "e"):
            inner, out = self.body(tag, {}, shape)
            graphs.append(helper.make_graph(inner.nodes, tag, [], [float_info(out)], inner.initializers))
        self.add("If", [condition], shape, then_branch=graphs[0], else_branch=graphs[1])

    def loop(self) -> None:
        x = self.pick(self.floats)
        shape = self.floats[x]
        tag = self.fresh()
        carried, going, still = f"{tag}c", f"{tag}g", f"{tag}s"
        inner, out = self.body(f"{tag}b", {carried: shape}, shape)
        inner.nodes.append(helper.make_node("Identity", [going], [still]))
        graph = helper.make_graph(
            inner.nodes,
            "body",
            [
                helper.make_tensor_value_info(f"{tag}i", TensorProto.INT64, []),
                helper.make_tensor_value_info(going, TensorProto.BOOL, []),
                float_info(carried),
            ],
            [helper.make_tensor_value_info(still, TensorProto.BOOL, []), float_info(out)],
            inner.initializers,
        )
        trips = self.constant(np.array(self.draw(st.integers(0, 3))))
        self.add("Loop", [trips, "", x], shape, body=graph)


def float_info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        return None


PATTERNS = [Builder.swish, Builder.gelu, Builder.normalize, Builder.products, Builder.attend]
"""What passes raise to one op, which rounds in other places."""


@st.composite
def models(draw: Any, patterns: bool = False, chains: bool = False) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A valid model, and feeds for it.

    patterns: also with what is raised, whose parts may have other readers. chains: mostly of elementwise ops.
    """
    build = Builder(draw)
    feeds: dict[str, Any] = {"c": np.array(draw(st.booleans()))}
    infos = [helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    for index in range(draw(st.integers(1, 3))):
        name = f"x{index}"
        shapes = st.sampled_from([(2, 3), (2, 3), (1, 3), (4, 2, 3), (4, 2, 1)]) if chains else st.lists(st.integers(1, 3), max_size=3)
        shape = tuple(draw(shapes))
        declared = [size if draw(st.booleans()) else f"{name}_{axis}" for axis, size in enumerate(shape)]
        infos.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, declared))
        feeds[name] = np.random.default_rng(index).uniform(-1, 1, shape).astype(np.float32)
        build.floats[name] = shape
    steps = [
        Builder.unary,
        Builder.unary,
        Builder.binary,
        Builder.binary,
        Builder.again,
        Builder.float_constant,
        Builder.transpose,
        Builder.flatten,
        Builder.unsqueeze,
        Builder.concat,
        Builder.shape_of,
        Builder.reshape_by_computed_shape,
        Builder.sizes_as_floats,
        Builder.loop,
        lambda graph: graph.if_("c"),
        *(PATTERNS * 2 if patterns else []),
        *([Builder.chain, Builder.chain, Builder.chosen] * 5 if chains else []),
    ]
    for _ in range(draw(st.integers(2, 14))):
        draw(st.sampled_from(steps))(build)
    computed = [name for node in build.nodes for name in node.output if name in build.floats or name in build.ints]
    if not computed:
        computed = [build.add("Neg", ["x0"], build.floats["x0"])]
    outputs = draw(st.lists(st.sampled_from(computed), min_size=1, max_size=4, unique=True))
    output_infos = [
        float_info(name) if name in build.floats else helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in outputs
    ]
    graph = helper.make_graph(build.nodes, "random", infos, output_infos, build.initializers)
    opset = draw(st.sampled_from(OPSETS))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), feeds


def check(case: tuple[onnx.ModelProto, dict[str, Any]], tolerance: float = 0.0, plugins: PluginManager | None = None) -> None:
    proto, feeds = case
    plain, optimised = (InferenceSession(proto, SessionOptions(level, strict=True), plugins=plugins) for level in ("none", "all"))
    assert [(each.name, each.type) for each in optimised.get_outputs()] == [(each.name, each.type) for each in plain.get_outputs()]
    assert [(each.name, each.type) for each in optimised.get_inputs()] == [(each.name, each.type) for each in plain.get_inputs()]
    expected = plain.run(None, feeds)
    for _ in range(2):
        for name, wanted, actual in zip([each.name for each in plain.get_outputs()], expected, optimised.run(None, feeds), strict=True):
            assert actual.dtype == wanted.dtype, name
            assert actual.shape == wanted.shape, name
            np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance, err_msg=name)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    reference = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    used = {each.name for each in reference.get_inputs()}
    for wanted, actual in zip(reference.run(None, {name: feeds[name] for name in used}), expected, strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, rtol=max(1e-5, tolerance), atol=max(1e-5, tolerance))


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=CHECKS)
@given(models())
def test_random_graphs(case: tuple[onnx.ModelProto, dict[str, Any]]) -> None:
    check(case)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=CHECKS)
@given(models())
def test_very_many_random_graphs(case: tuple[onnx.ModelProto, dict[str, Any]]) -> None:
    check(case)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=CHECKS, phases=[Phase.generate])
@given(models(patterns=True))
def test_random_graphs_with_what_is_raised(case: tuple[onnx.ModelProto, dict[str, Any]]) -> None:
    check(case, 1e-4)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=CHECKS)
@given(models(patterns=True))
def test_very_many_random_graphs_with_what_is_raised(case: tuple[onnx.ModelProto, dict[str, Any]]) -> None:
    check(case, 1e-4)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=CHECKS)
@given(models(chains=True))
def test_random_graphs_with_chains_that_are_fused(chains: PluginManager, case: tuple[onnx.ModelProto, dict[str, Any]]) -> None:
    check(case, 1e-6, chains)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=CHECKS)
@given(models(patterns=True, chains=True))
def test_very_many_random_graphs_with_chains_that_are_fused(chains: PluginManager, case: tuple[onnx.ModelProto, dict[str, Any]]) -> None:
    check(case, 1e-4, chains)
