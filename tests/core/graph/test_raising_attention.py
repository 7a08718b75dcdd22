"""Attention is found from the Softmax outwards, however scores are scaled, masked and cast and however keys are repeated and turned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, heads, length, 8), dtype=np.float32) for heads, length in ((4, 3), (2, 5), (2, 5)))
SEEN = RNG.random((2, 1, 3, 5)) < 0.6
SEEN[0, 0, 1] = False  # a query that may see nothing
SEEN[1, 0, 2] = True
Raise = Callable[..., list[str]]
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)

HEADER = """g (float[B, 4, S, 8] q, float[B, 2, T, 8] k0, float[B, 2, T, 8] v0, bool[B, 1, S, T] seen) => (float[B, 4, S, 8] y)
    <float quarter = {0.25}, float four = {4.0}, float half = {0.5}, float two = {2.0}, float zero = {0.0}, float[1] zero1 = {0.0},
     float low = {-3.4028234663852886e38}, int64[1] axis2 = {2}, int64[4] merged = {0, 4, -1, 8}, int64 i0 = {0}, int64 i2 = {2},
     int64[1] n2 = {2}, int64[1] n4 = {4}, int64[1] n8 = {8}, int64[1] minus = {-1}, int64[1] a0 = {0}>"""
MINUS_INFINITY = "big = Mul(low, two) "
"""-inf, which the text form can't write."""


def repeated(name: str, spelling: int) -> str:
    """Keys or values whose two heads are repeated for the four of the queries: `k0` -> `k`, `v0` -> `v`."""
    source = f"{name}0"
    sizes = f"""{name}s = Shape({source}) {name}b = Gather({name}s, i0) {name}bb = Unsqueeze({name}b, a0) {name}l = Gather({name}s, i2)
        {name}ll = Unsqueeze({name}l, a0) {name}e = Concat <axis = 0>({name}bb, n2, n2, {name}ll, n8)"""
    merge = [
        f"{name}m = Concat <axis = 0>({name}bb, n4, {name}ll, n8)",
        f"{name}m = Identity(merged)",
        f"{name}m = Concat <axis = 0>({name}bb, n4, minus, n8)",
    ][spelling]
    return f"{sizes} {merge} {name}u = Unsqueeze({source}, axis2) {name}x = Expand({name}u, {name}e) {name} = Reshape({name}x, {name}m)"


SCALED = [
    "kt = Transpose <perm = [0, 1, 3, 2]>(k) p = MatMul(q, kt) s = Mul(p, quarter)",
    "kt = Transpose <perm = [0, 1, 3, 2]>(k) p = MatMul(q, kt) s = Div(p, four)",
    "kt = Transpose <perm = [0, 1, 3, 2]>(k) qq = Mul(quarter, q) s = MatMul(qq, kt)",
    "kt = Transpose <perm = [0, 1, 3, 2]>(k) qq = Mul(q, half) kk = Mul(kt, half) s = MatMul(qq, kk)",
    "kh = Mul(k, half) kt = Transpose <perm = [0, 1, 3, 2]>(kh) qq = Div(q, two) s = MatMul(qq, kt)",
    "kt = Transpose <perm = [0, 1, 3, 2]>(k) p = MatMul(q, kt) i = Identity(p) d = Sqrt(four) e = Div(i, d) s = Div(e, two)",
]
MASKED = [
    "w = Where(seen, zero1, big) m = Add(s, w)",
    "w = Where(seen, zero, low) m = Add(w, s)",
    "m = Where(seen, s, big)",
    "m = Where(seen, s, low)",
    "not = Not(seen) m = Where(not, low, s)",
    "m = Identity(s)",
    "f = Cast <to = 1>(seen) m = Add(s, f)",
    "w = Where(seen, zero, low) f = Cast <to = 1>(seen) n = Add(f, s) m = Add(n, w)",
]
GUARD = "o = Softmax <axis = -1>(m) nan = IsNaN(o) a = Where(nan, zero, o)"
REPEATS = st.sampled_from([0, 1, 2])


@SETTINGS
@given(REPEATS, REPEATS, st.sampled_from(SCALED), st.sampled_from(MASKED))
def test_attention(raised: Raise, keys: int, values: int, scaled: str, masked: str) -> None:
    body = " ".join([MINUS_INFINITY, repeated("k", keys), repeated("v", values), scaled, masked, GUARD, "y = MatMul(a, v)"])
    ops = raised(f"{HEADER} {{ {body} }}", q=Q, k0=K, v0=V, seen=SEEN)
    assert ops.count("Attention") == 1
    assert not {"Softmax", "IsNaN", "MatMul", "Shape", "Gather", "Expand", "Transpose"} & set(ops)


