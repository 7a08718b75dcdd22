"""`Gradient`: against differences of the graph's own results, for every rule, with values other than the graph's, and twice."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from miniort import InferenceSession
from miniort.errors import ModelError
from miniort.runtime.session import SessionOptions

DOUBLE = TensorProto.DOUBLE


def node(op, inputs, outputs=("y",), **attributes):
    return helper.make_node(op, inputs, list(outputs), **attributes)


def gradient(names, target, outputs, values=None, others=()):
    zs = {"zs": list(others)} if others else {}
    return helper.make_node(
        "Gradient", values or [*names, *others], outputs, domain="ai.onnx.preview.training", xs=list(names), y=target, **zs
    )


def session_of(nodes, inputs, outputs, plugins, opset=18, level="all"):
    infos = [helper.make_tensor_value_info(name, DOUBLE, x.shape) for name, x in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info(name, DOUBLE, None) for name in outputs])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.preview.training", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    return InferenceSession(model, SessionOptions(graph_optimization_level=level), providers=["cpu"], plugins=plugins)


def differences(run, inputs, name):
    """The gradient of the sum of run(inputs) by central differences."""
    x, step = inputs[name], 1e-5
    result = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        sums = []
        for sign in (1, -1):
            moved = x.copy()
            moved[place] += sign * step
            sums.append(run(inputs | {name: moved}).sum())
        result[place] = (sums[0] - sums[1]) / (2 * step)
    return result


def sample(shape, seed):
    return np.random.default_rng(seed).uniform(0.5, 2, shape)


AXES = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
CASES = {
    "Add": ([node("Add", ["a", "b"])], {"a": (2, 3), "b": (3,)}),
    "Sub": ([node("Sub", ["a", "b"])], {"a": (2, 1), "b": (3, 2, 4)}),
    "Mul": ([node("Mul", ["a", "b"])], {"a": (2, 3), "b": ()}),
    "Div": ([node("Div", ["a", "b"])], {"a": (1, 3), "b": (2, 1)}),
    "Sum": ([node("Sum", ["a", "b", "a"])], {"a": (2, 3), "b": (1,)}),
    "MatMul": ([node("MatMul", ["a", "b"])], {"a": (2, 3), "b": (3, 4)}),
    "batches": ([node("MatMul", ["a", "b"])], {"a": (2, 2, 3), "b": (2, 3, 1)}),
    "Transpose": ([node("Transpose", ["a"], ["t"], perm=[2, 0, 1]), node("Mul", ["t", "b"])], {"a": (2, 3, 4), "b": (4, 2, 3)}),
    "reversed": ([node("Transpose", ["a"], ["t"]), node("Mul", ["t", "b"])], {"a": (2, 3), "b": (3, 2)}),
    "Flatten": ([node("Flatten", ["a"], ["t"]), node("Mul", ["t", "b"])], {"a": (2, 3, 2), "b": (2, 6)}),
    "ReduceSum": ([node("ReduceSum", ["a"], ["t"]), node("Mul", ["t", "a"])], {"a": (2, 3)}),
    "ReduceMean": ([node("Mul", ["a", "a"], ["t"]), node("ReduceMean", ["t"], keepdims=0)], {"a": (2, 3)}),
    "axes": (
        [node("Constant", [], ["axes"], value=AXES), node("Exp", ["a"], ["t"]), node("ReduceMean", ["t", "axes"])],
        {"a": (2, 3)},
    ),
    "chain": ([node("Tanh", ["a"], ["t"]), node("Mul", ["t", "a"], ["u"]), node("Add", ["u", "t"])], {"a": (2, 3)}),
}
for unary in ("Neg", "Identity", "Exp", "Log", "Sqrt", "Sin", "Cos", "Abs", "Relu", "Sigmoid", "Tanh"):
    CASES[unary] = ([node(unary, ["a"])], {"a": (2, 3)})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", ["none", "all"])
def test_against_differences(name, level, plugins):
    nodes, shapes = CASES[name]
    inputs = {
        key: np.array(sample(shape, seed) - (0.9 if name in ("Relu", "Abs") else 0)) for seed, (key, shape) in enumerate(shapes.items())
    }
    plain = session_of(nodes, inputs, ["y"], plugins)
    outputs = [f"d{key}" for key in inputs]
    session = session_of([*nodes, gradient(inputs, "y", outputs)], inputs, ["y", *outputs], plugins, level=level)
    y, *got = session.run(None, inputs)
    np.testing.assert_array_equal(y, plain.run(None, inputs)[0])
    for key, found in zip(inputs, got, strict=True):
        want = differences(lambda values: plain.run(None, values)[0], inputs, key)
        assert found.shape == want.shape
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-8)


def test_opset_12_reduces_by_attributes(plugins):
    inputs = {"a": sample((2, 3), 0), "b": sample((3,), 1)}
    session = session_of([node("Mul", ["a", "b"]), gradient(["b"], "y", ["d"])], inputs, ["d"], plugins, opset=12)
    np.testing.assert_allclose(session.run(None, inputs)[0], inputs["a"].sum(0))


def test_what_is_named_is_taken_as_independent(plugins):
    """The gradient by an intermediate value, at another one's value."""
    nodes = [node("Exp", ["a"], ["h"]), node("Mul", ["h", "h"], ["y"]), gradient(["h"], "y", ["dh"]), gradient(["h"], "y", ["de"], ["b"])]
    inputs = {"a": sample((3,), 0), "b": sample((3,), 1)}
    at_h, at_b = session_of(nodes, inputs, ["dh", "de"], plugins).run(None, inputs)
    np.testing.assert_allclose(at_h, 2 * np.exp(inputs["a"]))
    np.testing.assert_allclose(at_b, 2 * inputs["b"])


def test_what_does_not_depend(plugins):
    nodes = [node("Exp", ["a"]), gradient(["a", "b"], "y", ["da", "db"])]
    inputs = {"a": sample((2,), 0), "b": sample((3,), 1)}
    da, db = session_of(nodes, inputs, ["da", "db"], plugins).run(None, inputs)
    np.testing.assert_allclose(da, np.exp(inputs["a"]))
    np.testing.assert_array_equal(db, np.zeros(3))


def test_twice(plugins):
    nodes = [node("Mul", ["a", "a"], ["t"]), node("Mul", ["t", "a"], ["y"]), gradient(["a"], "y", ["d"]), gradient(["a"], "d", ["dd"])]
    inputs = {"a": sample((3,), 0)}
    d, dd = session_of(nodes, inputs, ["d", "dd"], plugins).run(None, inputs)
    np.testing.assert_allclose(d, 3 * inputs["a"] ** 2)
    np.testing.assert_allclose(dd, 6 * inputs["a"])


def test_errors(plugins):
    inputs = {"a": sample((3,), 0)}
    with pytest.raises(ModelError, match=r"\(Erf\): Gradient has no rule"):
        session_of([node("Erf", ["a"]), gradient(["a"], "y", ["d"])], inputs, ["d"], plugins)
    with pytest.raises(ModelError, match="no value 'q'"):
        session_of([node("Exp", ["a"]), gradient(["a"], "q", ["d"])], inputs, ["d"], plugins)
