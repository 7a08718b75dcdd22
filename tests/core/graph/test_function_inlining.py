"""Functions: the model's own are inlined, and an op that no provider has is replaced by its schema's body."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from onnx import helper, parser

from miniort import InferenceSession, SessionOptions, create_plugin_manager
from miniort.errors import ModelError
from miniort.kernels import KernelTable
from miniort.plugins import PluginManager, hookimpl
from miniort.providers import Availability, ProviderInfo, ProviderOptions

X = np.array([[1, -2, 3], [0.5, 0, -0.25]], np.float32)


def check(proto: onnx.ModelProto, feeds: dict[str, Any] | None = None, expected: list[Any] | None = None) -> None:
    """Both levels give what onnxruntime gives. (The reference evaluator knows no defaults of functions, and no functions in functions.)"""
    feeds = {"x": X} if feeds is None else feeds
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds) if expected is None else expected
    for level in ("none", "all"):
        session = InferenceSession(proto, SessionOptions(graph_optimization_level=level, strict=True))
        for actual, wanted in zip(session.run(None, feeds), expected, strict=True):
            assert actual.dtype == wanted.dtype
            np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-6)


def test_a_function_with_attributes_and_defaults() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x) => (float[2, 3] y, float[2, 3] z) { y = f.Scaled <by = 3.0>(x)  z = f.Scaled(x) }
        <domain: "f", opset_import: ["": 18]>
        Scaled <by: float = 5.0> (a) => (b) { k = Constant <value_float: float = @by>()  b = Mul(a, k) }""")
    check(proto)


def test_functions_in_functions() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x) => (float[2, 3] y) { h = f.Outer <axis = 0>(x)  y = f.Inner <axis = 1>(h) }
        <domain: "f", opset_import: ["": 18, "f": 1]>
        Outer <axis> (a) => (c) { b = f.Inner <axis: int = @axis>(a)  c = Neg(b) }
        <domain: "f", opset_import: ["": 18]>
        Inner <axis> (a) => (b) { b = Softmax <axis: int = @axis>(a) }""")
    check(proto)


def test_a_function_that_hands_on_its_input_and_gives_one_value_twice() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x) => (float[2, 3] p, float[2, 3] q, float[2, 3] r) { p, q, r = f.Same(x) }
        <domain: "f", opset_import: ["": 18]>
        Same (a) => (s, t, u) { s = Identity(a)  t = Neg(a)  u = Identity(t) }""")
    check(proto)


def test_fewer_outputs_than_the_function_has() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x) => (float[2, 3] y, float[2, 3] z) { y = f.Three(x)  unread, , z = f.Three(x) }
        <domain: "f", opset_import: ["": 18]>
        Three (a) => (s, t, u) { s = Neg(a)  t = Exp(a)  u = Abs(a) }""")
    check(proto, expected=[-X, abs(X)])


def test_absent_optional_inputs() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x, float high) => (float[2, 3] y, float[2, 3] z) { y = f.Limit(x, high)  z = f.Limit(x) }
        <domain: "f", opset_import: ["": 18]>
        Limit (a, high) => (b) { b = Clip(a, , high) }""")
    check(proto, {"x": X, "high": np.array(0.5, np.float32)})


def test_a_function_with_a_body_that_reads_its_scope() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x, bool c) => (float[2, 3] y) { d = f.Choose(x, c)  y = f.Choose(d, c) }
        <domain: "f", opset_import: ["": 18]>
        Choose (a, c) => (b) {
            n = Neg(a)
            b = If(c) <then_branch = t () => (p) { p = Add(a, n) }, else_branch = e () => (q) { q = Mul(a, n) }>
        }""")
    for c in (True, False):
        check(proto, {"x": X, "c": np.array(c)})


def test_a_function_that_is_called_in_a_body() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x, bool c) => (float[2, 3] y)
        { y = If(c) <then_branch = t () => (float[2, 3] p) { p = f.Twice(x) }, else_branch = e () => (float[2, 3] q) { q = Neg(x) }> }
        <domain: "f", opset_import: ["": 18]>
        Twice (a) => (b) { b = Add(a, a) }""")
    for c in (True, False):
        check(proto, {"x": X, "c": np.array(c)})


