"""If, Loop and Scan, written in ONNX's text form."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from miniort import InferenceSession
from miniort.runtime.session import SessionOptions


@pytest.fixture
def run(cpu_plugins):
    """Runs a model in ONNX's text form, with inputs by name."""

    def run_text(text, **inputs):
        model = onnx.parser.parse_model(text)
        session = InferenceSession(model, SessionOptions(graph_optimization_level="none"), ["cpu"], plugins=cpu_plugins)
        return session.run(None, inputs)

    return run_text


def floats(*values):
    return np.array(values, np.float32)


IF = """<ir_version: 8, opset_import: ["" : OPSET]>
main (bool c, float[n] x) => (float[n] y, float[n] z) {
    y, z = If (c) <
        then_branch = then () => (float[n] a, float[n] b) { a = Neg (x)  b = Identity (x) },
        else_branch = otherwise () => (float[n] d, float[n] e) { d = Abs (x)  e = Add (d, x) }
    >
}"""


@pytest.mark.parametrize("opset", [11, 13, 16, 19, 21, 23, 24, 25])
def test_if_takes_one_branch_that_sees_the_outer_values(opset, run, same):
    x = floats(1, -2)
    for condition in (np.array(True), np.array([True])):
        y, z = run(IF.replace("OPSET", str(opset)).replace("bool c", "bool c" if condition.ndim == 0 else "bool[1] c"), c=condition, x=x)
        same(y, -x)
        same(z, x)
    y, z = run(IF.replace("OPSET", str(opset)), c=np.array(False), x=x)
    same(y, np.abs(x))
    same(z, np.abs(x) + x)


LOOP = """<ir_version: 8, opset_import: ["" : OPSET]>
main (INPUTS float x, float step) => (float last, float[n] all, int64[n] counted) {
    last, all, counted = Loop (LIMIT, CONDITION, x) <
        body = b (int64 i, bool go, float v) => (bool go_on, float w, float s, int64 k) {
            w = Add (v, step)
            s = Mul (w, w)
            k = Identity (i)
            ten = Constant <value_float = 10.0> ()
            go_on = Less (w, ten)
        }
    >
}"""


def loop(opset=13, limit="limit", condition="condition"):
    inputs = ("int64 limit, " if limit else "") + ("bool condition, " if condition else "")
    return LOOP.replace("OPSET", str(opset)).replace("INPUTS ", inputs).replace("LIMIT", limit).replace("CONDITION", condition)


@pytest.mark.parametrize("opset", [13, 16, 19, 21, 23, 24, 25])
def test_loop_with_a_limit(opset, run, same):
    feed = {"x": np.float32(0).reshape(()), "step": np.float32(2).reshape(())}
    last, squares, counted = run(loop(opset), limit=np.array(3), condition=np.array(True), **feed)
    same(last, np.array(6, np.float32))
    same(squares, floats(4, 16, 36))
    same(counted, np.array([0, 1, 2]))


def test_loop_until_its_condition_fails(run, same):
    feed = {"x": np.float32(0).reshape(()), "step": np.float32(4).reshape(())}
    for text, extra in (
        (loop(limit="", condition=""), {}),
        (loop(limit=""), {"condition": np.array(True)}),
        (loop(), {"limit": np.array(100), "condition": np.array(True)}),
        (loop(condition=""), {"limit": np.array(100)}),
    ):
        last, squares, _ = run(text, **feed, **extra)
        same(last, np.array(12, np.float32))
        same(squares, floats(16, 64, 144))


def test_loop_without_a_trip(run, same):
    feed = {"x": np.float32(5).reshape(()), "step": np.float32(2).reshape(())}
    for limit, condition in ((0, True), (3, False)):
        last, squares, counted = run(loop(), limit=np.array(limit), condition=np.array(condition), **feed)
        same(last, np.array(5, np.float32))
        same(squares, floats())
        same(counted, np.zeros(0, np.int64))


SCAN = """<ir_version: 8, opset_import: ["" : OPSET]>
main (float[2] start, float[a, b] xs) => (float[2] last, float[c, d] sums) {
    last, sums = Scan <num_scan_inputs = 1, ATTRIBUTES
        body = b (float[2] s, float[2] x) => (float[2] t, float[2] o) { t = Add (s, x)  o = Identity (t) }
    > (start, xs)
}"""


@pytest.mark.parametrize("opset", [9, 11, 16, 19, 21, 23, 24, 25])
@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scan(opset, backward, axis, run, same):
    if axis < 0 and opset < 11:
        pytest.skip("axes count from the front before opset 11")
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    names = {"scan_input_axes": axis, "scan_output_axes": axis, "scan_input_directions": backward, "scan_output_directions": backward}
    attributes = "".join(f"{name} = [{value}], " for name, value in names.items())
    sums = np.cumsum(rows[::-1] if backward else rows, 0)
    last, got = run(
        SCAN.replace("OPSET", str(opset)).replace("ATTRIBUTES", attributes), start=floats(0, 0), xs=rows if axis == 0 else rows.T.copy()
    )
    same(last, sums[-1])
    ordered = sums[::-1] if backward else sums
    same(got, ordered if axis == 0 else ordered.T)


def test_scan_of_nothing(run, same):
    last, sums = run(SCAN.replace("OPSET", "13").replace("ATTRIBUTES", ""), start=floats(1, 2), xs=np.zeros((0, 2), np.float32))
    same(last, floats(1, 2))
    same(sums, np.zeros((0, 2), np.float32))


SCAN_8 = """<ir_version: 3, opset_import: ["" : 8]>
main (int64[2] lengths, float[2, 2] start, float[2, 3, 2] xs) => (float[2, 2] last, float[2, 3, 2] sums) {
    last, sums = Scan <num_scan_inputs = 1, directions = [DIRECTION],
        body = b (float[2] s, float[2] x) => (float[2] t, float[2] o) { t = Add (s, x)  o = Identity (t) }
    > (lengths, start, xs)
}"""


@pytest.mark.parametrize("backward", [0, 1])
def test_scan_of_a_batch(backward, run, same):
    xs = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    last, sums = run(SCAN_8.replace("DIRECTION", str(backward)), lengths=np.array([3, 2]), start=np.zeros((2, 2), np.float32), xs=xs)
    rows = [x[::-1] if backward else x for x in (xs[0], xs[1, :2])]
    same(last, np.stack([row.sum(0) for row in rows]))
    same(sums[0], np.cumsum(rows[0], 0))
    same(sums[1], np.concatenate((np.cumsum(rows[1], 0), np.zeros((1, 2), np.float32))))