def plain(*parts: str, outputs: str = "float[B, 4, S, 8] y") -> str:
    """The graph for keys and values of four heads that need no repeats."""
    header = HEADER.replace("2, T, 8] k0", "4, T, 8] k").replace("2, T, 8] v0", "4, T, 8] v").replace("float[B, 4, S, 8] y", outputs)
    return f"{header} {{ {MINUS_INFINITY} {' '.join(parts)} }}"


FOUR = {"q": Q, "k": np.repeat(K, 2, 1), "v": np.repeat(V, 2, 1), "seen": SEEN}
FINITE = "o = Softmax <axis = 3>(m)"


def test_no_guard(raised: Raise) -> None:
    assert "Attention" in raised(plain(SCALED[0], MASKED[1], FINITE, "y = MatMul(o, v)"), **FOUR)


def test_the_axis_left_out(raised: Raise) -> None:
    """The last one since opset 13, and all but the first before."""
    text = plain(SCALED[0], MASKED[1], "o = Softmax(m)", "y = MatMul(o, v)")
    assert "Attention" in raised(text, **FOUR)
    assert "Attention" not in raised(text, opset=12, **FOUR)


def test_a_condition_is_handed_on_as_it_is(raised: Raise) -> None:
    assert raised(plain(SCALED[0], MASKED[0], GUARD, "y = MatMul(a, v)"), **FOUR) == ["Attention"]
    assert raised(plain(SCALED[3], MASKED[2], GUARD, "y = MatMul(a, v)"), **FOUR) == ["Attention"]


def test_a_soft_cap(raised: Raise) -> None:
    cap = "capped = Div(s, four) tanh = Tanh(capped) c = Mul(four, tanh) w = Where(seen, zero, low) m = Add(c, w)"
    assert raised(plain(SCALED[0], cap, FINITE, "y = MatMul(o, v)"), **FOUR) == ["Where", "Attention"]


def test_keys_in_the_order_of_a_projection(raised: Raise) -> None:
    """[batch, time, heads, dim] turned to [batch, heads, dim, time] at once: what's left is the turn to [batch, heads, time, dim]."""
    turned = "kt = Transpose <perm = [0, 2, 3, 1]>(k) s = MatMul(q, kt) m = Mul(s, quarter)"
    text = plain(turned, FINITE, "y = MatMul(o, v)").replace("float[B, 4, T, 8] k", "float[B, T, 4, 8] k")
    assert raised(text, **{**FOUR, "k": FOUR["k"].transpose(0, 2, 1, 3)}) == ["Transpose", "Attention"]


def test_keys_that_come_turned(raised: Raise) -> None:
    text = plain("s = MatMul(q, k) m = Mul(s, quarter)", FINITE, "y = MatMul(o, v)").replace("float[B, 4, T, 8] k", "float[B, 4, 8, T] k")
    assert raised(text, **{**FOUR, "k": FOUR["k"].transpose(0, 1, 3, 2)}) == ["Transpose", "Attention"]


def test_keys_turned_with_batch_and_heads_merged(raised: Raise) -> None:
    """What torch's exporter writes: [batch · heads, time, dim] turned, and split again."""
    turned = """ks = Shape(k) kb = Gather(ks, a0) kt0 = Gather(ks, axis2) flat = Concat <axis = 0>(minus, kt0, n8) k3 = Reshape(k, flat)
        k3t = Transpose <perm = [0, 2, 1]>(k3) back = Concat <axis = 0>(kb, n4, n8, kt0) kt = Reshape(k3t, back) p = MatMul(q, kt)
        m = Mul(p, quarter)"""
    assert raised(plain(turned, FINITE, "y = MatMul(o, v)"), **FOUR) == ["Attention"]


def test_the_softmax_in_float32(raised: Raise) -> None:
    text = """g (float16[B, 4, S, 8] q, float16[B, 4, T, 8] k, float16[B, 4, T, 8] v) => (float16[B, 4, S, 8] y) <float h32 = {0.5}> {
        half = Cast <to = 10>(h32)
        kt = Transpose <perm = [0, 1, 3, 2]>(k) p = MatMul(q, kt) s = Mul(p, half) w = Cast <to = 1>(s) o = Softmax <axis = -1>(w)
        n = Cast <to = 10>(o) y = MatMul(n, v) }"""
    assert raised(text, tolerance=5e-3, **{name: FOUR[name].astype(np.float16) for name in "qkv"}) == ["Attention"]