def test_a_function_of_an_older_opset_keeps_its_meaning() -> None:
    """Softmax of opset 11 flattens from axis 1 on; that of 13 is along the last axis. One value goes through both, next to each other."""
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 2, 2] x) => (float[2, 2, 2] y, float[2, 2, 2] z) { y = f.Old(x)  z = Softmax(x) }
        <domain: "f", opset_import: ["": 11]>
        Old (a) => (b) { b = Softmax(a) }""")
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2) / 4
    flat = np.exp(x.reshape(2, 4))
    old = (flat / flat.sum(1, keepdims=True)).reshape(2, 2, 2)
    new = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    for level in ("none", "all"):
        y, z = InferenceSession(proto, SessionOptions(graph_optimization_level=level)).run(None, {"x": x})
        np.testing.assert_allclose(y, old, rtol=1e-6)
        np.testing.assert_allclose(z, new, rtol=1e-6)


def test_shapes_of_an_older_function_are_not_guessed_by_the_models_opset() -> None:
    """Squeeze of opset 11 has its axes as an attribute, which that of 13 doesn't know: it would squeeze all of them."""
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[1, 3, 1] x) => (int64[N] shape, float[M] y)
        { s = f.First(x)  shape = Shape(s)  k = f.First(x)  y = ReduceSum <keepdims = 0>(k) }
        <domain: "f", opset_import: ["": 11]>
        First (a) => (b) { b = Squeeze <axes = [0]>(a) }""")
    for level in ("none", "all"):
        shape, _ = InferenceSession(proto, SessionOptions(graph_optimization_level=level)).run(None, {"x": np.ones((1, 3, 1), np.float32)})
        assert shape.tolist() == [3, 1]


def test_a_function_may_import_what_the_model_does_not() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x) => (float[2, 3] y) <float[3] w = {1, 2, 3}> { v = f.Outer(w)  y = Add(x, v) }
        <domain: "f", opset_import: ["": 18, "inner": 3]>
        Outer (a) => (c) { c = inner.Double(a) }
        <domain: "inner", opset_import: ["": 18]>
        Double (a) => (b) { b = Add(a, a) }""")
    check(proto, expected=[X + np.array([2, 4, 6], np.float32)])


def test_a_function_of_an_unknown_op_is_an_error_that_names_it() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x) => (float[2, 3] y) { y = f.Outer(x) }
        <domain: "f", opset_import: ["": 18, "nowhere": 1]>
        Outer (a) => (c) { c = nowhere.Magic(a) }""")
    from miniort.errors import KernelError

    with pytest.raises(KernelError, match=r"nowhere\.Magic"):
        InferenceSession(proto, SessionOptions(strict=True))


def test_a_function_that_calls_itself() -> None:
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "f": 1]>
        g (float[2, 3] x) => (float[2, 3] y) { y = f.A(x) }
        <domain: "f", opset_import: ["": 18, "f": 1]>
        A (a) => (b) { c = f.A(a)  b = Neg(c) }""")
    with pytest.raises(ModelError, match=r"inline-functions.*Cyclic"):
        InferenceSession(proto)


class FewKernels:
    """A provider `few` that is the CPU's without some ops."""

    def __init__(self, without: set[str]) -> None:
        self._without = without

    @hookimpl
    def miniort_providers(self) -> list[ProviderInfo]:
        return [ProviderInfo("few", 500, lambda: Availability(True, ""), self._open)]

    def _open(self, options: ProviderOptions) -> Any:
        from miniort_cpu.provider import CPUProvider

        provider = CPUProvider(options)
        provider.kernels = KernelTable("few", (kernel for kernel in provider.kernels if kernel.op not in self._without))
        return provider


def few(*without: str) -> PluginManager:
    plugins = create_plugin_manager([])
    plugins.register(FewKernels(set(without)))
    return plugins


F = onnx.TensorProto.FLOAT
RNG = np.random.default_rng(3)


