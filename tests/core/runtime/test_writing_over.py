"""A result is written over an input that dies, and over nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import parser

from miniort import InferenceSession, SessionOptions
from miniort.runtime.observers import Observer

ROWS = 64  # times 1,000 floats: large enough for the pool
X = np.random.default_rng(0).standard_normal((ROWS, 1000), dtype=np.float32)
ONE_SIZE = X.nbytes


def session_of(body: str, outputs: str = "float[rows, 1000] y") -> InferenceSession:
    text = f"""
    <ir_version: 10, opset_import: ["": 20]>
    graph (float[rows, 1000] x) => ({outputs}) {{ {body} }}
    """
    return InferenceSession(parser.parse_model(text), SessionOptions("none"))


def in_place(session: InferenceSession) -> list[str]:
    return [each.name for each in session.memory_plan({"rows": ROWS}).lifetimes if each.in_place]


def test_a_chain_needs_one_block() -> None:
    session = session_of("a = Exp(x) b = Add(a, x) c = Mul(x, b) d = Gelu(c) y = Sub(d, x)")
    given = X.copy()
    (y,) = session.run(None, {"x": given})
    plain = np.exp(X) + X
    plain = X * plain
    wanted = InferenceSession(
        parser.parse_model('<ir_version: 10, opset_import: ["": 20]> g (float[n, 1000] c) => (float[n, 1000] d) { d = Gelu(c) }')
    ).run(None, {"c": plain})[0]
    np.testing.assert_allclose(y, wanted - X, atol=1e-5)
    np.testing.assert_array_equal(given, X)
    assert in_place(session) == ["b", "c", "d", "y"]
    assert session.memory_plan({"rows": ROWS}).peak == ONE_SIZE
    assert session.providers[0].provider.memory().peak < 1.1 * ONE_SIZE


def test_what_somebody_reads_later_stays() -> None:
    session = session_of("a = Exp(x) b = Add(a, x) y = Mul(a, b)")
    (y,) = session.run(None, {"x": X})
    np.testing.assert_allclose(y, np.exp(X) * (np.exp(X) + X), rtol=1e-5)
    assert in_place(session) == ["y"]  # over b: a is read by two


def test_one_value_read_twice_by_one_node_stays() -> None:
    session = session_of("a = Exp(x) y = Mul(a, a)")
    np.testing.assert_allclose(session.run(None, {"x": X})[0], np.exp(X) ** 2, rtol=1e-5)
    assert in_place(session) == []


def test_outputs_feeds_weights_and_what_views_show_stay() -> None:
    body = "a = Exp(x) y = Add(a, x) t = Transpose(x) u = Add(t, w) z = Transpose(u)"
    text = f"""
    <ir_version: 10, opset_import: ["": 20]>
    graph (float[{ROWS}, 1000] x) => (float[{ROWS}, 1000] a, float[{ROWS}, 1000] y, float[{ROWS}, 1000] z) <float[1] w = {{1}}> {{ {body} }}
    """
    given = X.copy()
    session = InferenceSession(parser.parse_model(text), SessionOptions("none"))
    for _ in range(2):
        a, y, z = session.run(None, {"x": given})
        np.testing.assert_allclose(a, np.exp(X), rtol=1e-5)
        np.testing.assert_allclose(y, np.exp(X) + X, rtol=1e-5)
        np.testing.assert_allclose(z, X + 1, rtol=1e-5)
        np.testing.assert_array_equal(given, X)


def test_a_broadcast_input_is_too_small_for_the_result() -> None:
    session = session_of("a = ReduceSum <keepdims = 1> (x) b = Exp(x) y = Add(a, b)")
    np.testing.assert_allclose(session.run(None, {"x": X})[0], X.sum() + np.exp(X), rtol=1e-3)
    assert in_place(session) == ["y"]


def test_values_of_an_outer_graph_stay_in_a_loop() -> None:
    text = f"""
    <ir_version: 10, opset_import: ["": 20]>
    graph (float[{ROWS}, 1000] x, int64 n, bool go) => (float[{ROWS}, 1000] y) {{
      a = Exp(x)
      y = Loop(n, go, x) <body = step (int64 i, bool before, float[{ROWS}, 1000] s) => (bool after, float[{ROWS}, 1000] t) {{
        after = Identity(before)
        b = Neg(s)
        t = Sub(a, b)
      }}>
    }}
    """
    session = InferenceSession(parser.parse_model(text), SessionOptions("none"))
    (y,) = session.run(None, {"x": X, "n": np.array(3), "go": np.array(True)})
    np.testing.assert_allclose(y, X + 3 * np.exp(X), atol=1e-5, rtol=1e-5)


def test_an_observer_sees_every_value_as_it_was() -> None:
    seen: dict[str, Any] = {}

    class Keeper(Observer):
        wants = ("a", "b")

        def before_node(self, node: Any, inputs: Any) -> None: ...

        def after_node(self, node: Any, inputs: Any, outputs: Any) -> None: ...

        def on_value(self, name: str, value: Any) -> None:
            seen[name] = value

    session = session_of("a = Exp(x) b = Add(a, x) y = Mul(x, b)").observe(Keeper())
    session.run(None, {"x": X})
    np.testing.assert_allclose(seen["a"], np.exp(X), rtol=1e-5)
    np.testing.assert_allclose(seen["b"], np.exp(X) + X, rtol=1e-5)


def test_a_part_of_a_split_is_no_block_of_its_own() -> None:
    text = f"""
    <ir_version: 10, opset_import: ["": 20]>
    graph (float[{ROWS}, 1000] x) => (float[{ROWS}, 500] y, float[{ROWS}, 500] z) {{
      a = Neg(x)
      left, right = Split <axis = 1, num_outputs = 2> (a)
      y = Gelu(left)
      z = Sigmoid(right)
    }}
    """
    given = X.copy()
    y, z = InferenceSession(parser.parse_model(text), SessionOptions("none")).run(None, {"x": given})
    single = InferenceSession(
        parser.parse_model('<ir_version: 10, opset_import: ["": 20]> g (float[n, m] c) => (float[n, m] d) { d = Gelu(c) }')
    ).run(None, {"c": np.ascontiguousarray(-X[:, :500])})[0]
    np.testing.assert_allclose(y, single, atol=1e-6)
    np.testing.assert_allclose(z, 1 / (1 + np.exp(X[:, 500:])), atol=1e-6)
    np.testing.assert_array_equal(given, X)