def test_values_in_float32_as_well(raised: Raise) -> None:
    text = """g (float16[B, 4, S, 8] q, float16[B, 4, T, 8] k, float16[B, 4, T, 8] v) => (float[B, 4, S, 8] y) <float h32 = {0.5}> {
        half = Cast <to = 10>(h32)
        kt = Transpose <perm = [0, 1, 3, 2]>(k) p = MatMul(q, kt) s = Mul(p, half) w = Cast <to = 1>(s) o = Softmax <axis = -1>(w)
        x = Cast <to = 1>(v) y = MatMul(o, x) }"""
    assert raised(text, tolerance=5e-3, **{name: FOUR[name].astype(np.float16) for name in "qkv"}) == ["Attention", "Cast"]


@pytest.mark.parametrize("inner", ["p", "s", "m", "o", "a"])
def test_scores_that_others_read_stay(raised: Raise, inner: str) -> None:
    outputs = f"float[B, 4, S, 8] y, float[B, 4, S, T] {inner}"
    assert "Attention" not in raised(plain(SCALED[0], MASKED[1], GUARD, "y = MatMul(a, v)", outputs=outputs), **FOUR)
    read = plain(SCALED[0], MASKED[1], GUARD, f"y = MatMul(a, v) z = Abs({inner})", outputs="float[B, 4, S, 8] y, float[B, 4, S, T] z")
    assert "Attention" not in raised(read, **FOUR)


def test_repeats_that_others_read_stay_and_are_not_read(raised: Raise) -> None:
    body = " ".join([repeated("k", 0), repeated("v", 0), SCALED[0], "o = Softmax <axis = -1>(s) y = MatMul(o, v) z = Neg(k)"])
    text = HEADER.replace("8] y)", "8] y, float[B, 4, T, 8] z)")
    ops = raised(f"{text} {{ {body} }}", q=Q, k0=K, v0=V, seen=SEEN)
    assert ops.count("Attention") == ops.count("Expand") == 1


