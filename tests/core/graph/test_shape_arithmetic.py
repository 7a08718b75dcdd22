"""Sizes that are computed from shapes become constants where that's provable, and what changes nothing goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

Raise = Callable[..., list[str]]
X = np.arange(48, dtype=np.float32).reshape(2, 3, 8)
NUMBERS = """<int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2},
    int64[1] minus = {-1}, int64[1] n2 = {2}, int64[1] n4 = {4}, int64[1] huge = {9223372036854775807}, int64 four = {4}>"""
SIZES = (
    "s = Shape(x) b = Gather(s, i0) t = Gather(s, i1) c = Gather(s, i2) bb = Unsqueeze(b, a0) tt = Unsqueeze(t, a0) cc = Unsqueeze(c, a0)"
)


def graph(body: str, output: str, shape: str = "B, T, 8", more: str = "") -> str:
    return f"g (float[{shape}] x{more}) => ({output}) {NUMBERS} {{ {SIZES} {body} }}"


TARGETS = {
    "split": "d = Div(c, four) dd = Unsqueeze(d, a0) target = Concat <axis = 0>(bb, tt, n4, dd)",
    "with a -1": "target = Concat <axis = 0>(bb, tt, minus, n2)",
    "flattened": "target = Concat <axis = 0>(minus, cc)",
    "multiplied": "bt = Mul(b, t) rows = Unsqueeze(bt, a0) target = Concat <axis = 0>(rows, cc)",
    "sliced": "front = Slice(s, a0, a2) target = Concat <axis = 0>(front, n2, n4)",
    "sliced from behind": "front = Slice(s, a0, minus) target = Concat <axis = 0>(front, n2, n4)",
    "selected": "raw = Concat <axis = 0>(bb, minus, cc) is = Equal(raw, m3) target = Where(is, tt3, raw)",
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_of_a_reshape(raised: Raise, name: str) -> None:
    body = f"{TARGETS[name]} n = Neg(x) y = Reshape(n, target)"
    text = graph(body, "float y").replace("float y", "float[P, Q] y" if name in ("flattened", "multiplied") else "float[P, Q, R, U] y")
    if name == "selected":
        text = text.replace("[P, Q, R, U] y", "[P, Q, R] y").replace(
            "int64 i0", "int64[3] m3 = {-1, -1, -1}, int64[3] tt3 = {1, 3, 1}, int64 i0"
        )
    ops = raised(text, x=X)
    assert ops == ["Neg", "Reshape"] if name != "selected" else ops[-1] == "Reshape"


def test_two_sizes_that_move_stay_computed(raised: Raise) -> None:
    ops = raised(graph("target = Concat <axis = 0>(tt, bb, cc) y = Reshape(x, target)", "float[P, Q, R] y"), x=X)
    assert {"Shape", "Concat", "Reshape"} <= set(ops)


def test_zero_allowed(raised: Raise) -> None:
    text = graph("target = Concat <axis = 0>(bb, tt, n2, n4) y = Reshape <allowzero = 1>(x, target)", "float[P, Q, R, U] y")
    assert raised(text, x=X) == ["Reshape"]
    assert raised(text, x=X[:, :0]) == ["Reshape"]


@pytest.mark.parametrize(
    "body",
    [
        "target = Concat <axis = 0>(bb, tt, cc) y = Reshape(n, target)",
        "y = Reshape(n, s)",
        "y = Expand(n, s)",
        "target = Concat <axis = 0>(bb, a1, cc) y = Expand(n, target)",
        "y = Slice(n, a0, tt, a1)",
        "y = Slice(n, a0, huge, a2)",
        "u = Transpose <perm = [2, 0, 1]>(n) y = Transpose <perm = [1, 2, 0]>(u)",
        "u = Cast <to = 1>(n) y = Cast <to = 1>(u)",
        "u = Concat <axis = 1>(n) y = Identity(u)",
    ],
)
def test_what_changes_nothing(raised: Raise, body: str) -> None:
    assert raised(graph(f"n = Neg(x) {body}", "float[B, T, 8] y"), x=X) == ["Neg"]


@pytest.mark.parametrize(
    "body",
    [
        "y0 = Slice(n, a0, bb, a1) y = Identity(y0)",
        "y0 = Slice(n, a1, tt, a1) y = Identity(y0)",
        "y0 = Slice(n, a0, minus, a1) y = Identity(y0)",
        "y0 = Slice(n, minus, nothing, a1, minus) y = Identity(y0)",
    ],
)
def test_slices_that_cut_or_turn_stay(raised: Raise, body: str) -> None:
    text = graph(f"n = Neg(x) {body}", "float[P, Q, 8] y").replace("int64 i0", "int64[1] nothing = {-9223372036854775807}, int64 i0")
    assert "Slice" in raised(text, x=X)


def test_an_expand_of_a_size_that_may_be_one_stays(raised: Raise) -> None:
    ops = raised(graph("n = Neg(z) y = Expand(n, s)", "float[P, Q, R] y", more=", float[M, 1, 8] z"), x=X, z=X[:1, :1])
    assert "Expand" in ops


def test_sizes_of_one_name_are_equal(raised: Raise) -> None:
    ops = raised(graph("n = Neg(z) y = Expand(n, s)", "float[B, T, 8] y", more=", float[B, T, 8] z"), x=X, z=X)
    assert ops == ["Neg"]


def test_equal_sizes_are_computed_once(raised: Raise) -> None:
    """Both outputs are [t, b]; one is computed with `x`, the other with what's computed from it."""
    body = "n = Neg(x) p = Concat <axis = 0>(tt, bb) s2 = Shape(n) f = Slice(s2, a0, a2) g0 = Gather(f, i1) q = Unsqueeze(g0, a0)"
    ops = raised(graph(f"{body} u = Concat <axis = 0>(q, bb) v = Add(p, u)", "int64[2] v, float[B, T, 8] n"), x=X)
    assert ops.count("Concat") == ops.count("Shape") == 1


