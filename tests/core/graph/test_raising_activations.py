"""Gelu and Swish are found in every spelling, and in nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from miniort import WeightStore, load_model
from miniort.graph.gelu import RAISE_GELU
from miniort.graph.inference import INFER_TYPES
from miniort.graph.passes import Level, PassContext, run_passes
from miniort.graph.swish import RAISE_SWISH

X = np.linspace(-4, 4, 24, dtype=np.float32).reshape(2, 3, 4)
Raise = Callable[..., list[str]]
Factors = st.permutations
SETTINGS = settings(max_examples=30, deadline=None, derandomize=True)

CUBES = [
    "e = Constant <value_float = 3.0> ()  c = Pow(x, e)",
    "s = Mul(x, x)  c = Mul(s, x)",
    "s = Mul(x, x)  c = Mul(x, s)",
    "e = Constant <value_float = 2.0> ()  s = Pow(x, e)  i = Identity(s)  c = Mul(i, x)",
]
INNER = [
    "t = Mul(c, k)  a = Add(x, t)  m = Mul(a, r)",
    "t = Mul(k, c)  a = Add(t, x)  m = Mul(r, a)",
    "kr = Constant <value_float = 0.03567740814183>()  t = Mul(c, kr)  u = Mul(x, r)  m = Add(t, u)",
    "t = Mul(c, k)  a = Add(x, t)  ri = Reciprocal(r)  m = Div(a, ri)",
]
ERROR_FUNCTION = [
    "d = Constant <value_float = 1.41421356>()  m = Div(x, d)",
    "d = Constant <value_float = 0.70710678>()  m = Mul(d, x)",
    "two = Constant <value_float = 2.0>()  d = Sqrt(two)  m = Div(x, d)",
]


def multiplied(factors: list[str]) -> str:
    """The product of three factors from left to right."""
    return f"p = Mul({factors[0]}, {factors[1]})  y = Mul(p, {factors[2]})"


def around(function: str, outer: list[str], swapped: bool) -> str:
    """½ x (1 + f(m)), the factors in any order; `f` is the function's value and `g` what is added to 1."""
    add = "o = Add(one, f)" if swapped else "o = Add(f, one)"
    return f"f = {function}(m)  {add}  {multiplied(outer)}"


GRAPH = """g (float[2, 3, 4] x) => (float[2, 3, 4] y)
    <float half = {{0.5}}, float one = {{1.0}}, float k = {{0.044715}}, float r = {{0.7978845608}}> {{ {body} }}"""


@SETTINGS
@given(st.sampled_from(CUBES), st.sampled_from(INNER), Factors(["x", "half", "o"]), st.booleans())
def test_gelu_by_tanh(raised: Raise, cube: str, inner: str, outer: list[str], swapped: bool) -> None:
    body = " ".join([cube, inner, around("Tanh", outer, swapped)])
    assert raised(GRAPH.format(body=body), x=X) == ["Gelu"]


@SETTINGS
@given(st.sampled_from(ERROR_FUNCTION), Factors(["x", "half", "o"]), st.booleans())
def test_gelu_by_the_error_function(raised: Raise, inner: str, outer: list[str], swapped: bool) -> None:
    assert raised(GRAPH.format(body=f"{inner} {around('Erf', outer, swapped)}"), x=X) == ["Gelu"]


def test_gelu_written_as_a_sum(raised: Raise) -> None:
    body = "m = Mul(x, r2) f = Erf(m) h = Mul(x, half) hf = Mul(h, f) y = Add(h, hf)"
    assert raised(GRAPH.format(body=f"r2 = Constant <value_float = 0.70710678>() {body}"), x=X) == ["Gelu"]


def test_gelu_with_the_slope_inside(raised: Raise) -> None:
    """Transformers' `gelu_fast`: tanh(r x (1 + k x x))."""
    body = "rx = Mul(x, r) kx = Mul(x, k) kxx = Mul(kx, x) i = Add(one, kxx) m = Mul(rx, i)"
    assert raised(GRAPH.format(body=f"{body} {around('Tanh', ['half', 'x', 'o'], True)}"), x=X) == ["Gelu"]


@pytest.mark.parametrize("wrong", ["half", "one", "k", "r"])
def test_another_constant_is_no_gelu(raised: Raise, wrong: str) -> None:
    body = " ".join([CUBES[0], INNER[0], around("Tanh", ["x", "half", "o"], False)])
    text = GRAPH.format(body=body)
    text = {
        "half": text.replace("{0.5}", "{0.51}"),
        "one": text.replace("{1.0}", "{1.01}"),
        "k": text.replace("0.044715", "0.0448"),
        "r": text.replace("0.7978845608", "0.798"),
    }[wrong]
    assert "Tanh" in raised(text, x=X)


def test_a_cube_of_another_value_is_no_gelu(raised: Raise) -> None:
    body = " ".join(["n = Sin(x)", CUBES[0].replace("Pow(x", "Pow(n"), INNER[0], around("Tanh", ["x", "half", "o"], False)])
    assert "Tanh" in raised(GRAPH.format(body=body), x=X)


@pytest.mark.parametrize("inner", ["c", "t", "a", "m", "f", "o", "p"])
def test_a_graph_output_in_the_middle_forbids_it(raised: Raise, inner: str) -> None:
    body = " ".join([CUBES[0], INNER[0], around("Tanh", ["x", "half", "o"], False)])
    text = GRAPH.format(body=body).replace("(float[2, 3, 4] y)", f"(float[2, 3, 4] y, float[2, 3, 4] {inner})")
    assert "Tanh" in raised(text, x=X)


