"""Attention in whole sentences: every part of it is drawn from the ways in which exporters write that part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from onnx import parser

from miniort import InferenceSession, SessionOptions

Raise = Callable[..., list[str]]
HEADS, DIM, BATCH, NEW, PAST = 4, 8, 2, 3, 5

CONSTANTS = """<int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2}, int64[1] a3 = {3}, int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2},
    int64[1] n1 = {1}, int64[1] n2 = {2}, int64[1] n4 = {4}, int64[1] n8 = {8}, int64[1] minus1 = {-1},
    int64[4] gathered2 = {0, 0, 1, 1}, int64[4] gathered1 = {0, 0, 0, 0},
    int64[5] tiled2 = {1, 1, 2, 1, 1}, int64[5] tiled1 = {1, 1, 4, 1, 1},
    int64[5] tiled_time2 = {1, 1, 1, 2, 1}, int64[5] tiled_time1 = {1, 1, 1, 4, 1}, int64[4] heads4 = {0, 4, -1, 8},
    int64[4] heads_time = {0, 0, 4, 8},
    float quarter = {0.25}, float four = {4.0}, float half = {0.5}, float two = {2.0}, float zero = {0.0}, float[1] zero1 = {0.0},
    float one = {1.0}, float billion = {-1e9}, float low = {-3.4028234663852886e38}>"""
INFINITE = "big = Mul(low, two)"
"""-inf, which the text form can't write."""


