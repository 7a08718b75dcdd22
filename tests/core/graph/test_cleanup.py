"""Cleaning up: identities, equal nodes, and what nobody reads; graph outputs keep their names."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions

HEADER = '<ir_version: 10, opset_import: ["": 18, "test": 1]>'
X = np.array([-1, 2], np.float32)


def check(text: str, ops: list[str], **feeds: object) -> InferenceSession:
    """The optimised graph has these ops, the same signature, and gives what the unoptimised one gives."""
    proto = parser.parse_model(HEADER + text)
    plain, cleaned = (InferenceSession(proto, SessionOptions(graph_optimization_level=level)) for level in ("none", "all"))
    assert [node.op for node in cleaned.explain().nodes] == ops
    assert cleaned.get_inputs() == plain.get_inputs()
    assert cleaned.get_outputs() == plain.get_outputs()
    names = [output.name for output in proto.graph.output]
    assert [output.name for output in cleaned.get_outputs()] == names
    given = feeds or {"x": X}
    for actual, expected in zip(cleaned.run(None, given), plain.run(None, given), strict=True):
        np.testing.assert_array_equal(actual, expected)
    return cleaned


def test_identities_in_a_row() -> None:
    check("g (float[2] x) => (float[2] y) { a = Identity(x)  b = Neg(a)  c = Identity(b)  d = Identity(c)  y = Identity(d) }", ["Neg"])


def test_an_identity_of_a_graph_output() -> None:
    check("g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x)  z = Identity(y) }", ["Neg", "Identity"])
    check("g (float[2] x) => (float[2] z, float[2] y) { y = Neg(x)  z = Identity(y)  }", ["Neg", "Identity"])


def test_one_value_under_three_names() -> None:
    check("g (float[2] x) => (float[2] p, float[2] q, float[2] r) { h = Neg(x)  p = Identity(h)  q = Identity(h)  r = Identity(q) }",
          ["Neg", "Identity", "Identity"])  # fmt: skip


def test_an_identity_of_an_input_or_a_weight() -> None:
    check("g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1, 2}> { y = Identity(x)  z = Identity(w) }", ["Identity", "Identity"])


def test_identities_of_outer_values_in_branches() -> None:
    text = """g (float[2] x, bool c) => (float[2] y, float[2] t) {
        t = Neg(x)
        y = If(c) <then_branch = a () => (float[2] p) { p = Identity(t) },
                   else_branch = b () => (float[2] q) { i = Identity(t)  q = Abs(i) }>
    }"""
    for c in (True, False):
        check(text, ["Neg", "If", "Identity", "Abs"], x=X, c=np.array(c))


def test_a_value_that_only_a_branch_reads_stays() -> None:
    text = """g (float[2] x, bool c) => (float[2] y) {
        t = Neg(x)
        i = Identity(t)
        y = If(c) <then_branch = a () => (float[2] p) { p = Identity(i) }, else_branch = b () => (float[2] q) { q = Identity(x) }>
    }"""
    for c in (True, False):
        check(text, ["Neg", "If", "Identity", "Identity"], x=X, c=np.array(c))


def test_equal_nodes_are_merged() -> None:
    check("g (float[2] x) => (float[2] y) { a = Neg(x)  b = Neg(x)  c = Abs(a)  d = Abs(b)  y = Add(c, d) }", ["Neg", "Abs", "Add"])


def test_equal_nodes_that_are_graph_outputs() -> None:
    check("g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x)  z = Neg(x) }", ["Neg", "Neg"])
    check("g (float[2] x) => (float[2] y, float[2] z) { a = Neg(x)  y = Neg(x)  z = Abs(a) }", ["Neg", "Abs"])
    check("g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x)  a = Neg(x)  z = Abs(a) }", ["Neg", "Abs"])


def test_nodes_that_differ_only_in_attributes_or_order_stay_apart() -> None:
    check("g (float[2] x) => (float[2] y) { a = Softmax <axis = 0>(x)  b = Softmax <axis = -1>(x)  y = Sub(a, b) }",
          ["Softmax", "Softmax", "Sub"])  # fmt: skip
    check("g (float[2] x) => (float[2] y) { e = Exp(x)  a = Sub(x, e)  b = Sub(e, x)  y = Mul(a, b) }", ["Exp", "Sub", "Sub", "Mul"])


def test_a_node_whose_second_output_is_read_is_not_replaced_by_one_that_has_none() -> None:
    check("""g (float[1, 4] x) => (float[1, 2] v, int64[1, 2] i) <int64[1] k = {2}>
          { a, unread = TopK(x, k)  b, i = TopK(x, k)  v = Add(a, b) }""",
          ["TopK", "Add"], x=np.array([[3, 1, 4, 1]], np.float32))  # fmt: skip


def test_what_nobody_reads_is_dropped() -> None:
    session = check("g (float[2] x) => (float[2] y) <float[2] unread = {1, 2}> { a = Exp(x)  b = Mul(a, unread)  y = Neg(x) }", ["Neg"])
    assert not session.model.graph.initializers


def test_what_only_dropped_bodies_read_is_dropped() -> None:
    text = """g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}> {
        t = Exp(x)
        u = Mul(t, w)
        unread = If(c) <then_branch = a () => (float[2] p) { p = Neg(u) }, else_branch = b () => (float[2] q) { q = Add(t, w) }>
        y = Neg(x)
    }"""
    session = check(text, ["Neg"], x=X, c=np.array(True))
    assert not session.model.graph.initializers


def test_inputs_that_nobody_reads_stay() -> None:
    session = check("g (float[2] x, float[2] unread) => (float[2] y) { y = Neg(x) }", ["Neg"], x=X, unread=X)
    assert [each.name for each in session.get_inputs()] == ["x", "unread"]


@pytest.mark.parametrize("outputs", ["y", "y, unread", "y, , unread"])
def test_optional_outputs_that_nobody_reads(outputs: str) -> None:
    text = f"g (float[2] x) => (float[2] y) <float[2] scale = {{1, 2}}> {{ {outputs} = LayerNormalization(x, scale) }}"
    check(text, ["LayerNormalization"])