def values(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


EXPANDABLE: dict[str, tuple[list[Any], dict[str, Any], int]] = {
    "Softmax": ([values(2, 3)], {"axis": 0}, 21),
    "LogSoftmax": ([values(2, 3)], {}, 21),
    "Clip": ([values(2, 3), np.float32(-0.5)[...], np.float32(0.5)[...]], {}, 21),
    "LayerNormalization": ([values(2, 3, 4), values(4), values(4)], {"epsilon": 1e-3}, 21),
    "RMSNormalization": ([values(2, 3, 4), values(4)], {}, 24),
    "Gelu": ([values(2, 3)], {"approximate": "tanh"}, 21),
    "GreaterOrEqual": ([values(2, 3), values(2, 3)], {}, 21),
    "LessOrEqual": ([values(2, 3), values(3)], {}, 16),
    "MeanVarianceNormalization": ([values(2, 3, 4, 4)], {}, 21),
    "PRelu": ([values(2, 3), values(3)], {}, 18),
    "LeakyRelu": ([values(2, 3)], {"alpha": 0.2}, 18),
    "Elu": ([values(2, 3)], {}, 21),
    "Selu": ([values(2, 3)], {}, 22),
    "HardSwish": ([values(2, 3)], {}, 21),
    "HardSigmoid": ([values(2, 3)], {}, 22),
    "Softplus": ([values(2, 3)], {}, 22),
    "Softsign": ([values(2, 3)], {}, 22),
    "ReduceSumSquare": ([values(2, 3)], {}, 18),
    "ReduceLogSumExp": ([values(2, 3)], {}, 18),
    "ReduceL2": ([values(2, 3)], {}, 18),
    "Shrink": ([values(2, 3)], {"lambd": 0.3}, 18),
    "Mish": ([values(2, 3)], {}, 22),
    "Swish": ([values(2, 3)], {}, 24),
    "RotaryEmbedding": ([values(1, 2, 3, 8), values(5, 4), values(5, 4), np.array([[0, 1, 2]])], {}, 24),
    "Attention": ([values(1, 2, 3, 4), values(1, 2, 5, 4), values(1, 2, 5, 4)], {"is_causal": 0}, 24),
}


@pytest.mark.parametrize("op", EXPANDABLE)
def test_an_op_that_no_provider_has_is_expanded(op: str) -> None:
    inputs, attributes, opset = EXPANDABLE[op]
    names = [f"x{index}" for index in range(len(inputs))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["h"], **attributes), helper.make_node("Identity", ["h"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in zip(names, inputs, strict=True)
        ],
        [helper.make_tensor_value_info("y", onnx.TensorProto.BOOL if op.endswith("OrEqual") else F, None)],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    feeds = dict(zip(names, inputs, strict=True))
    (expected,) = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    for level in ("none", "all"):
        options = SessionOptions(graph_optimization_level=level, strict=True)
        session = InferenceSession(proto, options, plugins=few(op), providers="few")
        assert op not in [node.op for node in session.explain().nodes]
        assert any(change.graph_pass == "inline-functions" for change in session.explain().changes)
        (actual,) = session.run(None, feeds)
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


def test_bodies_that_call_ops_that_are_expanded_as_well() -> None:
    """Softmax's body depends on types, and stands in a body: types have to be known there as well."""
    x = values(2, 3)
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "f": 1]>
        g (float[2, 3] x) => (float[2, 3] y) { y = f.Outer(x) }
        <domain: "f", opset_import: ["": 21]>
        Outer (a) => (c) { b = LogSoftmax(a)  d = Gelu(b)  c = Clip(d) }""")
    without = ("LogSoftmax", "Softmax", "Gelu", "Clip")
    session = InferenceSession(proto, SessionOptions(strict=True), plugins=few(*without), providers="few")
    assert not {node.op for node in session.explain().nodes} & set(without)
    expected = InferenceSession(proto, providers="cpu").run(None, {"x": x})[0]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5)


def test_an_op_that_a_provider_has_is_not_expanded() -> None:
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Softmax(x) }""")
    assert [node.op for node in InferenceSession(proto).explain().nodes] == ["Softmax"]
