"""Constant folding: what is the same in every run is computed when the session is built."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions
from miniort.kernels import ANY_PROVIDER, Kernel
from miniort.runtime.observers import ValueRecorder


def session(text: str, level: str = "all", **options: object) -> InferenceSession:
    header = '<ir_version: 10, opset_import: ["": 18, "test": 1]>'
    return InferenceSession(parser.parse_model(header + text), SessionOptions(graph_optimization_level=level), **options)  # type: ignore[arg-type]


def ops(built: InferenceSession) -> list[str]:
    return [node.op for node in built.explain().nodes]


X = {"x": np.array([1, 2], np.float32)}


def test_a_chain_of_constants_is_folded() -> None:
    built = session("""g (float[2] x) => (float[2] y) <float[2] a = {1, 2}>
        { b = Neg(a)  k = Constant <value_floats = [3.0, 4.0]>()  c = Mul(b, k)  y = Add(x, c) }""")
    assert ops(built) == ["Add"]
    assert built.run(None, X)[0].tolist() == [-2, -6]
    changes = {(change.graph_pass, change.node) for change in built.explain().changes}
    assert changes >= {("fold-constants", "Neg_0"), ("fold-constants", "Mul_0")}


def test_nothing_but_required_passes_without_optimisation() -> None:
    built = session("g (float[2] x) => (float[2] y) <float[2] a = {1, 2}> { b = Neg(a)  y = Add(x, b) }", "none")
    assert ops(built) == ["Neg", "Add"]


def test_a_default_of_an_input_is_no_constant() -> None:
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[2] x, float[2] a) => (float[2] y) <float[2] a = {1, 2}> { b = Neg(a)  y = Add(x, b) }""")
    built = InferenceSession(proto)
    assert ops(built) == ["Neg", "Add"]
    assert built.run(None, {**X, "a": np.array([5, 5], np.float32)})[0].tolist() == [-4, -3]


def test_the_shape_of_a_value_of_fixed_shape() -> None:
    text = "g (float[{n}, 3] x) => (int64[2] y, int64[1] z) {{ h = Relu(x)  y = Shape(h)  z = Shape <start = -1, end = 9>(h) }}"
    fixed = session(text.format(n=2))
    assert ops(fixed) == ["Identity", "Identity"]
    assert [output.tolist() for output in fixed.run(None, {"x": np.zeros((2, 3), np.float32)})] == [[2, 3], [3]]
    open_ended = session(text.format(n="N"))
    assert "Shape" in ops(open_ended)
    for n in (0, 5):
        assert [output.tolist() for output in open_ended.run(None, {"x": np.zeros((n, 3), np.float32)})] == [[n, 3], [3]]


@pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
def test_what_is_random_stays_and_is_not_merged(op: str) -> None:
    attributes = "" if op == "Bernoulli" else "<dtype = 1>"
    built = session(f"g () => (float[64] y, float[64] z) <float p = {{0.5}}, int64[1] s = {{64}}> "
                    f"{{ e = Expand(p, s)  y = {op} {attributes}(e)  z = {op} {attributes}(e) }}")  # fmt: skip
    assert sum(each == op or each.startswith("Random") for each in ops(built)) == 2


def test_random_generators_without_inputs_are_not_merged() -> None:
    built = session("g () => (float[8] y, float[8] z) { y = RandomNormal <shape = [8]>()  z = RandomNormal <shape = [8]>() }")
    assert ops(built) == ["RandomNormal", "RandomNormal"]


def test_dropout_in_training_is_random() -> None:
    built = session("""g (float[64] x) => (float[64] y, float[64] z) <float r = {0.5}, bool t = {1}>
        { y = Dropout(x, r, t)  z = Dropout(x, r, t) }""")
    assert ops(built) == ["Dropout", "Dropout"]


def test_a_huge_result_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miniort.graph.folding.SMALL", 1 << 20)
    text = "g (float[1] x) => (float[{n}] y) <float one = {{1}}, int64[1] s = {{{n}}}> {{ e = Expand(one, s)  y = Add(x, e) }}"
    assert ops(session(text.format(n=1000))) == ["Add"]
    huge = session(text.format(n=1 << 19))
    assert ops(huge) == ["Expand", "Add"]
    assert huge.weights.nbytes < 1 << 20
    assert huge.run(None, {"x": X["x"][:1]})[0].sum() == 2 << 19


