"""RotaryEmbedding is found with its terms in any order, for whole heads and for the first elements of each, and in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

RNG = np.random.default_rng(0)
Raise = Callable[..., list[str]]
SETTINGS = settings(max_examples=30, deadline=None, derandomize=True)
FEEDS = {"x": RNG.standard_normal((2, 4, 3, 8), dtype=np.float32), "a": RNG.uniform(0, 6, (2, 3, 4)).astype(np.float32)}

HEADER = """g (float[B, 4, S, 8] x, float[B, S, 4] a) => (float[B, 4, S, 8] y)
    <int64[1] n0 = {0}, int64[1] n4 = {4}, int64[1] n8 = {8}, int64[1] minus4 = {-4}, int64[1] last = {3}, int64[1] one = {1},
     int64[1] behind = {-1}, int64[1] huge = {9223372036854775807}, float scale = {1.5}>"""
TABLES = """aa = Concat <axis = -1>(a, a) c0 = Cos(aa) s0 = Sin(aa) c1 = Mul(c0, scale) s1 = Mul(scale, s0)
    c = Unsqueeze(c1, one) s = Unsqueeze(s1, one)"""
HALVES = [
    "lo = Slice(x, n0, n4, last) hi = Slice(x, n4, huge, last)",
    "lo = Slice(x, n0, minus4, behind, one) hi = Slice(x, n4, n8, behind)",
    "lo, hi = Split <axis = -1>(x)",
]
TURN = "neg = Neg(hi) turn = Concat <axis = -1>(neg, lo)"


@SETTINGS
@given(st.sampled_from(HALVES), st.permutations(["x", "c"]), st.permutations(["turn", "s"]), st.permutations(["p", "q"]))
def test_rotary_embedding(raised: Raise, halves: str, straight: list[str], crossed: list[str], terms: list[str]) -> None:
    body = f"{TABLES} {halves} {TURN} p = Mul({', '.join(straight)}) q = Mul({', '.join(crossed)}) y = Add({', '.join(terms)})"
    opset = 13 if "Split" in halves else 18
    assert raised(f"{HEADER} {{ {body} }}", opset=opset, **FEEDS)[-1] == "RotaryEmbedding"


SUM = "p = Mul(x, c) q = Mul(turn, s) y = Add(p, q)"
WRONG = {
    "the other quarter": f"{HALVES[0]} neg = Neg(lo) turn = Concat <axis = -1>(hi, neg) {SUM}",
    "halves not swapped": f"{HALVES[0]} neg = Neg(lo) turn = Concat <axis = -1>(neg, hi) {SUM}",
    "no sign": f"{HALVES[0]} turn = Concat <axis = -1>(hi, lo) {SUM}",
    "a difference": f"{HALVES[0]} {TURN} p = Mul(x, c) q = Mul(turn, s) y = Sub(p, q)",
    "another value": f"{HALVES[0]} {TURN} o = Sin(x) p = Mul(o, c) q = Mul(turn, s) y = Add(p, q)",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_rotary_embedding(raised: Raise, name: str) -> None:
    assert "RotaryEmbedding" not in raised(f"{HEADER} {{ {TABLES} {WRONG[name]} }}", **FEEDS)


def test_tables_whose_halves_differ(raised: Raise) -> None:
    tables = TABLES.replace("Concat <axis = -1>(a, a)", "Concat <axis = -1>(a, b)").replace("aa =", "b = Neg(a) aa =", 1)
    assert "RotaryEmbedding" not in raised(f"{HEADER} {{ {tables} {HALVES[0]} {TURN} {SUM} }}", **FEEDS)


def test_one_table_for_all_rows(raised: Raise) -> None:
    """The op takes a table for each row, so the one there is is expanded, once for all heads and layers."""
    text = f"{HEADER.replace('float[B, S, 4] a', 'float[1, S, 4] a')} {{ {TABLES} {HALVES[0]} {TURN} {SUM} }}"
    ops = raised(text, **{**FEEDS, "a": FEEDS["a"][:1]})
    assert ops.count("RotaryEmbedding") == 1
    assert ops.count("Expand") == 2  # cosines and sines


@pytest.mark.parametrize("inner", ["turn", "p", "q"])
def test_what_others_read_in_the_middle(raised: Raise, inner: str) -> None:
    text = HEADER.replace("8] y)", f"8] y, float[B, 4, S, 8] {inner})")
    assert "RotaryEmbedding" not in raised(f"{text} {{ {TABLES} {HALVES[0]} {TURN} {SUM} }}", **FEEDS)


PART = f"x = Slice(whole, n0, n8, last) rest = Slice(whole, n8, huge, last) {HALVES[0]} {TURN} {SUM.replace('y =', 'r =')}"
PART_HEADER = HEADER.replace("8] x", "12] whole").replace("8] y", "12] y")
WHOLE = {"whole": RNG.standard_normal((2, 4, 3, 12), dtype=np.float32), "a": FEEDS["a"]}


def test_the_first_elements_of_each_head(raised: Raise) -> None:
    ops = raised(f"{PART_HEADER} {{ {TABLES} {PART} y = Concat <axis = -1>(r, rest) }}", **WHOLE)
    assert ops[-1] == "RotaryEmbedding"
    assert ops.count("Concat") == 1  # that of the angles


def test_the_turned_elements_put_behind_the_rest(raised: Raise) -> None:
    ops = raised(f"{PART_HEADER} {{ {TABLES} {PART} y = Concat <axis = -1>(rest, r) }}", **WHOLE)
    assert ops[-1] == "Concat"
    assert "RotaryEmbedding" in ops


# Whole sentences: layouts, pairs, tables and ways to turn, each written in several ways.

SHAPES = {"heads first": (2, 3, 5, 8), "time first": (2, 5, 3, 8), "no heads": (2, 5, 8)}
DIMS = {"heads first": "B, 3, S", "time first": "B, S, 3", "no heads": "B, S"}
NAMES = """<int64[1] n0 = {0}, int64[1] n1 = {1}, int64[1] n2 = {2}, int64[1] n3 = {3}, int64[1] n4 = {4}, int64[1] n8 = {8},
    int64[1] minus1 = {-1}, int64[1] huge = {9223372036854775807}, int64 i0 = {0}, int64 i1 = {1}, float minus = {-1.0},
    float scale = {1.5}, int64[2] halves = {4, 4}, int64[8] twice = {0, 0, 1, 1, 2, 2, 3, 3}, int64[5] pairs5 = {0, 0, 0, -1, 2},
    int64[4] pairs4 = {0, 0, -1, 2}, int64[4] whole4 = {0, 0, 0, 8}, int64[3] whole3 = {0, 0, 8}>"""


def tables(draw: st.DrawFn, layout: str, interleaved: bool) -> str:
    """Text that computes tables `c`, `s` [rows, …, 8], equal in pairs, and `ch`, `sh` [rows, …, 4], each number once, from angles `a`."""
    axis = {"heads first": "n1", "time first": "n2", "no heads": None}[layout]

    def put(name: str) -> str:
        return f"{name} = Unsqueeze({name}3, {axis})" if axis else f"{name} = Identity({name}3)"

    scaled = draw(st.sampled_from(["Mul(scale, {0})", "Mul({0}, scale)", "Div({0}, scale)", "Identity({0})"]))
    wide = draw(st.sampled_from([
        "w = Gather <axis = -1>(a, twice)",
        "au = Unsqueeze(a, minus1) aw = Concat <axis = -1>(au, au) w = Reshape(aw, whole3)",
    ])) if interleaved else "w = Concat <axis = -1>(a, a)"  # fmt: skip
    one = f"{wide} c1 = Cos(w) s1 = Sin(w) c3 = {scaled.format('c1')} s3 = {scaled.format('s1')} {put('c')} {put('s')}"
    return f"{one} g1 = Cos(a) h1 = Sin(a) ch3 = {scaled.format('g1')} sh3 = {scaled.format('h1')} {put('ch')} {put('sh')}"


@st.composite
def rotations(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model that turns x [layout, 8], and feeds for it."""
    layout = draw(st.sampled_from(list(SHAPES)))
    interleaved, rows = draw(st.booleans()), draw(st.sampled_from(["B", "1"]))
    text = tables(draw, layout, interleaved)
    axis = len(SHAPES[layout]) - 1
    last = f"n{axis}"
    if interleaved:
        pairs = "pairs4" if layout == "no heads" else "pairs5"
        parts = draw(st.sampled_from([
            f"a1 = Slice(x, n0, huge, {last}, n2) b1 = Slice(x, n1, huge, {last}, n2)",
            f"xp = Reshape(x, {pairs}) a1 = Gather <axis = -1>(xp, i0) b1 = Gather <axis = -1>(xp, i1)",
            f"xp = Reshape(x, {pairs}) xa, xb = Split <axis = -1, num_outputs = 2>(xp) a1 = Squeeze(xa, minus1) b1 = Squeeze(xb, minus1)",
        ]))  # fmt: skip
        whole = "whole3" if layout == "no heads" else "whole4"
        join = "{2}u = Unsqueeze({0}, minus1) {2}v = Unsqueeze({1}, minus1) {2}w = Concat <axis = -1>({2}u, {2}v) {2} = Reshape({2}w, "
        join += whole + ")"
    else:
        parts = draw(st.sampled_from([
            f"a1 = Slice(x, n0, n4, {last}) b1 = Slice(x, n4, n8, {last})",
            "a1, b1 = Split <axis = -1>(x, halves)",
            "a1, b1 = Split <axis = -1, num_outputs = 2>(x)",
        ]))  # fmt: skip
        join = "{2} = Concat <axis = -1>({0}, {1})"
    negated = draw(st.sampled_from(["Neg({0})", "Mul({0}, minus)", "Mul(minus, {0})"]))

    def product(x: str, y: str) -> str:
        return f"Mul({', '.join(draw(st.permutations([x, y])))})"

    if draw(st.booleans()):  # x · cos + turned x · sin
        body = f"nb = {negated.format('b1')} {join.format('nb', 'a1', 'turn')} p = {product('x', 'c')} q = {product('turn', 's')} "
        body += f"y = Add({', '.join(draw(st.permutations(['p', 'q'])))})"
    else:  # the two elements of a pair apart
        body = f"p = {product('a1', 'ch')} q = {product('b1', 'sh')} r = {product('b1', 'ch')} t = {product('a1', 'sh')} "
        first = draw(st.sampled_from(["y1 = Sub(p, q)", "nq = Neg(q) y1 = Add(p, nq)", "nq = Neg(q) y1 = Add(nq, p)"]))
        body += f"{first} y2 = Add({', '.join(draw(st.permutations(['r', 't'])))}) {join.format('y1', 'y2', 'y')}"
    header = f"g (float[{DIMS[layout]}, 8] x, float[{rows}, S, 4] a) => (float[{DIMS[layout]}, 8] y) {NAMES}"
    feeds = {
        "x": RNG.standard_normal(SHAPES[layout], dtype=np.float32),
        "a": RNG.uniform(0, 6, (2 if rows == "B" else 1, 5, 4)).astype(np.float32),
    }
    return f"{header} {{ {text} {parts} {body} }}", feeds


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rotations())
def test_spellings(raised: Raise, case: tuple[str, dict[str, Any]]) -> None:
    text, feeds = case
    ops = raised(text, **feeds)
    assert ops.count("RotaryEmbedding") == 1
    assert not {"Neg", "Sub"} & set(ops)


