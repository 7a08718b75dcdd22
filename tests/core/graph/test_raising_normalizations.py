"""LayerNormalization and RMSNormalization are found in every spelling, and in nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from miniort import InferenceSession, SessionOptions

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 8), dtype=np.float32)
Raise = Callable[..., list[str]]
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)

INITIALIZERS = """<float[8] w = {1, 2, 0.5, 1, 1.5, 1, -1, 3}, float[8] b = {0, 1, 0, 2, 0, -1, 0, 0}, float eps = {0.00001},
    float two = {2.0}, float one = {1.0}, float minus_half = {-0.5}, float half = {0.5},
    int64[1] last = {-1}, int64[1] second = {2}, int64[1] first = {1}>"""
SQUARES = ["s = Mul({d}, {d})", "s = Pow({d}, two)", "i = Identity({d}) s = Mul(i, {d})"]
MEANS = ["m = ReduceMean(s, last)", "m = ReduceMean <keepdims = 1>(s, second)"]
SUMS = ["v = Add(m, eps)", "v = Add(eps, m)"]
ROOTS = [
    "r = Sqrt(v) n = Div({d}, r)",
    "r = Sqrt(v) q = Div(one, r) n = Mul({d}, q)",
    "r = Sqrt(v) q = Reciprocal(r) n = Mul(q, {d})",
    "q = Pow(v, minus_half) n = Mul({d}, q)",
    "r = Pow(v, half) n = Div({d}, r)",
    "u = Reciprocal(v) q = Sqrt(u) n = Mul(q, {d})",
]
SCALES = ["y0 = Mul(n, w)", "y0 = Mul(w, n)", "j = Identity(n) y0 = Mul(w, j)"]


def graph(*parts: str, deviation: str = "x", output: str = "float[2, 3, 8] y", shape: str = "2, 3, 8") -> str:
    """A graph that computes y from x."""
    return f"g (float[{shape}] x) => ({output}) {INITIALIZERS} {{ {' '.join(parts).replace('{d}', deviation)} }}"


@SETTINGS
@given(*map(st.sampled_from, (SQUARES, MEANS, SUMS, ROOTS, SCALES)))
def test_rms_normalization(raised: Raise, square: str, mean: str, add: str, root: str, scale: str) -> None:
    text = graph(square, mean, add, root, scale, "y = Identity(y0)", shape="B, T, 8", output="float[B, T, 8] y")
    assert raised(text, x=X) == ["RMSNormalization"]


@SETTINGS
@given(
    *map(st.sampled_from, (SQUARES, MEANS, SUMS, ROOTS, SCALES)), st.sampled_from(["y = Add(y0, b)", "y = Add(b, y0)", "y = Identity(y0)"])
)
def test_layer_normalization(raised: Raise, square: str, mean: str, add: str, root: str, scale: str, bias: str) -> None:
    text = graph("c = ReduceMean(x, last) dev = Sub(x, c)", square, mean, add, root, scale, bias, deviation="dev")
    assert raised(text, x=X) == ["LayerNormalization"]


def test_the_deviation_computed_twice(raised: Raise) -> None:
    text = graph(
        "c = ReduceMean(x, last) dev = Sub(x, c) again = Sub(x, c)",
        SQUARES[1],
        MEANS[0],
        SUMS[0],
        "r = Sqrt(v) n = Div(again, r)",
        SCALES[0],
        "y = Add(y0, b)",
        deviation="dev",
    )
    assert raised(text, x=X) == ["LayerNormalization"]


def test_axes_as_an_attribute(raised: Raise) -> None:
    text = graph(
        "c = ReduceMean <axes = [2]>(x) dev = Sub(x, c) s = Pow(dev, two) m = ReduceMean <axes = [-1]>(s)",
        SUMS[0],
        ROOTS[0],
        SCALES[0],
        "y = Add(y0, b)",
        deviation="dev",
    )
    assert raised(text, opset=11, x=X) == ["LayerNormalization"]


def test_the_scale_multiplied_first(raised: Raise) -> None:
    assert raised(graph(SQUARES[0], MEANS[0], SUMS[0], "r = Sqrt(v) xw = Mul(x, w) y = Div(xw, r)"), x=X) == ["RMSNormalization"]


def test_no_scale_at_all(raised: Raise) -> None:
    assert raised(graph(SQUARES[0], MEANS[0], SUMS[0], "r = Sqrt(v) y = Div(x, r)"), x=X) == ["RMSNormalization"]


def test_over_two_axes(raised: Raise) -> None:
    text = graph(SQUARES[0], "m = ReduceMean(s, both)", SUMS[0], ROOTS[0], SCALES[0], "y = Identity(y0)")
    assert raised(text.replace("int64[1] last", "int64[2] both = {2, 1}, int64[1] last"), x=X) == ["RMSNormalization"]


@pytest.mark.parametrize("cast", [10, 16])
def test_half_precision_widened_and_narrowed(raised: Raise, cast: int) -> None:
    half = {10: "float16", 16: "bfloat16"}[cast]
    text = graph(
        "h = Cast <to = {c}>(x) wh = Cast <to = {c}>(w) f = Cast <to = 1>(h)".replace("{c}", str(cast)),
        SQUARES[0],
        MEANS[0],
        SUMS[0],
        ROOTS[1],
        f"k = Cast <to = {cast}>(n) y = Mul(wh, k)",
        deviation="f",
        output=f"{half}[2, 3, 8] y",
    )
    assert raised(text, x=X, tolerance=2e-2) == ["Cast", "RMSNormalization"]


def test_a_widened_value_that_others_read(raised: Raise) -> None:
    text = graph(
        "h = Cast <to = 10>(x) wh = Cast <to = 10>(w) f = Cast <to = 1>(h) z = Neg(f)",
        SQUARES[0],
        MEANS[0],
        SUMS[0],
        ROOTS[1],
        "k = Cast <to = 10>(n) y = Mul(wh, k)",
        deviation="f",
        output="float16[2, 3, 8] y, float[2, 3, 8] z",
    )
    assert sorted(raised(text, x=X, tolerance=2e-2)) == ["Cast", "Cast", "Neg", "RMSNormalization"]


WRONG = {
    "another axis": (SQUARES[0], "m = ReduceMean(s, first)", SUMS[0], ROOTS[0], SCALES[0]),
    "a cube": ("q0 = Mul(x, x) s = Mul(q0, x)", MEANS[0], "a = Abs(m) v = Add(a, eps)", ROOTS[0], SCALES[0]),
    "a sum": (SQUARES[0], "m = ReduceSum(s, last)", SUMS[0], ROOTS[0], SCALES[0]),
    "no root": (SQUARES[0], MEANS[0], SUMS[0], "n = Div(x, v)", SCALES[0]),
    "multiplied": (SQUARES[0], MEANS[0], SUMS[0], "r = Sqrt(v) n = Mul(x, r)", SCALES[0]),
    "another x": (SQUARES[0], MEANS[0], SUMS[0], "o = Sin(x) r = Sqrt(v) n = Div(o, r)", SCALES[0]),
    "twice": (SQUARES[0], MEANS[0], SUMS[0], "r = Sqrt(v) t = Mul(x, two) n = Div(t, r)", SCALES[0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_normalization(raised: Raise, name: str) -> None:
    ops = raised(graph(*WRONG[name], "y = Identity(y0)"), x=X)
    assert not {"RMSNormalization", "LayerNormalization"} & set(ops)


def test_a_mean_of_something_else_is_no_layer_normalization(raised: Raise) -> None:
    text = graph(
        "o = Sin(x) c = ReduceMean(o, last) dev = Sub(x, c)",
        SQUARES[0],
        MEANS[0],
        SUMS[0],
        ROOTS[0],
        SCALES[0],
        "y = Add(y0, b)",
        deviation="dev",
    )
    assert "LayerNormalization" not in raised(text, x=X)


@pytest.mark.parametrize("inner", ["s", "m", "v", "r", "n"])
def test_what_others_read_in_the_middle_stays(raised: Raise, inner: str) -> None:
    size = 8 if inner in "sn" else 1
    text = graph(SQUARES[0], MEANS[0], SUMS[0], ROOTS[0], "y = Mul(n, w)", output=f"float[2, 3, 8] y, float[2, 3, {size}] {inner}")
    ops = raised(text, x=X)
    assert ("RMSNormalization" in ops) == (inner == "n")  # n is a normalisation of its own, scaled afterwards


def test_a_scale_for_each_row_is_multiplied_afterwards(raised: Raise) -> None:
    text = graph(SQUARES[0], MEANS[0], SUMS[0], ROOTS[0], "y = Mul(n, rows)").replace(
        "<float[8] w", "<float[3, 1] rows = {1, 2, 3}, float[8] w"
    )
    assert raised(text, x=X) == ["RMSNormalization", "Mul"]


@pytest.mark.parametrize("domain", ["", "com.microsoft."])
def test_onnxruntimes_name_for_it(domain: str) -> None:
    """SimplifiedLayerNormalization, which exporters write in the default domain too; its second output has no counterpart."""
    for outputs, op in (("y", "RMSNormalization"), ("y, inverse", "SimplifiedLayerNormalization")):
        more, last = (", float[2, 1] i", "i = Abs(inverse)") if "," in outputs else ("", "")
        node = f"{domain}SimplifiedLayerNormalization <axis = -1, epsilon = 0.001>"
        text = f"""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
            g (float[2, 8] x, float[8] w) => (float[2, 8] z{more}) {{ {outputs} = {node}(x, w) z = Neg(y) {last} }}"""
        proto = parser.parse_model(text)
        plain, optimised = (InferenceSession(proto, SessionOptions(level), providers=["cpu"]) for level in ("none", "all"))
        feeds = {"x": X[0, :2].reshape(2, 8), "w": np.linspace(1, 2, 8, dtype=np.float32)}
        np.testing.assert_allclose(optimised.run(["z"], feeds)[0], plain.run(["z"], feeds)[0], rtol=1e-6)
        assert op in [each.op_type for each in optimised.model.graph]
