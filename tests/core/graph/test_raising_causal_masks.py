"""A mask that says no more than that a query sees no later key becomes the attribute `is_causal`; one that says more is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from miniort import InferenceSession, SessionOptions

RNG = np.random.default_rng(0)
FEEDS = {name: RNG.standard_normal((2, 4, 5, 8), dtype=np.float32) for name in "qkv"}
PADDING = np.array([[True] * 5, [True, True, True, False, False]])[:, None, None]

HEADER = """g (float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v, bool[B, 1, 1, S] padding) => (float[B, 4, S, 8] y)
    <float quarter = {0.25}, float zero = {0.0}, float low = {-3.4028234663852886e38}, float two = {2.0}, float thousands = {-10000.0},
     int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2}, int64[1] a3 = {3},
     int64[2] column = {-1, 1}, bool always = {1}, bool[1, 1, 6, 6] triangle = {TRIANGLE}>""".replace(
    "TRIANGLE", ", ".join(str(int(x)) for x in np.tri(6, dtype=int).reshape(-1))
)
POSITIONS = "sq = Shape(q) n = Gather(sq, i2) nn = Unsqueeze(n, a0) r = Range(i0, n, i1) rows = Reshape(r, column) big = Mul(low, two)"
SCORES = "kt = Transpose <perm = [0, 1, 3, 2]>(k) p = MatMul(q, kt) s = Mul(p, quarter)"
ENDING = "w = Softmax <axis = -1>(m) y = MatMul(w, v)"

CONDITIONS = {  # `seen`: whether a query sees a key
    "less or equal": "seen = LessOrEqual(r, rows)",
    "greater or equal": "seen = GreaterOrEqual(rows, r)",
    "less by one": "r1 = Add(rows, i1) seen = Less(r, r1)",
    "not greater": "later = Greater(r, rows) seen = Not(later)",
    "not less": "later = Less(rows, r) seen = Not(later)",
    "four axes": "r3 = Unsqueeze(r, a0) r4 = Unsqueeze(r3, a0) r5 = Unsqueeze(r4, a0) q3 = Unsqueeze(rows, a0) seen = LessOrEqual(r5, q3)",
    "as floats": "f = Cast <to = 1>(r) g = Cast <to = 1>(rows) seen = LessOrEqual(f, g)",
    "a triangle": "t1 = Slice(triangle, a0, nn, a2) seen = Slice(t1, a0, nn, a3)",
}
MASKS = {
    "added -inf": "b = Where(seen, zero, big) m = Add(s, b)",
    "added lowest": "b = Where(seen, zero, low) m = Add(b, s)",
    "replaced by -inf": "m = Where(seen, s, big)",
    "replaced by -10,000": "m = Where(seen, s, thousands)",
    "filled": "no = Not(seen) m = Where(no, low, s)",
}


def attentions(text: str, feeds: dict[str, Any] | None = None) -> list[tuple[int, int]]:
    """For each Attention, whether it's causal by attribute and how many inputs it has, of a model that gives what it gave."""
    proto: onnx.ModelProto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    given = {**FEEDS, "padding": PADDING, **(feeds or {})}
    plain, raised = (InferenceSession(proto, SessionOptions(level), providers=["cpu"]) for level in ("none", "all"))
    wanted, actual = (session.run(None, given)[0] for session in (plain, raised))
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    nodes = [node for node in raised.model.graph if node.op_type == "Attention"]
    return [(node.attributes["is_causal"].as_int() if "is_causal" in node.attributes else 0, len(node.inputs)) for node in nodes]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_causal_by_position(condition: str, mask: str) -> None:
    assert attentions(f"{HEADER} {{ {POSITIONS} {SCORES} {CONDITIONS[condition]} {MASKS[mask]} {ENDING} }}") == [(1, 3)]


TRIANGLE = "t1 = Slice(triangle, a0, nn, a2) t2 = Slice(t1, a0, nn, a3) b = Cast <to = 1>(t2)"
MULTIPLIED = "sb = Mul(s, b) nb = Sub(one, b) c = Mul(nb, many) m = Sub(sb, c)"


def test_a_triangle_multiplied_in() -> None:
    """s · b - 10,000 · (1 - b), as GPT-2 was written first."""
    header = HEADER.replace("<float quarter", "<float one = {1.0}, float many = {10000.0}, float quarter")
    assert attentions(f"{header} {{ {POSITIONS} {SCORES} {TRIANGLE} {MULTIPLIED} {ENDING} }}") == [(1, 3)]
    other = MULTIPLIED.replace("m = Sub(sb, c)", "t = Sub(sb, c) p0 = Where(padding, zero, low) m = Add(t, p0)")
    assert attentions(f"{header} {{ {POSITIONS} {SCORES} {TRIANGLE} {other} {ENDING} }}") == []
    small = header.replace("many = {10000.0}", "many = {10.0}")
    assert attentions(f"{small} {{ {POSITIONS} {SCORES} {TRIANGLE} {MULTIPLIED} {ENDING} }}") == []