def test_a_table_that_is_gathered_by_position(raised: Raise) -> None:
    """[positions, dim] of cosines and sines one behind the other, as GPT-J keeps them, and pairs of neighbours."""
    sincos = " ".join(f"{float(number):.4f}," for number in np.concatenate([np.sin(angles()), np.cos(angles())], 1).reshape(-1))[:-1]
    text = f"""g (float[B, S, 3, 8] x, int64[B, S] p) => (float[B, S, 3, 8] y)
        <float[16, 8] sincos = {{{sincos}}}, int64[1] n0 = {{0}}, int64[1] n1 = {{1}}, int64[1] n2 = {{2}}, int64[1] n3 = {{3}},
         int64[1] huge = {{9223372036854775807}}, int64[1] minus1 = {{-1}}, int64[8] twice = {{0, 0, 1, 1, 2, 2, 3, 3}},
         int64[4] whole4 = {{0, 0, 0, 8}}> {{
        t = Gather(sincos, p) sin, cos = Split <axis = -1, num_outputs = 2>(t)
        s2 = Gather <axis = -1>(sin, twice) c2 = Gather <axis = -1>(cos, twice) s = Unsqueeze(s2, n2) c = Unsqueeze(c2, n2)
        a = Slice(x, n0, huge, n3, n2) b = Slice(x, n1, huge, n3, n2) nb = Neg(b) u = Unsqueeze(nb, minus1) v = Unsqueeze(a, minus1)
        w = Concat <axis = -1>(u, v) turn = Reshape(w, whole4) k = Mul(x, c) l = Mul(turn, s) y = Add(k, l) }}"""
    feeds = {"x": RNG.standard_normal((2, 5, 3, 8), dtype=np.float32), "p": np.arange(10).reshape(2, 5)}
    assert raised(text, **feeds).count("RotaryEmbedding") == 1