def test_a_constant_size_that_is_a_graph_output(raised: Raise) -> None:
    raised(graph("d = Div(c, four) dd = Unsqueeze(d, a0)", "int64[1] dd"), x=X)


def test_a_flattened_linear_layer(raised: Raise) -> None:
    """Reshape, Gemm, Reshape: the sizes of the batch needn't be computed."""
    body = "flat = Concat <axis = 0>(minus, cc) r = Reshape(x, flat) h = Gemm(r, w, bias)"
    body += " back = Concat <axis = 0>(bb, tt, n2) y = Reshape(h, back)"
    weights = f"float[8, 2] w = {{{', '.join(map(str, range(16)))}}}, float[2] bias = {{1, 2}}, int64 i0"
    text = graph(body, "float[B, T, 2] y").replace("int64 i0", weights)
    assert raised(text, x=X) == ["MatMul", "Add"]
    assert "Gemm" in raised(text.replace("(r, w, bias)", "<alpha = 2.0>(r, w, bias)"), x=X)
    assert "Gemm" in raised(text.replace("2] y)", "2] y, float[N, 2] h)"), x=X)


def test_branches_with_values_of_one_name(raised: Raise) -> None:
    """Sizes of one branch aren't taken for those of the other."""
    text = """g (float[B, T, 8] x, bool c) => (float[P, Q] y) <int64[2] f = {-1, 8}, int64[2] h = {-1, 4}> {
        y = If(c) <then_branch = a () => (float[P, Q] r) { t = Identity(f) r = Reshape(x, t) s = Shape(r) },
                   else_branch = b () => (float[P, Q] r) { t = Identity(h) r = Reshape(x, t) s = Shape(r) }>
    }"""
    for c in (True, False):
        raised(text, x=X, c=np.array(c))


NEUTRAL = {
    "one times": "y = Mul(x, one)",
    "times one": "y = Mul(one, x)",
    "divided by one": "y = Div(x, one)",
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_numbers(raised: Raise, name: str) -> None:
    text = f"g (float[B, T, 8] x) => (float[B, T, 8] z) <float one = {{1.0}}> {{ {NEUTRAL[name]} z = Neg(y) }}"
    assert raised(text, x=X) == ["Neg"]
    assert len(raised(text.replace("{1.0}", "{2.0}"), x=X)) == 2


def test_one_of_more_axes_changes_the_shape(raised: Raise) -> None:
    text = "g (float[T, 8] x) => (float[1, T, 8] z) <float[1, 1, 1] one = {1.0}> { y = Mul(x, one) z = Neg(y) }"
    assert len(raised(text, x=X[0])) == 2


def test_zero_is_added_to_whole_numbers_only(raised: Raise) -> None:
    text = "g (int64[T] i) => (int64[T] z) <int64 zero = {0}> { y = Add(i, zero) z = Neg(y) }"
    assert raised(text, i=np.arange(3)) == ["Neg"]


def test_unsqueezes_are_joined(raised: Raise) -> None:
    text = """g (float[B, T, 8] x) => (float[P, Q, R, U, V, W] y) <int64[1] a1 = {1}, int64[2] a04 = {0, 4}> {
        u = Unsqueeze(x, a1) y = Unsqueeze(u, a04) }"""
    assert raised(text, x=X) == ["Unsqueeze"]


def test_sizes_are_read_off_the_inputs(raised: Raise) -> None:
    """A size that is asked of what layers compute is asked of the inputs: no layer has to be run to know it."""
    text = """g (float[B, P, 8] past, float[B, T, 8] x) => (float[B, Q, 8] y, int64[1] length, int64 new)
        <int64[1] a1 = {1}, int64[1] a2 = {2}, int64 i1 = {1}> {
        n = Neg(x) all = Concat <axis = 1>(past, n) y = Abs(all)
        s = Shape(y) length = Slice(s, a1, a2) t = Shape(n) new = Gather(t, i1) }"""
    ops = raised(text, past=X[:, :2], x=X)
    assert ops.count("Shape") == 2
    assert sorted(set(ops)) == ["Abs", "Add", "Concat", "Gather", "Neg", "Reshape", "Shape"]
