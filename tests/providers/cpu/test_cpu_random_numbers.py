"""Random ops: what a seed gives, how the draws are spread, types, shapes; Dropout in and out of training."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from miniort.types import dtype_to_onnx

SHAPED = {"RandomNormal": {"mean": 3.0, "scale": 2.0}, "RandomUniform": {"low": -2.0, "high": 6.0}}
FLOATS = [np.float16, np.float32, np.float64]


def seeded(op, shape):
    """The draws that are documented: those of RandomState(5)."""
    state = np.random.RandomState(5)
    return state.standard_normal(shape) * 2 + 3 if op.startswith("RandomNormal") else state.random_sample(shape) * 8 - 2


@pytest.mark.parametrize("op", SHAPED)
@pytest.mark.parametrize("opset", [1, 22])
def test_a_seed_gives_the_documented_draws(op, opset, node, same):
    for dtype in [*FLOATS, *([ml_dtypes.bfloat16] if opset == 22 else [])]:
        for shape in ((3, 4), (1,), (0, 2)):
            model = node(op, opset, [], shape=shape, dtype=dtype_to_onnx(np.dtype(dtype)), seed=5.0, **SHAPED[op])
            same(model()[0], seeded(op, shape).astype(dtype))
            same(model()[0], seeded(op, shape).astype(dtype))  # in every run
    assert node(op, opset, [], shape=[2])()[0].dtype == np.float32
    same(node(op, opset, [], shape=[4], seed=5.0, dtype=1, **SHAPED[op])()[0], node(op, opset, [], shape=[4], seed=5.7, **SHAPED[op])()[0])


@pytest.mark.parametrize("op", SHAPED)
@pytest.mark.parametrize("opset", [1, 22])
def test_like(op, opset, node, same, sample):
    for dtype in FLOATS:
        x = sample(dtype, (2, 3))
        same(node(op + "Like", opset, [x], seed=5.0, **SHAPED[op])(x)[0], seeded(op, (2, 3)).astype(dtype))
        got = node(op + "Like", opset, [x], seed=5.0, dtype=dtype_to_onnx(np.dtype(np.float64)), **SHAPED[op])(x)[0]
        same(got, seeded(op, (2, 3)))
    for other in (np.array(["a", "b"], object), np.array([1, 2]), np.array(True)):
        assert node(op + "Like", opset, [other], dtype=1)(other)[0].shape == other.shape
    scalar = np.array(1, np.float32)
    assert node(op + "Like", opset, [scalar])(scalar)[0].shape == ()


def test_without_a_seed_runs_differ(node):
    model = node("RandomNormal", 22, [], shape=[8])
    assert not np.array_equal(model()[0], model()[0])


def test_two_random_nodes_are_not_merged(cpu_plugins):
    import onnx
    from onnx import helper

    from miniort import InferenceSession

    x = helper.make_tensor_value_info("x", 1, [100])
    names = ["Bernoulli", "RandomUniformLike", "RandomNormalLike"]
    nodes = [helper.make_node(op, ["x"], [f"{op}{i}"]) for op in names for i in range(2)]
    outputs = [onnx.helper.make_tensor_value_info(node.output[0], 1, [100]) for node in nodes]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], outputs), opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    results = InferenceSession(model, providers=["cpu"], plugins=cpu_plugins).run(None, {"x": np.full(100, 0.5, np.float32)})
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert not np.array_equal(first, second)


def test_the_draws_are_spread_as_they_should_be(node):
    y = node("RandomNormal", 22, [], shape=[50_000], mean=3.0, scale=2.0, seed=1.0)()[0]
    assert abs(y.mean() - 3) < 0.05
    assert abs(y.std() - 2) < 0.05
    y = node("RandomUniform", 22, [], shape=[50_000], low=-2.0, high=6.0, seed=1.0)()[0]
    assert -2 <= y.min() < -1.99
    assert 5.99 < y.max() <= 6
    assert abs(y.mean() - 2) < 0.05


class TestBernoulli:
    def test_share_of_ones(self, node):
        x = np.tile(np.array([0, 0.25, 1], np.float32), (40_000, 1))
        y = node("Bernoulli", 15, [x], seed=1.0)(x)[0]
        assert set(np.unique(y)) == {0, 1}
        np.testing.assert_allclose(y.mean(0), [0, 0.25, 1], atol=0.01)

    def test_types(self, node, versions, types_of):
        for schema in versions("Bernoulli", 15):
            for dtype in types_of(schema, "T1"):
                x = np.array([0, 1, 1], dtype)
                got = node("Bernoulli", schema.since_version, [x])(x)[0]
                assert (got.dtype, got.astype(int).tolist()) == (x.dtype, [0, 1, 1])
            for dtype in types_of(schema, "T2"):
                x = np.array([[0, 1]], np.float32)
                got = node("Bernoulli", schema.since_version, [x], dtype=dtype_to_onnx(dtype))(x)[0]
                assert (got.dtype, got.astype(int).tolist()) == (dtype, [[0, 1]])

    def test_a_seed_gives_the_same_draws(self, node, same):
        x = np.full(50, 0.5)
        same(node("Bernoulli", 15, [x], seed=3.0)(x)[0], node("Bernoulli", 22, [x], seed=3.0)(x)[0])


class TestMultinomial:
    def test_shares(self, node):
        p = np.array([[0.5, 0.2, 0.3, 0], [0, 0, 0, 1]])
        with np.errstate(divide="ignore"):
            x = (np.log(p) + 7).astype(np.float32)  # up to a constant
        y = node("Multinomial", 7, [x], sample_size=20_000, seed=1.0)(x)[0]
        assert (y.shape, y.dtype) == ((2, 20_000), np.int32)
        np.testing.assert_allclose([np.bincount(row, minlength=4) / 20_000 for row in y], p, atol=0.01)

    def test_types_and_seeds(self, node, same, versions, types_of):
        for schema in versions("Multinomial"):
            for dtype in types_of(schema, "T1"):
                x = np.zeros((3, 2), dtype)
                model = node("Multinomial", schema.since_version, [x], sample_size=5, seed=2.0, dtype=7)
                assert model(x)[0].dtype == np.int64
                same(model(x)[0], model(x)[0])
        empty = np.zeros((0, 2), np.float32)
        assert node("Multinomial", 7, [empty])(empty)[0].shape == (0, 1)


class TestDropout:
    def test_inference_before_opset_12(self, node, same, sample, versions, types_of):
        for opset in (7, 10):
            for dtype in types_of(versions("Dropout", opset)[-1], "T")[:3]:
                x = sample(dtype if dtype in FLOATS else np.float32, (2, 3))
                y, mask = node("Dropout", opset, [x], 2, ratio=0.9)(x)
                same(y, x)
                same(mask, np.ones((2, 3), x.dtype if opset == 7 else bool))
                same(node("Dropout", opset, [x], ratio=0.9)(x)[0], x)

    def test_inference(self, node, same, sample, versions, types_of):
        ratio, off = np.array(0.9, np.float32), np.array(False)
        for schema in versions("Dropout", 12):
            if schema.since_version < 12:
                continue
            for dtype in types_of(schema, "T"):
                x = sample(dtype, (2, 3))
                for given in ((), (ratio,), (ratio, off), (None, off), (None, None)):
                    y, mask = node("Dropout", schema.since_version, [x, *given], 2)(x, *given)
                    same(y, x)
                    same(mask, np.ones((2, 3), bool))

    @pytest.mark.parametrize("opset", [12, 13, 22])
    def test_training(self, opset, node, same, sample):
        on = np.array(True)
        for dtype in [*FLOATS, *([ml_dtypes.bfloat16] if opset > 12 else [])]:
            x, ratio = sample(dtype, (40, 50), low=1), np.array(0.25, np.float32)
            y, mask = node("Dropout", opset, [x, ratio, on], 2, seed=7)(x, ratio, on)
            same(mask, np.random.RandomState(7).random_sample((40, 50)) >= 0.25)
            same(y, (np.where(mask, x.astype(np.float64), 0) / 0.75).astype(dtype))
        x = sample(np.float32, (50,), low=1)
        same(node("Dropout", opset, [x, None, on], 2, seed=7)(x, None, on)[1], np.random.RandomState(7).random_sample(50) >= 0.5)
        zero = np.array(0, np.float32)
        same(node("Dropout", opset, [x, zero, on])(x, zero, on)[0], x)

    def test_training_without_a_seed(self, node, sample):
        x, on = sample(np.float32, (100,), low=1), np.array(True)
        model = node("Dropout", 22, [x, None, on])
        assert not np.array_equal(model(x, None, on)[0], model(x, None, on)[0])
