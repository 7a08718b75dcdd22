"""What a run takes of memory, told before it: sizes, lifetimes, views, what takes over whose memory, and what a run then really takes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions
from miniort.errors import InputError

CHAIN = """
<ir_version: 10, opset_import: ["": 18]>
chain (float[rows, 1000] x) => (float[rows, 1000] y) {
  a = Neg(x)
  b = Exp(a)
  t = Transpose(b)
  c = Sin(t)
  d = Transpose(c)
  y = Add(d, x)
}
"""


def session_of(text: str) -> InferenceSession:
    return InferenceSession(parser.parse_model(text), SessionOptions("none"))


def test_lifetimes_views_and_the_curve() -> None:
    plan = session_of(CHAIN).memory_plan({"rows": 100})
    size = 100 * 1000 * 4
    by_name = {each.name: each for each in plan.lifetimes}
    assert {name: (each.first, each.last) for name, each in by_name.items()} == {
        "a": (0, 1),
        "b": (1, 3),  # its view is read in step 3
        "t": (2, 3),
        "c": (3, 5),
        "d": (4, 5),
        "y": (5, 5),
    }
    assert {name: each.view_of for name, each in by_name.items() if each.view_of} == {"t": "b", "d": "c"}
    assert by_name["c"].reuses == "a"
    assert by_name["y"].reuses == "b"
    assert plan.curve == (size, 2 * size, size, 2 * size, size, 2 * size)
    assert (plan.peak, plan.peak_step, plan.pool, plan.total) == (2 * size, 1, 2 * size, 4 * size)
    assert plan.steps == ("Neg", "Exp", "Transpose", "Sin", "Transpose", "Add")
    assert [each.name for each in plan.alive(1)] == ["a", "b"]
    assert plan.unknown == ()


@pytest.mark.parametrize("rows", [100, 1000])
def test_the_pool_takes_what_the_plan_says(rows: int) -> None:
    session = session_of(CHAIN)
    plan = session.memory_plan({"rows": rows})
    y = session.run(None, {"x": np.zeros((rows, 1000), np.float32)})[0]
    pool = session.providers[0].provider.memory()
    assert plan.peak <= pool.peak <= plan.peak * 1.1
    assert plan.pool <= pool.reserved <= plan.pool * 1.1
    assert y.shape == (rows, 1000)


def test_a_much_larger_block_is_not_taken_over() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    graph (float[n, 100] x) => (float[n, 1] y, float[n, 1] z) {
      big = Neg(x)
      y = ReduceSum <keepdims = 1> (big, axes)
      z = Exp(y)
    }
    """.replace("=> (float[n, 1] y, float[n, 1] z)", "=> (float[n, 1] y, float[n, 1] z) <int64[1] axes = {1}>")
    plan = session_of(text).memory_plan({"n": 50_000})
    assert [each.reuses for each in plan.lifetimes] == [None, None, None]


def test_weights_are_counted_by_themselves() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    graph (float[n, 2] x) => (float[n, 2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }
    """
    plan = session_of(text).memory_plan({"n": 3})
    assert (plan.weights, plan.peak) == (8, 24)


def test_sizes_that_only_a_run_tells_are_named() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    graph (float[n] x) => (float[1, m] z) { i = NonZero(x)
      y = Cast <to = 1> (i)
      z = Neg(y) }
    """
    plan = session_of(text).memory_plan({"n": 3})
    assert set(plan.unknown) == {"i", "z"}
    assert plan.peak == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "these sizes of the model have no number: rows"),
        ({"rows": 1, "columns": 2}, "the model has no size 'columns'; its sizes: rows"),
        ({"rows": -1}, "the size 'rows' must not be negative, found -1"),
    ],
)
def test_wrong_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        session_of(CHAIN).memory_plan(sizes)


def test_sums_of_sizes() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    graph (float[past, 4] x, float[new, 4] y) => (float[total, 4] z) { z = Concat <axis = 0> (x, y) }
    """
    plan = session_of(text).memory_plan({"past": 10, "new": 5})
    assert plan.peak == 15 * 4 * 4