class Sentence:
    """A graph in text that grows; every choice is drawn."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.parts = [INFINITE]
        self.count = 0

    def choose(self, *options: str) -> str:
        return self.draw(st.sampled_from(options))

    def add(self, expression: str) -> str:
        """A node; an identity behind it now and then."""
        name = self.name()
        self.parts.append(f"{name} = {expression}")
        if self.draw(st.integers(0, 9)) == 9:
            inner, name = name, self.name()
            self.parts.append(f"{name} = Identity({inner})")
        return name

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def swapped(self, op: str, a: str, b: str) -> str:
        return self.add(f"{op}({', '.join(self.draw(st.permutations([a, b])))})")

    def shape_of(self, value: str, *sizes: str) -> str:
        """A shape that is computed: numbers are axes of a value, the others names of vectors."""
        shape = self.add(f"Shape({value})")
        parts = []
        for size in sizes:
            if size.startswith("i"):
                taken = self.add(f"Gather({shape}, {size})")
                parts.append(self.add(f"Unsqueeze({taken}, a0)"))
            else:
                parts.append(size)
        return self.add(f"Concat <axis = 0>({', '.join(parts)})")

    def keys(self, name: str, kv_heads: int, past: bool, time_first: bool) -> str:
        """Keys or values [batch, 4, time, 8] out of new ones and perhaps a past, heads repeated."""
        value = name
        if past:
            if time_first:
                value = self.add(f"Transpose <perm = [0, 2, 1, 3]>({value})")
            self.parts.append(f"present_{name} = Concat <axis = {self.choose('2', '-2')}>(past_{name}, {value})")
            return self.repeated(f"present_{name}", kv_heads)
        if time_first:
            if kv_heads != HEADS and self.draw(st.booleans()):
                return self.add(f"Transpose <perm = [0, 2, 1, 3]>({self.repeated_in_time(value, kv_heads)})")
            value = self.add(f"Transpose <perm = [0, 2, 1, 3]>({value})")
        return self.repeated(value, kv_heads)

    def repeated(self, value: str, kv_heads: int) -> str:
        if kv_heads == HEADS:
            return value
        match self.choose("expand", "tile", "concat", "gather"):
            case "gather":
                return self.add(f"Gather <axis = 1>({value}, gathered{kv_heads})")
            case "expand":
                lifted = self.add(f"Unsqueeze({value}, a2)")
                target = self.shape_of(value, "i0", f"n{kv_heads}", f"n{HEADS // kv_heads}", "i2", "n8")
                many = self.add(f"Expand({lifted}, {target})")
            case "tile":
                many = self.add(f"Tile({self.add(f'Unsqueeze({value}, a2)')}, tiled{kv_heads})")
            case _:
                lifted = self.add(f"Unsqueeze({value}, a2)")
                many = self.add(f"Concat <axis = 2>({', '.join([lifted] * (HEADS // kv_heads))})")
        target = "heads4" if self.draw(st.booleans()) else self.shape_of(value, "i0", "n4", "i2", "n8")
        return self.add(f"Reshape({many}, {target})")

    def repeated_in_time(self, value: str, kv_heads: int) -> str:
        lifted = self.add(f"Unsqueeze({value}, a3)")
        many = self.add(f"Tile({lifted}, tiled_time{kv_heads})")
        return self.add(f"Reshape({many}, heads_time)")

    def merged(self, value: str) -> str:
        """[batch, heads, …] -> [batch · heads, …]."""
        return self.add(f"Reshape({value}, {self.shape_of(value, 'minus1', 'i2', 'n8')})")

    def scores(self, q: str, k: str, packed: bool) -> str:
        if packed:
            q, k = self.merged(q), self.merged(k)
        how = self.choose("product", "quotient", "queries", "both", "keys")
        if how in ("queries", "both"):
            q = self.swapped("Mul", q, "half" if how == "both" else "quarter")
        if how == "keys":
            k = self.swapped("Mul", k, "quarter")
        k = self.add(f"Transpose <perm = {'[0, 2, 1]' if packed else '[0, 1, 3, 2]'}>({k})")
        if how == "both":
            k = self.swapped("Mul", k, "half")
        scores = self.add(f"MatMul({q}, {k})")
        if how == "product":
            scores = self.swapped("Mul", scores, "quarter")
        return self.add(f"Div({scores}, four)") if how == "quotient" else scores

    def masked(self, scores: str) -> str:
        match self.choose("none", "add -inf", "add lowest", "where -inf", "where lowest", "fill", "both", "old", "bias"):
            case "none":
                return scores
            case "add -inf":
                return self.swapped("Add", scores, self.add("Where(seen, zero1, big)"))
            case "add lowest":
                return self.swapped("Add", scores, self.add("Where(seen, zero, low)"))
            case "where -inf":
                return self.add(f"Where(seen, {scores}, big)")
            case "where lowest":
                return self.add(f"Where(seen, {scores}, {self.choose('low', 'billion')})")
            case "fill":
                return self.add(f"Where({self.add('Not(seen)')}, {self.choose('big', 'low')}, {scores})")
            case "both":
                first = self.swapped("Add", scores, self.add("Where(seen, zero, low)"))
                return self.swapped("Add", first, "bias")
            case "old":  # (1 - mask) · lowest
                kept = self.add("Cast <to = 1>(seen)")
                return self.swapped("Add", scores, self.add(f"Mul({self.add(f'Sub(one, {kept})')}, low)"))
            case _:
                return self.swapped("Add", scores, "bias")

    def weights(self, scores: str) -> str:
        weights = self.add(f"Softmax <axis = {self.choose('-1', '3')}>({scores})")
        if self.draw(st.booleans()):
            nan = self.add(f"IsNaN({weights})")
            weights = self.add(f"Where({nan}, zero, {weights})")
        return weights


@st.composite
def sentences(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model with one attention, and feeds for it."""
    write = Sentence(draw)
    kv_heads = draw(st.sampled_from([4, 2, 1]))
    past, packed, time_first, capped, bounded = (draw(st.booleans()) for _ in range(5))
    q = write.add("Transpose <perm = [0, 2, 1, 3]>(q)") if time_first else "q"
    k, v = (write.keys(name, kv_heads, past, time_first) for name in ("k", "v"))
    scores = write.scores(q, k, packed)
    if packed:
        scores = write.add(f"Reshape({scores}, {write.shape_of('q', 'i0', 'n4', 'i1' if time_first else 'i2', 'minus1')})")
    if capped:
        scores = write.swapped("Mul", write.add(f"Tanh({write.add(f'Div({scores}, two)')})"), "two")
    scores = write.masked(scores)
    if bounded and "big" not in "".join(write.parts[1:]):
        scores = write.add(f"Max({scores}, low)")
    weights = write.weights(scores)
    if packed:
        keys_shape = write.add(f"Shape({k})")
        time = write.add(f"Gather({keys_shape}, a2)")
        rows = write.add(f"Reshape({weights}, {write.shape_of('q', 'minus1', 'i1' if time_first else 'i2', time)})")
        product = write.add(f"MatMul({rows}, {write.merged(v)})")
        write.parts.append(f"y = Reshape({product}, {write.shape_of('q', 'i0', 'n4', 'i1' if time_first else 'i2', 'n8')})")
    else:
        write.parts.append(f"y = MatMul({weights}, {v})")
    time = "S" if not past else "T"
    own = f"B, S, {HEADS}, {DIM}" if time_first else f"B, {HEADS}, S, {DIM}"
    new = f"B, S, {kv_heads}, {DIM}" if time_first else f"B, {kv_heads}, S, {DIM}"
    inputs = [f"float[{own}] q", f"float[{new}] k", f"float[{new}] v", f"bool[B, 1, S, {time}] seen", f"float[{HEADS}, S, {time}] bias"]
    outputs = [f"float[B, {HEADS}, S, {DIM}] y"]
    rng = np.random.default_rng(draw(st.integers(0, 3)))
    length = NEW + (PAST if past else 0)
    shapes = {name: (BATCH, HEADS if name == "q" else kv_heads, NEW, DIM) for name in "qkv"} | {"bias": (HEADS, NEW, length)}
    if past:
        inputs += [f"float[B, {kv_heads}, P, {DIM}] past_{name}" for name in ("k", "v")]
        outputs += [f"float[B, {kv_heads}, T, {DIM}] present_{name}" for name in ("k", "v")]
        shapes |= {f"past_{name}": (BATCH, kv_heads, PAST, DIM) for name in ("k", "v")}
    feeds: dict[str, Any] = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    if time_first:
        feeds |= {name: feeds[name].swapaxes(1, 2) for name in "qkv"}
    seen = rng.random((BATCH, 1, NEW, length)) < 0.6
    seen[..., 0] = True
    feeds["seen"] = seen
    return f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {CONSTANTS} {{ {' '.join(write.parts)} }}", feeds


