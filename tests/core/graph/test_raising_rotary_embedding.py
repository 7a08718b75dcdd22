"""RotaryEmbedding is found with its terms in any order, for whole heads and for the first elements of each, and in nothing else."""

from __future__ import annotations

from collections.abc import Callable

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
    """The op takes a table for each row."""
    text = f"{HEADER.replace('float[B, S, 4] a', 'float[1, S, 4] a')} {{ {TABLES} {HALVES[0]} {TURN} {SUM} }}"
    assert "RotaryEmbedding" not in raised(text, **{**FEEDS, "a": FEEDS["a"][:1]})


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
