"""Rectifiers and smooth activations against formulas in float64, which are the specification's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest


def elu(x, alpha=1.0):
    return np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0)))


def selu(x, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def celu(x, alpha=1.0):
    return np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha))


def leaky_relu(x, alpha=0.01):
    return np.where(x >= 0, x, alpha * x)


def thresholded_relu(x, alpha=1.0):
    return np.where(x > alpha, x, 0)


def hard_sigmoid(x, alpha=0.2, beta=0.5):
    return np.maximum(0, np.minimum(1, alpha * x + beta))


def softplus(x):
    return np.logaddexp(0, x)


def softsign(x):
    return x / (1 + np.abs(x))


def mish(x):
    return x * np.tanh(np.logaddexp(0, x))


FUNCTIONS = {
    "Elu": (elu, {"alpha": 2.0}),
    "Selu": (selu, {"alpha": 2.0, "gamma": 3.0}),
    "Celu": (celu, {"alpha": 2.0}),
    "LeakyRelu": (leaky_relu, {"alpha": 0.1}),
    "ThresholdedRelu": (thresholded_relu, {"alpha": 2.0}),
    "HardSigmoid": (hard_sigmoid, {"alpha": 0.5, "beta": 0.6}),
    "Softplus": (softplus, {}),
    "Softsign": (softsign, {}),
    "Mish": (mish, {}),
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_every_version_and_type(op, node, same, sample, versions, types_of):
    function, attributes = FUNCTIONS[op]
    for schema in versions(op):
        for dtype in types_of(schema, schema.inputs[0].type_str):
            for given in ({}, attributes):
                for shape in ((), (0, 3), (3, 5)):
                    x = sample(dtype, shape)
                    want = np.asarray(function(x.astype(np.float64), **given)).astype(dtype)
                    same(node(op, schema.since_version, [x], **given)(x)[0], want)
    big = sample(np.float32, (300, 200)).T
    same(node(op, 22, [big])(big)[0], function(big.astype(np.float64)).astype(np.float32), atol=2e-6)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_edges(op, node, same):
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 100, -100, 1e-8, -1e-8, 80000], np.float32)
    model = node(op, 18, [x])
    same(model(x)[0], model.reference(x)[0], atol=1e-40)
    same(model(x)[0], model.onnxruntime(x)[0], atol=2e-8)


class TestPRelu:
    def test_every_version_and_type(self, node, same, sample, versions, types_of):
        for schema in versions("PRelu"):
            for dtype in types_of(schema, "T"):
                x, slope = sample(dtype, (2, 3, 4)), sample(dtype, (3, 1), seed=1)
                want = np.where(x < dtype.type(0), (x.astype(np.float64) * slope.astype(np.float64)).astype(dtype), x).astype(dtype)
                same(node("PRelu", schema.since_version, [x, slope])(x, slope)[0], want)

    def test_shapes(self, node, same, sample):
        for shape, slope_shape in (((), ()), ((3,), (1,)), ((2, 3), ()), ((0, 3), (3,)), ((2, 3, 4), (2, 1, 1)), ((300, 200), (200,))):
            x, slope = sample(np.float32, shape), sample(np.float32, slope_shape, seed=1)
            same(node("PRelu", 16, [x, slope])(x, slope)[0], np.where(x < 0, x * slope, x).astype(np.float32))

    def test_nan_and_infinity(self, node, same):
        x, slope = np.array([np.nan, -np.inf, np.inf, -1], np.float32), np.array([2, 0.5, 2, np.inf], np.float32)
        same(node("PRelu", 16, [x, slope])(x, slope)[0], np.array([np.nan, -np.inf, np.inf, -np.inf], np.float32))


class TestShrink:
    def test_every_type(self, node, same, sample, versions, types_of):
        for dtype in types_of(versions("Shrink")[0], "T"):
            for attributes in ({}, {"lambd": 1.5, "bias": 1.0}, {"lambd": 0.5, "bias": 0.5}):
                for shape in ((), (0,), (3, 4)):
                    x = sample(dtype, shape, low=0 if dtype.kind == "u" else -4)
                    bias, lambd = attributes.get("bias", 0.0), attributes.get("lambd", 0.5)
                    wide = x.astype(np.float64)
                    want = np.where(wide < -lambd, wide + bias, np.where(wide > lambd, wide - bias, 0))
                    same(node("Shrink", 9, [x], **attributes)(x)[0], np.asarray(want).astype(dtype))

    def test_large_integers_stay_exact(self, node, same):
        x = np.array([2**62 + 1, -(2**62) - 1], np.int64)
        same(node("Shrink", 9, [x], bias=1.0)(x)[0], np.array([2**62, -(2**62)], np.int64))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("alpha", [1.0, 0.5, -2.0])
def test_swiglu(dtype, alpha, node, same, sample):
    for shape in ((), (0, 2), (3, 5), (300, 200)):
        a, b = sample(dtype, shape), sample(dtype, shape, seed=1)
        wide = a.astype(np.float64)
        want = np.asarray(wide / (1 + np.exp(-alpha * wide)) * b.astype(np.float64)).astype(dtype)
        same(node("SwiGLU", 28, [a, b], alpha=alpha)(a, b)[0], want, atol=2e-6)


def test_swiglu_takes_one_shape(node):
    from miniort.errors import RunError

    with pytest.raises(RunError, match="one shape"):
        node("SwiGLU", 28, [np.float32] * 2)(np.ones((2, 3), np.float32), np.ones(3, np.float32))