def test_a_triangle_multiplied_in_behind_a_past() -> None:
    """Then it's the lower part of a triangle: a mask of its own."""
    header = HEADER.replace("<float quarter", "<float one = {1.0}, float many = {10000.0}, float quarter").replace(
        "k, float", "new, float[B, 4, P, 8] past, float"
    )
    text = f"""{header} {{ k = Concat <axis = 2>(past, new) v2 = Concat <axis = 2>(past, v) {POSITIONS} {SCORES} sp = Shape(past)
        start = Gather(sp, a2) end = Add(start, nn) t1 = Slice(triangle, start, end, a2) t2 = Slice(t1, a0, end, a3) b = Cast <to = 1>(t2)
        {MULTIPLIED} w = Softmax <axis = -1>(m) y = MatMul(w, v2) }}"""
    short = {name: value[:, :, :2] for name, value in FEEDS.items()}
    feeds = {"q": short["q"], "new": short["k"], "v": short["v"], "past": FEEDS["k"][:, :, :3], "padding": PADDING[..., :2]}
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    plain, raised = (InferenceSession(proto, SessionOptions(level), providers=["cpu"]) for level in ("none", "all"))
    np.testing.assert_allclose(raised.run(None, feeds)[0], plain.run(None, feeds)[0], rtol=1e-5, atol=1e-5)
    (node,) = [node for node in raised.model.graph if node.op_type == "Attention"]
    assert node.inputs[3] is not None
    assert node.inputs[3].dtype == 9


def test_padding_is_what_is_left() -> None:
    body = f"{CONDITIONS['less or equal']} a = And(always, seen) both = And(a, padding) b = Where(both, zero, big) m = Add(s, b)"
    assert attentions(f"{HEADER} {{ {POSITIONS} {SCORES} {body} {ENDING} }}") == [(1, 4)]
    apart = f"{CONDITIONS['less or equal']} b = Where(padding, zero, low) t = Add(s, b) c = Where(seen, zero, big) m = Add(t, c)"
    assert attentions(f"{HEADER} {{ {POSITIONS} {SCORES} {apart} {ENDING} }}") == [(1, 4)]


@pytest.mark.parametrize("number", ["low", "thousands"])
def test_numbers_that_add_up(number: str) -> None:
    """A query whose only key is padding: what it gives depends on the numbers, so they are kept, or the long form is."""
    body = f"{CONDITIONS['less or equal']} b = Where(padding, zero, low) t = Where(seen, s, {number}) m = Add(t, b)"
    feeds = {"padding": PADDING[..., ::-1]}
    assert attentions(f"{HEADER} {{ {POSITIONS} {SCORES} {body} {ENDING} }}", feeds) == ([(0, 4)] if number == "low" else [])


KEPT = {
    "a later key too": "r1 = Add(rows, i1) seen = LessOrEqual(r, r1)",
    "earlier keys only": "seen = Less(r, rows)",
    "keys and queries swapped": "seen = LessOrEqual(rows, r)",
    "a window": "late = Sub(rows, i2) a = LessOrEqual(r, rows) c = Greater(r, late) seen = And(a, c)",
    "another part of a triangle": "n1 = Add(nn, a1) t1 = Slice(triangle, a1, n1, a2) seen = Slice(t1, a0, nn, a3)",
}


@pytest.mark.parametrize("name", KEPT)
def test_what_says_something_else_is_kept(name: str) -> None:
    assert attentions(f"{HEADER} {{ {POSITIONS} {SCORES} {KEPT[name]} {MASKS['added lowest']} {ENDING} }}") == [(0, 4)]


def test_queries_behind_a_past_keep_their_mask() -> None:
    """The op counts from the first key unless it's given the past."""
    header = HEADER.replace("k, float", "new, float[B, 4, P, 8] past, float")
    text = f"""{header} {{ k = Concat <axis = 2>(past, new) v2 = Concat <axis = 2>(past, v)
        {POSITIONS} {SCORES} sp = Shape(past) start = Gather(sp, i2) end = Add(start, n) all = Range(i0, end, i1)
        own = Range(start, end, i1) mine = Reshape(own, column) seen = LessOrEqual(all, mine) m = Where(seen, s, big)
        w = Softmax <axis = -1>(m) y = MatMul(w, v2) }}"""
    feeds = {"past": RNG.standard_normal((2, 4, 3, 8), dtype=np.float32), "new": FEEDS["k"]}
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    given = {"q": FEEDS["q"], "v": FEEDS["v"], "padding": PADDING, **feeds}
    plain, raised = (InferenceSession(proto, SessionOptions(level), providers=["cpu"]) for level in ("none", "all"))
    np.testing.assert_allclose(raised.run(None, given)[0], plain.run(None, given)[0], rtol=1e-5, atol=1e-5)
    (node,) = [node for node in raised.model.graph if node.op_type == "Attention"]
    assert "is_causal" not in node.attributes
    assert node.inputs[3] is not None
    assert node.inputs[3].dtype == 9