PHASES = [Phase.generate]
"""A failing sentence is shown as it was drawn: making it shorter takes minutes."""


@settings(max_examples=40, deadline=None, derandomize=True, phases=PHASES)
@given(sentences())
def test_spellings(raised: Raise, case: tuple[str, dict[str, Any]]) -> None:
    check(raised, *case)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, phases=PHASES)
@given(sentences())
def test_very_many_spellings(raised: Raise, case: tuple[str, dict[str, Any]]) -> None:
    check(raised, *case)


def check(raised: Raise, text: str, feeds: dict[str, Any]) -> None:
    """One Attention, that gives what the sentence gave, and nothing of what it was made of."""
    ops = raised(text, **feeds)
    assert ops.count("Attention") == 1
    assert not {"Softmax", "MatMul", "Expand", "Tile", "IsNaN"} & set(ops)


@settings(max_examples=25, deadline=None, derandomize=True, phases=PHASES)
@given(sentences(), st.data())
def test_values_in_the_middle(case: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    """Any value of a sentence may be an output of the graph as well: then it's there, and nothing else changes."""
    text, feeds = case
    proto = onnx.shape_inference.infer_shapes(parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}'))
    known = {info.name: info for info in proto.graph.value_info}
    for name in data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=2, unique=True)):
        info = proto.graph.output.add()
        info.name = name
        info.type.tensor_type.elem_type = known[name].type.tensor_type.elem_type
    plain, optimised = (InferenceSession(proto, SessionOptions(level), providers=["cpu"]) for level in ("none", "all"))
    for arg, wanted, actual in zip(plain.get_outputs(), plain.run(None, feeds), optimised.run(None, feeds), strict=True):
        assert actual.dtype == wanted.dtype
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5, err_msg=arg.name)