def angles() -> Any:
    return np.arange(16)[:, None] * 0.3 ** np.arange(4)


@pytest.mark.parametrize("rows", [16, 100])
def test_constant_tables(raised: Raise, rows: int) -> None:
    """Equal halves are seen in the numbers, and a number that differs too."""
    for spoiled in (False, True):
        cosines, sines = (np.tile(f(np.arange(rows)[:, None] * 0.3 ** np.arange(4)), 2).astype(np.float32) for f in (np.cos, np.sin))
        if spoiled:
            cosines[-1, -1] += 0.5
        initializers = ", ".join(f"float[1, 1, {rows}, 8] {name} = {{{', '.join(map(str, table.reshape(-1)))}}}"
                                 for name, table in (("c", cosines), ("s", sines)))  # fmt: skip
        text = f"g (float[B, 4, {rows}, 8] x) => (float[B, 4, {rows}, 8] y) <{initializers}, int64[1] n0 = {{0}}, int64[1] n4 = {{4}}, " \
               f"int64[1] n8 = {{8}}, int64[1] last = {{3}}> {{ {HALVES[0].replace('huge', 'n8')} {TURN} {SUM} }}"  # fmt: skip
        ops = raised(text, x=RNG.standard_normal((2, 4, rows, 8), dtype=np.float32))
        assert ("RotaryEmbedding" in ops) == (not spoiled)