@pytest.mark.parametrize("inner", ["c", "t", "a", "m", "f", "o", "p"])
def test_a_second_reader_in_the_middle_forbids_it(raised: Raise, inner: str) -> None:
    body = " ".join([CUBES[0], INNER[0], around("Tanh", ["x", "half", "o"], False), f"z = Cos({inner})"])
    text = GRAPH.format(body=body).replace("(float[2, 3, 4] y)", "(float[2, 3, 4] y, float[2, 3, 4] z)")
    assert "Tanh" in raised(text, x=X)


def test_a_constant_that_adds_an_axis_forbids_it(raised: Raise) -> None:
    body = " ".join([CUBES[0], INNER[0], around("Tanh", ["x", "half", "o"], False)])
    text = GRAPH.format(body=body).replace("float half = {0.5}", "float[1, 1, 1, 1] half = {0.5}").replace("4] y)", "4] y0)")
    assert "Tanh" in raised(
        text.replace("y = Mul(p, o)", "y1 = Mul(p, o) y0 = Squeeze(y1, z)").replace("> {", ", int64[1] z = {0}> {"), x=X
    )


@SETTINGS
@given(
    st.sampled_from(["n = Neg(x)", "n = Mul(x, minus)", "m = Mul(x, alpha) n = Neg(m)", "n = Mul(steep, x)"]),
    st.permutations(["e", "one"]),
    st.sampled_from(["y = Div(x, d)", "f = Div(one, d) y = Mul(x, f)", "f = Reciprocal(d) y = Mul(f, x)"]),
)
def test_swish_with_the_sigmoid_written_out(raised: Raise, inner: str, terms: list[str], outer: str) -> None:
    text = f"""g (float[2, 3, 4] x) => (float[2, 3, 4] y) <float one = {{1.0}}, float minus = {{-1.0}}, float alpha = {{1.702}},
        float steep = {{-1.702}}> {{ {inner} e = Exp(n) d = Add({", ".join(terms)}) {outer} }}"""
    assert raised(text, x=X) == ["Swish"]
    assert "Exp" in raised(text.replace("one = {1.0}", "one = {1.5}"), x=X)


@pytest.mark.parametrize("inner", ["e", "d"])
def test_a_written_out_sigmoid_that_others_read(raised: Raise, inner: str) -> None:
    text = f"""g (float[2, 3, 4] x) => (float[2, 3, 4] y, float[2, 3, 4] {inner}) <float one = {{1.0}}> {{
        n = Neg(x) e = Exp(n) d = Add(one, e) y = Div(x, d) }}"""
    assert "Exp" in raised(text, x=X)


@SETTINGS
@given(Factors(["x", "f"]), st.sampled_from([None, 1.702, 0.5]), st.booleans())
def test_swish(raised: Raise, outer: list[str], alpha: float | None, swapped: bool) -> None:
    scaled = f"k = Constant <value_float = {alpha}>() m = Mul({'k, x' if swapped else 'x, k'})" if alpha else "m = Identity(x)"
    text = f"g (float[2, 3, 4] x) => (float[2, 3, 4] y) {{ {scaled} f = Sigmoid(m) y = Mul({', '.join(outer)}) }}"
    assert raised(text, x=X) == ["Swish"]


@pytest.mark.parametrize(
    "body",
    [
        "f = Sigmoid(x) y = Mul(x2, f)",
        "f = Sigmoid(x) x3 = Mul(x, x2) y = Mul(f, x3)",
        "n = Mul(x, x) f = Sigmoid(n) y = Mul(x, f)",
        "f = Sigmoid(x) y = Div(f, x2)",
        "f = Sigmoid(x) g = Identity(f) h = Mul(x, f) y = Sub(h, f)",
    ],
)
def test_what_is_no_swish(raised: Raise, body: str) -> None:
    assert "Swish" not in raised(f"g (float[2, 3, 4] x, float[2, 3, 4] x2) => (float[2, 3, 4] y) {{ {body} }}", x=X, x2=X + 5)


def test_a_sigmoid_that_others_read_stays(raised: Raise) -> None:
    assert raised("g (float[4] x) => (float[4] y, float[4] f) { f = Sigmoid(x) y = Mul(x, f) }", x=X[0, 0]) == ["Sigmoid", "Mul"]


@pytest.mark.parametrize(("missing", "ops"), [("Swish", ["Sigmoid", "Mul"]), ("Gelu", ["Swish"])])
def test_an_op_that_nobody_has_is_not_made(missing: str, ops: list[str]) -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[4] x) => (float[4] y) { f = Sigmoid(x) y = Mul(x, f) }'
    model = load_model(parser.parse_model(text))
    asked: list[tuple[str, int, object]] = []

    def supports(op: str, domain: str, version: int, types: object) -> bool:
        asked.append((op, version, types))
        return op != missing

    context = PassContext(supports, lambda node, inputs: None, WeightStore(), model.opset_imports)
    changes = run_passes(model, [INFER_TYPES, RAISE_GELU, RAISE_SWISH], Level.EXTENDED, context)
    assert [node.op_type for node in model.graph] == ops
    assert [change.graph_pass for change in changes] == ["raise-swish"] * (missing == "Gelu")
    assert asked == [("Swish", 24, [np.dtype(np.float32)])]


def test_newer_models_get_the_op_without_a_version_of_its_own(raised: Raise) -> None:
    assert raised("g (float[4] x) => (float[4] y) { f = Sigmoid(x) y = Mul(x, f) }", opset=24, x=X[0, 0]) == ["Swish"]
