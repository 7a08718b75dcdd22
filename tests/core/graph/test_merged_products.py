"""Products of one value with several constant matrices become one, in one copy of the weights, and only where nobody misses the parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from miniort import InferenceSession, SessionOptions, WeightStore, load_model

Raise = Callable[..., list[str]]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4), dtype=np.float32)
HEADER = """g (float[B, S, 4] x) => (float[B, S, 2] a, float[B, S, 3] b)
    <float[4, 2] p = {1, 2, 3, 4, 5, 6, 7, 8}, float[4, 3] q = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[2] s = {1, 2},
     float[3] t = {3, 4, 5}>"""


def test_two_products(raised: Raise) -> None:
    ops = raised(f"{HEADER} {{ u = MatMul(x, p) v = MatMul(x, q) a = Neg(u) b = Abs(v) }}", x=X)
    assert ops == ["MatMul", "Split", "Neg", "Abs"]


def test_biases_are_merged_too(raised: Raise) -> None:
    ops = raised(f"{HEADER} {{ u = MatMul(x, p) v = MatMul(x, q) w = Add(u, s) y = Add(t, v) a = Neg(w) b = Abs(y) }}", x=X)
    assert ops == ["MatMul", "Add", "Split", "Neg", "Abs"]


@pytest.mark.parametrize(
    "body",
    [
        "a = MatMul(x, p) v = MatMul(x, q) b = Abs(v)",  # the result is an output
        "n = Neg(x) u = MatMul(x, p) v = MatMul(n, q) a = Neg(u) b = Abs(v)",  # another value
        "u = MatMul(x, p) v = MatMul(x, q) w = Add(u, s) a = Neg(w) b = Abs(v)",  # only one has a bias
    ],
)
def test_what_is_not_merged(raised: Raise, body: str) -> None:
    assert "Split" not in raised(f"{HEADER} {{ {body} }}", x=X)


def test_a_matrix_that_another_node_reads(raised: Raise) -> None:
    text = HEADER.replace("float[B, S, 3] b)", "float[B, S, 3] b, float[4, 2] c)")
    assert "Split" not in raised(f"{text} {{ u = MatMul(x, p) v = MatMul(x, q) a = Neg(u) b = Abs(v) e = Shape(x) f = Cast <to = 1>(e) "
                                 "g = ReduceMax <keepdims = 0>(f) c = Mul(p, g) }", x=X)  # fmt: skip


def layers(count: int) -> onnx.ModelProto:
    """Layers of three products of one value, as queries, keys and values are."""
    nodes, weights, value = [], [], "x"
    for layer in range(count):
        for part, width in zip("qkv", (64, 32, 32), strict=True):
            weights.append(numpy_helper.from_array(RNG.standard_normal((64, width), dtype=np.float32) / 8, f"{part}{layer}"))
            nodes.append(helper.make_node("MatMul", [value, f"{part}{layer}"], [f"{part}_{layer}"]))
        nodes.append(helper.make_node("Concat", [f"k_{layer}", f"v_{layer}"], [f"c_{layer}"], axis=-1))
        nodes.append(helper.make_node("Mul", [f"q_{layer}", f"c_{layer}"], [f"x_{layer}"]))
        value = f"x_{layer}"
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 64]) for name in ("x", value))
    return helper.make_model(
        helper.make_graph(nodes, "layers", [x], [y], weights), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )


def test_one_copy_for_all_sessions() -> None:
    proto, store = layers(3), WeightStore()
    wanted = 3 * 64 * 128 * 4
    sessions = [InferenceSession(proto, providers=["cpu"], weights=store) for _ in range(2)]
    matrices = [
        [value.const_value for value in session.model.graph.initializers.values() if value.shape == (64, 128)] for session in sessions
    ]
    assert len(matrices[0]) == 3
    for first, second in zip(*matrices, strict=True):
        assert first is not None
        assert second is not None
        assert np.shares_memory(first.numpy(), second.numpy())
    held = store.nbytes
    assert held < 1.2 * wanted + 64 * 1024, "the parts are held beside what they were put together to"
    x = RNG.standard_normal((5, 64), dtype=np.float32)
    plain = InferenceSession(proto, SessionOptions("none"), providers=["cpu"], weights=store).run(None, {"x": x})[0]
    for session in sessions:
        np.testing.assert_allclose(session.run(None, {"x": x})[0], plain, rtol=1e-4, atol=1e-5)


def test_one_copy_of_weights_in_a_file(tmp_path: Path) -> None:
    """Two models over one file of weights, both loaded before either is optimised, as a prompt's graph and a token's are."""
    onnx.save(layers(2), tmp_path / "a.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "b.onnx").write_bytes((tmp_path / "a.onnx").read_bytes())
    store = WeightStore()
    models = [load_model(tmp_path / name, weights=store) for name in ("a.onnx", "b.onnx")]
    sessions = [InferenceSession(model, providers=["cpu"], weights=store) for model in models]
    merged = [
        [value.const_value for value in session.model.graph.initializers.values() if value.shape == (64, 128)] for session in sessions
    ]
    assert len(merged[0]) == 2
    for first, second in zip(*merged, strict=True):
        assert first is not None
        assert second is not None
        assert np.shares_memory(first.numpy(), second.numpy())


def test_large_products_stay_apart() -> None:
    weights = [numpy_helper.from_array(np.zeros((1024, 5000), np.float32), name) for name in ("p", "q")]
    nodes = [helper.make_node("MatMul", ["x", name], [f"{name}_x"]) for name in ("p", "q")]
    nodes.append(helper.make_node("Add", ["p_x", "q_x"], ["y"]))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 1024])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 5000])
    proto = helper.make_model(
        helper.make_graph(nodes, "large", [x], [y], weights), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    assert "Split" not in [node.op_type for node in InferenceSession(proto, providers=["cpu"]).model.graph]
