"""If, Loop and Scan: bodies that see the values around them, also two levels up; no trips; early ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions

X = np.array([[1, -2], [3, 4], [-5, 6]], np.float32)


def check(text: str, expected: list[Any] | None = None, **feeds: Any) -> None:
    """Both levels give what was expected; onnxruntime's result where nothing is given."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 16]> {text}')
    given = {name: np.asarray(value) for name, value in feeds.items()}
    if expected is None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        expected = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, given)
    for level in ("none", "all"):
        session = InferenceSession(proto, SessionOptions(level, strict=True))
        for _ in range(2):
            for actual, wanted in zip(session.run(None, given), expected, strict=True):
                assert actual.shape == np.shape(wanted)
                np.testing.assert_allclose(actual, wanted, rtol=1e-6)


LOOP = """g (float[3, 2] x, int64 trips, bool start) => (float[3, 2] y, int64[T] counts, float[T, 3, 2] all)
<int64 last = {2}, float two = {2}> {
    y, counts, all = Loop(trips, start, x) <body = b (int64 i, bool going, float[3, 2] s)
                                                   => (bool still, float[3, 2] n, int64 c, float[3, 2] e) {
        still = Less(i, last)
        t = Mul(s, two)
        n = Sub(t, x)
        c = Mul(i, i)
        e = Identity(n)
    }>
}"""


@pytest.mark.parametrize("trips", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("start", [True, False])
def test_a_loop_that_counts_and_one_that_stops_by_itself(trips: int, start: bool) -> None:
    check(LOOP, x=X, trips=np.int64(trips), start=start)


def test_a_loop_without_limit_and_without_condition() -> None:
    check(LOOP.replace("Loop(trips, start, x)", "Loop(, start, x)"), x=X, trips=np.int64(0), start=True)
    check(LOOP.replace("Loop(trips, start, x)", "Loop(trips, , x)"), x=X, trips=np.int64(2), start=False)


NESTED = """g (float[3, 2] x, int64 outer, int64 inner, bool c) => (float[3, 2] y) <float half = {0.5}> {
    base = Mul(x, half)
    y = Loop(outer, , x) <body = o (int64 i, bool og, float[3, 2] s) => (bool os, float[3, 2] n) {
        os = Identity(og)
        fi = Cast <to = 1>(i)
        n = Loop(inner, , s) <body = q (int64 j, bool ig, float[3, 2] t) => (bool is, float[3, 2] m) {
            is = Identity(ig)
            fj = Cast <to = 1>(j)
            k = Add(fi, fj)
            m = If(c) <then_branch = th () => (float[3, 2] p) { u = Add(t, base)  p = Add(u, k) },
                       else_branch = el () => (float[3, 2] r) { r = Sub(t, s) }>
        }>
    }>
}"""


@pytest.mark.parametrize(("outer", "inner"), [(0, 3), (2, 0), (1, 1), (3, 2)])
@pytest.mark.parametrize("c", [True, False])
def test_three_levels(outer: int, inner: int, c: bool) -> None:
    check(NESTED, x=X, outer=np.int64(outer), inner=np.int64(inner), c=c)


def test_a_value_that_grows_in_each_trip() -> None:
    text = """g (float[N] x, int64 trips) => (float[M] y) {
        y = Loop(trips, , x) <body = b (int64 i, bool going, float[K] s) => (bool still, float[L] n)
            { still = Identity(going)  n = Concat <axis = 0>(s, x) }> }"""
    for trips in (0, 1, 3):
        check(text, [np.tile(X[:, 0], trips + 1)], x=X[:, 0], trips=np.int64(trips))


SCAN = """g (float[2] state, float[T, 2] x) => (float[2] y, float[T, 2] sums, float[T, 2] scaled) <float[2] w = {{10, 100}}> {{
    y, sums, scaled = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] e) => (float[2] n, float[2] o, float[2] q)
        {{ n = Add(s, e)  o = Identity(n)  q = Mul(e, w) }}{more}>(state, x)
}}"""


@pytest.mark.parametrize("more", ["", ", scan_input_directions = [1]", ", scan_output_directions = [1, 0]"])
def test_scan(more: str) -> None:
    check(SCAN.format(more=more), state=np.array([1, 1], np.float32), x=X)


def test_branches_of_different_shape() -> None:
    text = """g (float[3, 2] x, bool c) => (float[A, B] y) {
        y = If(c) <then_branch = t () => (float[3, 2] p) { p = Neg(x) }, else_branch = e () => (float[2, 3] q) { q = Transpose(x) }> }"""
    check(text, [-X], x=X, c=True)
    check(text, [X.T], x=X, c=False)


def test_a_condition_of_one_element() -> None:
    text = """g (float[2] x, bool[1] c) => (float[2] y)
        { y = If(c) <then_branch = t () => (float[2] p) { p = Neg(x) }, else_branch = e () => (float[2] q) { q = Abs(x) }> }"""
    check(text, [-X[0]], x=X[0], c=np.array([True]))


def test_bodies_with_constants_of_their_own() -> None:
    text = """g (float[2] x, bool c) => (float[2] y, float[2] z) {
        k = Constant <value_floats = [1.0, 2.0]>()
        y = If(c) <then_branch = t () => (float[2] p) { k2 = Constant <value_floats = [3.0, 4.0]>()  p = Add(k, k2) },
                   else_branch = e () => (float[2] q) { q = Constant <value_floats = [5.0, 6.0]>() }>
        z = Add(x, k)
    }"""
    check(text, [[4, 6], [2, 0]], x=X[0], c=True)
    check(text, [[5, 6], [2, 0]], x=X[0], c=False)


def test_a_branch_that_reads_a_default() -> None:
    """A branch that reads an input with a default, which a feed replaces."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["": 16]>
        g (float[2] x, bool c, float[2] d) => (float[2] y) <float[2] d = {7, 8}>
        { y = If(c) <then_branch = t () => (float[2] p) { p = Add(x, d) }, else_branch = e () => (float[2] q) { q = Identity(d) }> }""")
    session = InferenceSession(proto)
    run: Callable[..., Any] = lambda c, **more: session.run(None, {"x": X[0], "c": np.array(c), **more})[0].tolist()  # noqa: E731
    assert run(True) == [8, 6]
    assert run(False) == [7, 8]
    assert run(True, d=np.zeros(2, np.float32)) == [1, -2]
    assert run(False, d=np.zeros(2, np.float32)) == [0, 0]