WRONG = {
    "a low number that isn't low enough": (
        SCALED[0],
        "ten = Mul(four, four) t = Neg(ten) m = Where(seen, s, t)",
        GUARD,
        "y = MatMul(a, v)",
    ),
    "a guard with another number": (
        SCALED[0],
        MASKED[0],
        "o = Softmax <axis = -1>(m) nan = IsNaN(o) a = Where(nan, half, o)",
        "y = MatMul(a, v)",
    ),
    "another axis": (SCALED[0], MASKED[1], "o = Softmax <axis = 2>(m)", "y = MatMul(o, v)"),
    "a mask under the scale": (SCALED[0], "f = Cast <to = 1>(seen) n = Add(s, f) m = Mul(n, half)", FINITE, "y = MatMul(o, v)"),
    "a scale below zero": (SCALED[0], "l = Neg(four) m = Mul(s, l)", FINITE, "y = MatMul(o, v)"),
    "a factor for each head": (SCALED[0], "m = Mul(s, heads)", FINITE, "y = MatMul(o, v)"),
    "a cap that isn't undone": (
        SCALED[0],
        "t = Tanh(s) w = Where(seen, zero, low) m = Add(t, w) ",
        FINITE,
        "y1 = MatMul(o, v) y = Mul(y1, two)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_attention(raised: Raise, name: str) -> None:
    text = plain(*WRONG[name]).replace("<float quarter", "<float[1, 4, 1, 1] heads = {1, 2, 3, 4}, float quarter")
    ops = raised(text, **FOUR)
    assert "Attention" not in ops


def test_a_mask_with_one_number_for_all_keys(raised: Raise) -> None:
    """The op would take a last axis of 1 for a mask of the first key alone."""
    text = plain(SCALED[0], "f = Cast <to = 1>(seen) m = Add(s, f)", FINITE, "y = MatMul(o, v)").replace(
        "bool[B, 1, S, T]", "bool[B, 1, S, 1]"
    )
    assert "Attention" not in raised(text, **{**FOUR, "seen": SEEN[..., :1]})


def test_one_batch_of_keys_for_all_queries(raised: Raise) -> None:
    """MatMul repeats it; the op wouldn't."""
    text = plain(SCALED[0], "m = Identity(s)", FINITE, "y = MatMul(o, v)").replace("[B, 4, T", "[1, 4, T")
    assert "Attention" not in raised(text, **{**FOUR, "k": FOUR["k"][:1], "v": FOUR["v"][:1]})


def test_products_written_as_sums_over_axes(raised: Raise) -> None:
    """Einsum over [batch, time, heads, dim], as code with named axes is exported."""
    text = """g (float[B, S, 4, 8] q, float[B, T, 4, 8] k, float[B, T, 4, 8] v) => (float[B, S, 4, 8] y) <float quarter = {0.25}> {
        s = Einsum <equation = "bqhd,bkhd->bhqk">(q, k) m = Mul(s, quarter) w = Softmax <axis = -1>(m)
        y = Einsum <equation = "bhqk,bkhd->bqhd">(w, v) }"""
    ops = raised(text, **{name: FOUR[name].transpose(0, 2, 1, 3) for name in "qkv"})
    assert ops.count("Attention") == 1
    assert set(ops) == {"Attention", "Transpose"}


def test_keys_in_a_cache_that_is_turned(raised: Raise) -> None:
    """Keys [batch · heads, dim, time] and an ALiBi bias for each head, as BLOOM's exports have them."""
    text = """g (float[B, 4, S, 8] q, float[B, 4, 8, T] k, float[B, 4, T, 8] v, float[B, 4, 1, T] alibi, bool[B, 1, S, T] seen)
        => (float[B, 4, S, 8] y) <float quarter = {0.25}, float one = {1.0}, float low = {-3.4028234663852886e38}, int64[1] i0 = {0},
         int64[1] i2 = {2}, int64[1] n4 = {4}, int64[1] n8 = {8}, int64[1] minus = {-1}> {
        sq = Shape(q) b = Gather(sq, i0) s = Gather(sq, i2) n = Mul(b, n4) sk = Shape(v) t = Gather(sk, i2)
        flat = Concat <axis = 0>(n, s, n8) q3 = Reshape(q, flat) kd = Concat <axis = 0>(n, n8, t) k3 = Reshape(k, kd)
        vd = Concat <axis = 0>(n, t, n8) v3 = Reshape(v, vd) ad = Concat <axis = 0>(n, i, t) a3 = Reshape(alibi, ad)
        p = MatMul(q3, k3) scaled = Mul(quarter, p) beta = Mul(a3, one) biased = Add(beta, scaled)
        four = Concat <axis = 0>(b, n4, s, t) m4 = Reshape(biased, four) no = Not(seen) masked = Where(no, low, m4)
        w = Softmax <axis = -1>(masked) rows = Concat <axis = 0>(n, s, t) w3 = Reshape(w, rows) o = MatMul(w3, v3)
        back = Concat <axis = 0>(b, n4, s, n8) y = Reshape(o, back) }""".replace("int64[1] minus", "int64[1] i = {1}, int64[1] minus")
    alibi = RNG.standard_normal((2, 4, 1, 5), dtype=np.float32)
    seen = SEEN.copy()
    seen[0, 0, 1, 0] = True
    feeds = {**FOUR, "k": FOUR["k"].transpose(0, 1, 3, 2), "alibi": alibi, "seen": seen}
    assert raised(text, **feeds).count("Attention") == 1


def test_an_encoder(raised: Raise) -> None:
    """BERT's: a mask of [batch, time] made (1 - mask) · -10,000, queries and keys of one value, no past."""
    text = """g (float[B, T, 32] x, int64[B, T] mask) => (float[B, T, 32] y) <int64[4] heads = {0, 0, 4, 8}, int64[3] merged = {0, 0, 32},
        int64[1] a1 = {1}, int64[1] a2 = {2}, float one = {1.0}, float low = {-10000.0}, float root = {2.8284271247461903}> {
        u = Unsqueeze(mask, a1) w = Unsqueeze(u, a2) f = Cast <to = 1>(w) r = Sub(one, f) bias = Mul(r, low)
        h = Reshape(x, heads) q = Transpose <perm = [0, 2, 1, 3]>(h) kt = Transpose <perm = [0, 2, 3, 1]>(h)
        s = MatMul(q, kt) d = Div(s, root) m = Add(d, bias) p = Softmax <axis = -1>(m) o = MatMul(p, q)
        t = Transpose <perm = [0, 2, 1, 3]>(o) y = Reshape(t, merged) }"""
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    ops = raised(text, x=RNG.standard_normal((2, 5, 32), dtype=np.float32), mask=mask)
    assert ops.count("Attention") == 1
    assert not {"Softmax", "MatMul"} & set(ops)


def test_one_head(raised: Raise) -> None:
    """Attention over [batch, time, dim], to keys of another length, as in an image's decoder."""
    text = """g (float[B, S, 8] q, float[B, T, 8] k, float[B, T, 8] v) => (float[B, S, 8] y) <float root = {2.8284271247461903}> {
        kt = Transpose <perm = [0, 2, 1]>(k) s = MatMul(q, kt) d = Div(s, root) p = Softmax <axis = -1>(d) y = MatMul(p, v) }"""
    ops = raised(text, q=Q[:, 0], k=K[:, 0], v=V[:, 0])
    assert ops.count("Attention") == 1