def test_a_large_result_of_large_weights_is_kept() -> None:
    weight = np.ones((512, 1024), np.float32)
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 1024] x) => (float[N, 512] y) { t = Transpose(w)  y = MatMul(x, t) }""")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    assert ops(InferenceSession(proto)) == ["MatMul"]


def test_a_folded_graph_output_keeps_its_name_and_type() -> None:
    built = session("""g (float[2] x) => (float[2] y, double[M] folded, float[2] z) <double[2] a = {1, 2}>
        { y = Relu(x)  folded = Neg(a)  t = Cast <to = 1>(folded)  z = Add(x, t) }""")
    types = [(each.name, each.type) for each in built.get_outputs()]
    assert types == [("y", "tensor(float)"), ("folded", "tensor(double)"), ("z", "tensor(float)")]
    y, folded, z = built.run(None, X)
    assert (y.tolist(), folded.tolist(), z.tolist()) == ([1, 2], [-1, -2], [0, 0])
    assert folded.dtype == np.float64
    folded[:] = 9
    assert built.run(["folded"], X)[0].tolist() == [-1, -2]


def test_how_many_outputs_a_node_has_may_decide_what_they_are() -> None:
    """Split without sizes: into as many equal parts as it has outputs. Twice over one constant."""
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 11]>
        g (float[1] x) => (float[N] p, float[M] q) <float[6] w = {1, 2, 3, 4, 5, 6}>
        { a, b = Split(w)  c, d, e = Split(w)  p = Add(x, a)  q = Add(x, c) }""")
    for level in ("none", "all"):
        built = InferenceSession(proto, SessionOptions(graph_optimization_level=level))
        assert [output.tolist() for output in built.run(None, {"x": np.zeros(1, np.float32)})] == [[1, 2, 3], [1, 2]]


def test_a_node_that_fails_is_left_for_the_run() -> None:
    built = session("g (float[2] x) => (float[2] y) <float[2] a = {1, 2}, int64[1] s = {7}> { b = Reshape(a, s)  y = Add(x, b) }")
    assert ops(built) == ["Reshape", "Add"]


def test_an_op_without_a_kernel_is_left() -> None:
    built = session("g (float[2] x) => (float[2] y) <float[2] a = {1, 2}> { b = test.Own(a)  y = Add(x, b) }")
    assert ops(built) == ["test.Own", "Add"]


def test_own_kernels_fold() -> None:
    kernel = Kernel(ANY_PROVIDER, "Own", "test", 1, None, lambda node: lambda a: a * node.attribute("factor"))
    built = session(
        """g (float[2] x) => (float[2] y) <float[2] a = {1, 2}>
        { b = test.Own <factor = 2.0>(a)  c = test.Own <factor = 3.0>(a)  d = Add(b, c)  y = Add(x, d) }""",
        kernels=[kernel],
    )
    assert ops(built) == ["Add"]
    assert built.run(None, X)[0].tolist() == [6, 12]


def test_bodies_are_folded_too() -> None:
    built = session("""g (float[2] x, bool c) => (float[2] y) <float[2] a = {1, 2}> {
        y = If(c) <then_branch = t () => (float[2] p) { n = Neg(a)  p = Add(x, n) },
                   else_branch = e () => (float[2] q) { k = Constant <value_floats = [7.0, 8.0]>()  q = Neg(k) }>
    }""")
    assert sorted(ops(built)) == ["Add", "Identity", "If"]
    assert built.run(None, {**X, "c": np.array(True)})[0].tolist() == [0, 0]
    assert built.run(None, {**X, "c": np.array(False)})[0].tolist() == [-7, -8]


def test_values_keep_their_names() -> None:
    built = session("""g (float[2] x) => (float[2] y) <float[2] a = {1, 2}>
        { negated = Neg(a)  k = Constant <value_float = 2.0>()  m = Mul(x, k)  y = Add(m, negated) }""")
    recorder = ValueRecorder(["negated", "k"])
    built.observe(recorder).run(None, X)
    assert recorder.values["negated"].tolist() == [-1, -2]
    assert recorder.values["k"] == 2
