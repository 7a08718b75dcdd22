"""Arithmetic, comparisons, logic and activations against ONNX's reference evaluator: each version of each op, each type, many shapes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

UNARY = [
    "Neg",
    "Abs",
    "Sign",
    "Floor",
    "Ceil",
    "Sqrt",
    "Exp",
    "Log",
    "Reciprocal",
    "Sin",
    "Cos",
    "Tanh",
    "Sigmoid",
    "Erf",
    "Relu",
    "HardSwish",
    "Not",
    "IsNaN",
    "IsInf",
]
BINARY = ["Add", "Sub", "Mul", "Pow", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"]
VARIADIC = ["Min", "Max", "Sum", "Mean"]
SHAPES = [
    ((2, 3), (2, 3)),
    ((), ()),
    ((2, 1, 3), (4, 1)),
    ((0, 3), (1, 3)),
    ((3,), (2, 3)),
    ((), (2,)),
    ((200, 300), (200, 300)),
    ((300,), (200, 1)),
]


def first_type(schema, types_of):
    return types_of(schema, schema.inputs[0].type_str)


@pytest.mark.parametrize("op", UNARY)
def test_unary(op, node, same, sample, versions, types_of):
    for schema in versions(op):
        for dtype in first_type(schema, types_of):
            x = sample(dtype, (3, 5), low=0.1 if op in ("Sqrt", "Log", "Reciprocal") else -4)
            if op == "Erf" and dtype.kind in "iu":
                continue  # the reference evaluator has no such thing; see test_erf_of_integers
            model = node(op, schema.since_version, [x])
            if op in ("IsNaN", "IsInf") and dtype.kind == "V":
                same(model(x)[0], np.zeros(x.shape, bool))
            else:
                same(model(x)[0], model.reference(x)[0])
    for shape in ((), (0, 3), (2, 1, 4), (300, 200)):
        dtype = bool if op == "Not" else np.float32
        x = sample(dtype, shape, low=0.1 if op in ("Sqrt", "Log", "Reciprocal") else -4)
        model = node(op, 22, [dtype])
        same(model(x)[0], model.reference(x)[0])
        turned = x.T
        same(model(turned)[0], model.reference(turned)[0])


@pytest.mark.parametrize("op", BINARY)
def test_binary(op, node, same, sample, versions, types_of):
    for schema in versions(op):
        for dtype in first_type(schema, types_of):
            a, b = sample(dtype, (3, 4), low=0), sample(dtype, (4,), seed=1, low=0)
            model = node(op, schema.since_version, [a, b])
            same(model(a, b)[0], model.reference(a, b)[0])
    dtype = bool if op in ("And", "Or", "Xor") else np.float32
    model = node(op, 22, [dtype, dtype])
    for left, right in SHAPES:
        a, b = sample(dtype, left, low=0), sample(dtype, right, seed=1)
        same(model(a, b)[0], model.reference(a, b)[0])


@pytest.mark.parametrize("op", VARIADIC)
def test_variadic(op, node, same, sample, versions, types_of):
    want = {"Min": np.minimum.reduce, "Max": np.maximum.reduce, "Sum": sum, "Mean": lambda xs: sum(xs) / len(xs)}[op]
    for schema in versions(op):
        for dtype in first_type(schema, types_of):
            for count in (1, 2, 4):
                xs = [sample(dtype, (3, 1) if i and schema.since_version >= 8 else (3, 4), seed=i) for i in range(count)]
                wide = [np.broadcast_to(x, (3, 4)).astype(np.float64) for x in xs]
                same(node(op, schema.since_version, xs)(*xs)[0], want(wide).astype(dtype))


def test_integer_division_truncates(node, same):
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        a, b = np.array([8, -8, 7, -7, 0, -1], dtype), np.array([-3, 3, -2, 2, 5, 2], dtype)
        same(node("Div", 14, [a, b])(a, b)[0], np.array([-2, -2, -3, -3, 0, 0], dtype))
        same(node("Div", 14, [a, b])(a[0], b[0])[0], np.array(-2, dtype))
    a, b = np.array([200, 7], np.uint8), np.array([3, 9], np.uint8)
    same(node("Div", 14, [a, b])(a, b)[0], np.array([66, 0], np.uint8))
    lowest = np.array([-(2**63)], np.int64)
    same(node("Div", 14, [lowest, lowest])(lowest, np.array([-1]))[0], lowest)


def test_float_division(node, same):
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        a, b = np.array([1, -1, 0, 3], dtype), np.array([0, 0, 0, 2], dtype)
        same(node("Div", 14, [a, b])(a, b)[0], np.array([np.inf, -np.inf, np.nan, 1.5], dtype))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint64, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("opset", [10, 13, 28])
def test_mod(dtype, opset, node, same):
    a, b = np.array([7, 7, 4, 9], dtype), np.array([3, 2, 5, 4], dtype)
    if np.dtype(dtype).kind != "u":
        a, b = a * np.array([1, -1, -1, 1], dtype), b * np.array([-1, 1, 1, 1], dtype)
    same(node("Mod", opset, [a, b], fmod=1)(a, b)[0], np.fmod(a, b))
    if np.dtype(dtype).kind != "f" or opset == 28:
        same(node("Mod", opset, [a, b])(a, b)[0], a - np.floor(a / b.astype(float)).astype(dtype) * b)


def test_mod_of_special_floats(node, same):
    a = np.array([0.0, -0.0, np.inf, 1, 3, -3], np.float32)
    b = np.array([-2.0, 2.0, 1, 0, np.inf, np.inf], np.float32)
    y = node("Mod", 28, [a, b])(a, b)[0]
    same(y, np.array([0, 0, np.nan, np.nan, 3, np.inf], np.float32))
    assert np.signbit(y[:2]).tolist() == [True, False]


@pytest.mark.parametrize("exponent", [2, 3, 0.5, -1, 0, 1, 2.5])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_power_with_constant_exponent(exponent, rank, node, same, sample):
    y = np.full((1,) * rank, exponent, np.float32)
    for dtype in (np.float32, np.float64, np.float16):
        for shape in ((), (3,), (2, 3)):
            x = sample(dtype, shape, low=0.25)
            fixed = node("Pow", 15, [x, y], constants={1: y})(x, y)[0]
            same(fixed, np.power(x.astype(np.float64), y.astype(np.float64)).astype(dtype), atol=1e-3 if dtype == np.float16 else 1e-5)
            same(fixed, node("Pow", 15, [x, y])(x, y)[0])


def test_power_keeps_the_type_of_its_base(node, same):
    for base in (np.int32, np.int64, np.float16, np.float32, np.float64):
        for exponent in (np.int32, np.int64, np.uint8, np.float32, np.float64):
            x, y = np.array([1, 2, 3], base), np.array([3, 2, 1], exponent)
            same(node("Pow", 15, [x, y])(x, y)[0], np.array([1, 4, 3], base))
    x, y = np.array([2, 1, -1], np.int32), np.array([-1, -2, -3], np.int64)
    same(node("Pow", 15, [x, y])(x, y)[0], np.array([0, 1, -1], np.int32))


def test_integers_wrap(node, same):
    a, b = np.array([127, -128], np.int8), np.array([1, -1], np.int8)
    same(node("Add", 14, [a, b])(a, b)[0], np.array([-128, 127], np.int8))
    same(node("Add", 14, [a, b])(a[0], b[0])[0], np.array(-128, np.int8))


@pytest.mark.parametrize("opset", [11, 12, 13])
def test_clip(opset, node, same):
    for dtype in (np.float32, np.float64, np.float16) + ((np.int8, np.int64, np.uint8) if opset > 11 else ()):
        x, low, high = np.array([0, 3, 6], dtype), np.array(2, dtype), np.array(5, dtype)
        same(node("Clip", opset, [x, low, high])(x, low, high)[0], np.array([2, 3, 5], dtype))
        same(node("Clip", opset, [x, None, high])(x, None, high)[0], np.array([0, 3, 5], dtype))
        same(node("Clip", opset, [x, low])(x, low)[0], np.array([2, 3, 6], dtype))
        same(node("Clip", opset, [x])(x)[0], x)
        same(node("Clip", opset, [x, low, high])(x[1], low, high)[0], np.array(3, dtype))
    big = np.linspace(-3, 3, 50_000, dtype=np.float32)
    same(node("Clip", opset, [big, big])(big, np.array(-1, np.float32))[0], np.maximum(big, np.float32(-1)))
    same(node("Clip", opset, [big, None, big])(big, None, np.array(1, np.float32))[0], np.minimum(big, np.float32(1)))


def test_clip_with_crossed_bounds(node, same):
    x, low, high = np.array([-2, 0, 6], np.float32), np.array(2, np.float32), np.array(1, np.float32)
    same(node("Clip", 13, [x, low, high])(x, low, high)[0], np.ones(3, np.float32))


def test_clip_with_attributes(node, same):
    x = np.array([-2, 0, 6, np.inf], np.float32)
    same(node("Clip", 6, [x], min=-1.0, max=2.0)(x)[0], np.array([-1, 0, 2, 2], np.float32))
    same(node("Clip", 10, [x])(x)[0], np.array([-2, 0, 6, np.finfo(np.float32).max], np.float32))


def test_infinities_of_a_sign(node, same):
    x = np.array([np.inf, -np.inf, np.nan, 1], np.float32)
    for positive, negative, want in ((1, 1, [1, 1, 0, 0]), (1, 0, [1, 0, 0, 0]), (0, 1, [0, 1, 0, 0]), (0, 0, [0, 0, 0, 0])):
        y = node("IsInf", 20, [x], detect_positive=positive, detect_negative=negative)(x)[0]
        same(y, np.array(want, bool))


def test_comparing_text(node, same):
    a, b = np.array(["a", "b", ""], object), np.array(["a", "c", ""], object)
    same(node("Equal", 19, [a, b])(a, b)[0], np.array([True, False, True]))
    same(node("Equal", 19, [a, b])(a[0:1].reshape(()), b)[0], np.array([True, False, False]))


def test_not_a_number_goes_through(node, same):
    a, b = np.array([np.nan, 1], np.float32), np.array([1, np.nan], np.float32)
    for op in ("Min", "Max"):
        same(node(op, 13, [a, b])(a, b)[0], np.full(2, np.nan, np.float32))
    same(node("Relu", 14, [a])(a)[0], a)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_error_function_is_accurate(dtype, node):
    from math import erf

    x = np.concatenate([np.linspace(-7, 7, 4001), np.logspace(-20, 0, 60), [0, np.inf, -np.inf]]).astype(dtype)
    want = np.array([erf(value) for value in x.tolist()])
    got = node("Erf", 13, [x])(x)[0]
    np.testing.assert_allclose(got, want, rtol=4e-7 if dtype == np.float32 else 5e-16)
    assert np.all(np.abs(got) <= 1)


def test_erf_of_integers(node, same):
    x = np.array([-9, 0, 1, 9], np.int32)
    same(node("Erf", 9, [x])(x)[0], np.array([-1, 0, 0, 1], np.int32))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_gelu(approximate, dtype, node, same, sample):
    for shape in ((), (0,), (3, 4), (40, 1000)):
        x = sample(dtype, shape, low=-6, high=6)
        wide = node("Gelu", 20, [np.float64], approximate=approximate)
        want = wide.reference(x.astype(np.float64))[0].astype(dtype)
        same(node("Gelu", 20, [x], approximate=approximate)(x)[0], want, rtol={2: 2**-6}.get(np.dtype(dtype).itemsize), atol=3e-6)


@pytest.mark.parametrize("alpha", [1.0, 1.7])
def test_swish(alpha, node, same, sample):
    for shape in ((), (3, 4), (40, 1000)):
        x = sample(np.float32, shape)
        same(node("Swish", 24, [x], alpha=alpha)(x)[0], x / (1 + np.exp(-np.float32(alpha) * x)))


def test_extremes_of_sigmoid_and_exp(node, same):
    x = np.array([-200, 200, -np.inf, np.inf], np.float32)
    same(node("Sigmoid", 13, [x])(x)[0], np.array([0, 1, 0, 1], np.float32))
    same(node("Exp", 13, [x])(x)[0], np.array([0, np.inf, 0, np.inf], np.float32))
    same(node("Log", 13, [x])(x)[0], np.log(np.array([np.nan, 200, np.nan, np.inf], np.float32)))
