"""Sequences and optionals: positions from either end, errors, types, empty ones, and who owns what comes out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from miniort import InferenceSession
from miniort.errors import RunError
from miniort.types import dtype_to_onnx

A, B, C = (np.full((2, n), n, np.float32) for n in (1, 2, 3))


def value(name, kind):
    return helper.make_value_info(name, kind)


def tensor(dtype=TensorProto.FLOAT):
    return helper.make_tensor_type_proto(dtype, None)


def sequence(dtype=TensorProto.FLOAT):
    return helper.make_sequence_type_proto(tensor(dtype))


@pytest.fixture
def run(cpu_plugins):
    """Runs a model of nodes, {input: (type, value)} and {output: type}, with and without optimisation -> the outputs."""

    def run_model(nodes, inputs, outputs, opset=18, check=True):
        graph = helper.make_graph(
            nodes, "g", [value(name, kind) for name, (kind, _) in inputs.items()], [value(*each) for each in outputs.items()]
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        feed = {name: given for name, (_, given) in inputs.items()}
        results = []
        for level in ("none", "all"):
            from miniort.runtime.session import SessionOptions

            session = InferenceSession(model, SessionOptions(graph_optimization_level=level), ["cpu"], plugins=cpu_plugins)
            results.append(session.run(None, feed))
        if check:
            results.append(ReferenceEvaluator(model).run(None, feed))
            for other in results[1:]:
                for one, two in zip(results[0], other, strict=True):
                    assert_equal(one, two)
        return results[0]

    return run_model


def assert_equal(got, want):
    if isinstance(want, list):
        assert isinstance(got, list)
        assert len(got) == len(want)
        for one, two in zip(got, want, strict=True):
            assert_equal(one, two)
    elif want is None:
        assert got is None
    else:
        want = np.asarray(want)
        assert (got.shape, got.dtype) == (want.shape, want.dtype if want.dtype.kind not in "US" else np.dtype(object))
        assert got.tolist() == want.tolist()


def node(op, inputs, outputs=("y",), **attributes):
    return helper.make_node(op, inputs, outputs, **attributes)


class TestMakingThem:
    def test_construct_and_empty(self, run):
        y = run([node("SequenceConstruct", ["a", "b"])], {"a": (tensor(), A), "b": (tensor(), B)}, {"y": sequence()})[0]
        assert_equal(y, [A, B])
        assert run([node("SequenceEmpty", [], dtype=TensorProto.INT64)], {}, {"y": sequence(TensorProto.INT64)})[0] == []

    def test_every_type(self, run, sample, versions, types_of):
        for dtype in types_of(versions("SequenceConstruct")[0], "T"):
            x, number = sample(dtype, (2,)), dtype_to_onnx(dtype)
            nodes = [node("SequenceConstruct", ["x", "x"], ["s"]), node("SequenceAt", ["s", "i"], ["y"])]
            inputs = {"x": (tensor(number), x), "i": (tensor(TensorProto.INT64), np.array(1))}
            assert_equal(run(nodes, inputs, {"y": tensor(number)}, check=False)[0], x)

    @pytest.mark.parametrize("position", [None, 0, 1, 2, 3, -1, -2, -3])
    @pytest.mark.parametrize("kind", [np.int32, np.int64])
    def test_insert(self, position, kind, run):
        inputs = {"s": (sequence(), [A, B, C]), "x": (tensor(), A + 5)}
        names = ["s", "x"]
        if position is not None:
            inputs["i"] = (tensor(dtype_to_onnx(np.dtype(kind))), np.array(position, kind))
            names.append("i")
        # The reference evaluator takes position n for 0; the specification allows [-n, n].
        y = run([node("SequenceInsert", names)], inputs, {"y": sequence()}, check=position != 3)[0]
        want = [A, B, C]
        want.insert(3 if position is None else position, A + 5)
        assert_equal(y, want)

    @pytest.mark.parametrize("position", [None, 0, 2, -1, -3])
    def test_erase(self, position, run):
        inputs = {"s": (sequence(), [A, B, C])}
        if position is not None:
            inputs["i"] = (tensor(TensorProto.INT64), np.array(position))
        y = run([node("SequenceErase", list(inputs))], inputs, {"y": sequence()})[0]
        want = [A, B, C]
        del want[-1 if position is None else position]
        assert_equal(y, want)

    @pytest.mark.parametrize(("op", "position"), [("SequenceInsert", 4), ("SequenceInsert", -4), ("SequenceErase", 3), ("SequenceAt", -4)])
    def test_a_position_outside(self, op, position, run):
        inputs = {"s": (sequence(), [A, B, C]), "i": (tensor(TensorProto.INT64), np.array(position))}
        names = ["s", "s0", "i"] if op == "SequenceInsert" else ["s", "i"]
        nodes = [node("SequenceAt", ["s", "zero"], ["s0"]), node(op, names)]
        inputs["zero"] = (tensor(TensorProto.INT64), np.array(0))
        with pytest.raises(RunError, match="position in a sequence of 3"):
            run(nodes, inputs, {"y": tensor() if op == "SequenceAt" else sequence()}, check=False)


class TestTakingThemApart:
    @pytest.mark.parametrize("position", [0, 2, -1, -3])
    def test_at_and_length(self, position, run):
        inputs = {"s": (sequence(), [A, B, C]), "i": (tensor(TensorProto.INT32), np.array(position, np.int32))}
        nodes = [node("SequenceAt", ["s", "i"]), node("SequenceLength", ["s"], ["n"])]
        y, n = run(nodes, inputs, {"y": tensor(), "n": tensor(TensorProto.INT64)})
        assert_equal(y, [A, B, C][position])
        assert_equal(n, np.array(3))

    def test_length_of_nothing(self, run):
        assert_equal(run([node("SequenceLength", ["s"])], {"s": (sequence(), [])}, {"y": tensor(TensorProto.INT64)})[0], np.array(0))

    @pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
    def test_concat(self, axis, run):
        xs = [np.arange(6, dtype=np.float32).reshape(2, 3) + n for n in range(3)]
        y = run([node("ConcatFromSequence", ["s"], axis=axis, new_axis=1)], {"s": (sequence(), xs)}, {"y": tensor()})[0]
        assert_equal(y, np.stack(xs, axis))
        if -2 <= axis < 2:
            y = run([node("ConcatFromSequence", ["s"], axis=axis)], {"s": (sequence(), xs)}, {"y": tensor()})[0]
            assert_equal(y, np.concatenate(xs, axis))

    @pytest.mark.parametrize("axis", [0, 1, -1])
    @pytest.mark.parametrize("opset", [11, 24])
    def test_split(self, axis, opset, run):
        x = np.arange(24, dtype=np.float32).reshape(4, 6)
        length = x.shape[axis]
        for split, ends in ((np.array(3), range(3, length, 3)), (np.array([1, length - 1]), [1]), (np.array([0, length]), [0])):
            inputs = {"x": (tensor(), x), "n": (tensor(TensorProto.INT64), split)}
            for keepdims in (0, 1):  # ignored where sizes are given
                y = run([node("SplitToSequence", ["x", "n"], axis=axis, keepdims=keepdims)], inputs, {"y": sequence()}, opset, check=False)[
                    0
                ]
                assert_equal(y, np.split(x, list(ends), axis))
        for keepdims in (0, 1):
            y = run([node("SplitToSequence", ["x"], axis=axis, keepdims=keepdims)], {"x": (tensor(), x)}, {"y": sequence()}, opset)[0]
            assert_equal(y, [part if keepdims else part.squeeze(axis) for part in np.split(x, length, axis)])

    def test_split_of_nothing_and_wrong_sizes(self, run):
        empty = np.zeros((0, 2), np.float32)
        assert run([node("SplitToSequence", ["x"])], {"x": (tensor(), empty)}, {"y": sequence()}, check=False)[0] == []
        inputs = {"x": (tensor(), A), "n": (tensor(TensorProto.INT64), np.array([1, 2]))}
        with pytest.raises(RunError, match="add up"):
            run([node("SplitToSequence", ["x", "n"])], inputs, {"y": sequence()}, check=False)


class TestSequenceMap:
    @staticmethod
    def body(nodes, inputs, outputs):
        return helper.make_graph(nodes, "body", [value(*each) for each in inputs.items()], [value(*each) for each in outputs.items()])

    def test_sequences_tensors_and_the_outer_scope(self, run):
        body = self.body(
            [
                node("Add", ["p", "q"], ["t"]),
                node("Add", ["t", "r"], ["u"]),
                node("Mul", ["u", "outer"], ["v"]),
                node("Identity", ["p"], ["w"]),
            ],
            {"p": tensor(), "q": tensor(), "r": tensor()},
            {"v": tensor(), "w": tensor()},
        )
        inputs = {"s": (sequence(), [A, B]), "t": (sequence(), [A + 1, B + 1]), "x": (tensor(), np.array(10, np.float32))}
        inputs["k"] = (tensor(), np.array(2, np.float32))
        nodes = [node("Neg", ["k"], ["outer"]), node("SequenceMap", ["s", "t", "x"], ["y", "z"], body=body)]
        y, z = run(nodes, inputs, {"y": sequence(), "z": sequence()}, check=False)
        assert_equal(y, [(2 * A + 11) * -2, (2 * B + 11) * -2])
        assert_equal(z, [A, B])

    def test_an_empty_sequence(self, run):
        body = self.body([node("Neg", ["p"], ["v"])], {"p": tensor()}, {"v": tensor()})
        assert run([node("SequenceMap", ["s"], body=body)], {"s": (sequence(), [])}, {"y": sequence()}, check=False)[0] == []

    def test_sequences_of_different_lengths(self, run):
        body = self.body([node("Add", ["p", "q"], ["v"])], {"p": tensor(), "q": tensor()}, {"v": tensor()})
        inputs = {"s": (sequence(), [A, B]), "t": (sequence(), [A])}
        with pytest.raises(RunError, match="one length"):
            run([node("SequenceMap", ["s", "t"], body=body)], inputs, {"y": sequence()}, check=False)


class TestOptional:
    OPTIONAL = staticmethod(lambda kind: helper.make_optional_type_proto(kind))

    @pytest.mark.parametrize("opset", [15, 18, 28])
    def test_a_value(self, opset, run):
        nodes = [node("Optional", ["x"], ["o"]), node("OptionalHasElement", ["o"], ["h"]), node("OptionalGetElement", ["o"], ["y"])]
        # The reference evaluator wraps an optional's value in a list, and never unwraps it: it can't be asked.
        h, y = run(nodes, {"x": (tensor(), A)}, {"h": tensor(TensorProto.BOOL), "y": tensor()}, opset, check=False)
        assert_equal(h, np.array(True))
        assert_equal(y, A)
        h, y = run(nodes, {"x": (sequence(), [A, B])}, {"h": tensor(TensorProto.BOOL), "y": sequence()}, opset, check=False)
        assert_equal(y, [A, B])

    @pytest.mark.parametrize("opset", [15, 18, 28])
    def test_no_value(self, opset, run):
        nodes = [node("Optional", [], ["o"], type=tensor()), node("OptionalHasElement", ["o"], ["h"])]
        assert_equal(run(nodes, {}, {"h": tensor(TensorProto.BOOL)}, opset, check=False)[0], np.array(False))
        inputs = {"o": (self.OPTIONAL(tensor()), None)}
        assert_equal(run(nodes[1:], inputs, {"h": tensor(TensorProto.BOOL)}, opset, check=False)[0], np.array(False))
        with pytest.raises(RunError, match="needs a value"):
            run([node("OptionalGetElement", ["o"])], inputs, {"y": tensor()}, opset, check=False)

    def test_no_input_at_all(self, run):
        for names in ([], [""]):
            y = run([node("OptionalHasElement", names)], {}, {"y": tensor(TensorProto.BOOL)}, 18, check=False)[0]
            assert_equal(y, np.array(False))

    def test_optional_of_a_sequence(self, run):
        inputs = {"o": (self.OPTIONAL(sequence()), [A, B])}
        nodes = [node("OptionalGetElement", ["o"], ["s"]), node("SequenceLength", ["s"])]
        assert_equal(run(nodes, inputs, {"y": tensor(TensorProto.INT64)}, 18)[0], np.array(2))

    def test_an_optional_as_it_is(self, run):
        kind = self.OPTIONAL(tensor(TensorProto.BFLOAT16))
        x = np.ones(2, ml_dtypes.bfloat16)
        for given in (x, None):
            y = run([node("Identity", ["o"])], {"o": (kind, given)}, {"y": kind}, 16, check=False)[0]
            assert y is None if given is None else np.array_equal(y, x)


def test_what_comes_out_belongs_to_the_caller(cpu_plugins):
    """Feeds and weights stay as they are, however what came out is written into."""
    weight = onnx.numpy_helper.from_array(B, "w")
    nodes = [
        node("SequenceConstruct", ["x", "w"], ["s"]),
        node("SequenceAt", ["s", "i"], ["y"]),
        node("SequenceInsert", ["s", "x"], ["t"]),
        node("SplitToSequence", ["x"], ["u"], axis=1),
        node("SequenceErase", ["t"], ["v"]),
        node("Optional", ["x"], ["o"]),
    ]
    outputs = {
        "s": sequence(),
        "y": tensor(),
        "t": sequence(),
        "u": sequence(),
        "v": sequence(),
        "o": helper.make_optional_type_proto(tensor()),
    }
    inputs = [value("x", tensor()), value("i", tensor(TensorProto.INT64))]
    graph = helper.make_graph(nodes, "g", inputs, [value(*each) for each in outputs.items()], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = InferenceSession(model, providers=["cpu"], plugins=cpu_plugins)
    x, feed = A.copy(), {"i": np.array(1)}
    first = session.run(None, feed | {"x": x})
    want = [[np.array(item) for item in each] if isinstance(each, list) else np.array(each) for each in first]
    for each in first:
        for array in each if isinstance(each, list) else [each]:
            array.fill(-1)
    assert_equal(x, A)
    assert_equal(session.run(None, feed | {"x": x}), want)
