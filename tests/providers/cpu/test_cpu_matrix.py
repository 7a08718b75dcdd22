"""Products, softmax and normalization, in every type, against float64 and onnxruntime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
SHAPES = [
    ((2, 3), (3, 4)),
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 1, 2, 3), (6, 3, 4)),
    ((3,), (5, 3, 4)),
    ((2, 0), (0, 4)),
    ((0, 3), (3, 4)),
    ((5, 0, 3), (3, 4)),
    ((2, 130, 40), (40, 300)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_matmul_shapes(left, right, node, same, sample):
    a, b = sample(np.float32, left), sample(np.float32, right, seed=1)
    want = np.asarray(np.matmul(a.astype(np.float64), b.astype(np.float64))).astype(np.float32)
    same(node("MatMul", 13, [a, b])(a, b)[0], want, atol=1e-4)
    same(node("MatMul", 13, [a, b], constants={1: b})(a, b)[0], want, atol=1e-4)


def test_matmul_types(node, same, sample, versions, types_of):
    for schema in versions("MatMul", 1):
        for dtype in types_of(schema, "T"):
            a, b = sample(dtype, (2, 3, 4)), sample(dtype, (4, 5), seed=1)
            want = np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)
            for constants in (None, {0: a}, {1: b}):
                same(node("MatMul", schema.since_version, [a, b], constants=constants)(a, b)[0], want, atol=1e-5)
    a = np.array([[100, 100]], np.int32) * 2**24
    same(node("MatMul", 9, [a, a])(a, a.T.copy())[0], np.array([[0]], np.int32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_products_round_once(dtype, node, same):
    a, b = np.full((1, 2048), 0.125, dtype), np.full((2048, 1), 1.0, dtype)
    same(node("MatMul", 13, [a, b])(a, b)[0], np.array([[256]], dtype))
    same(node("Gemm", 13, [a, b])(a, b)[0], np.array([[256]], dtype))


def test_matmul_of_views(node, same, sample):
    """A transposed operand is not contiguous, whatever the kernel does with its rows."""
    a = sample(np.float32, (4, 5, 3)).transpose(2, 1, 0)
    b = sample(np.float32, (6, 4)).T
    same(node("MatMul", 13, [a, b])(a, b)[0], np.matmul(a, b), atol=1e-5)


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("bias", [None, (), (4,), (2, 1), (2, 4), (1, 4)])
def test_gemm(trans_a, trans_b, bias, node, same, sample):
    for opset in (7, 9, 11, 13):
        if bias is None and opset < 11:
            continue
        a = sample(np.float32, (3, 2) if trans_a else (2, 3))
        b = sample(np.float32, (4, 3) if trans_b else (3, 4), seed=1)
        for alpha, beta in ((1.0, 1.0), (0.5, 2.0)):
            inputs = [a, b] if bias is None else [a, b, sample(np.float32, bias, seed=2)]
            want = alpha * (a.T if trans_a else a) @ (b.T if trans_b else b) + (0 if bias is None else beta * inputs[2])
            attributes = {"alpha": alpha, "beta": beta, "transA": trans_a, "transB": trans_b}
            for constants in (None, dict(list(enumerate(inputs))[1:])):
                same(node("Gemm", opset, inputs, constants=constants, **attributes)(*inputs)[0], want.astype(np.float32), atol=1e-5)


def test_gemm_types(node, same, sample, versions, types_of):
    for schema in versions("Gemm"):
        for dtype in types_of(schema, "T"):
            a, b, c = sample(dtype, (2, 3)), sample(dtype, (3, 4), seed=1), sample(dtype, (4,), seed=2)
            want = (2 * a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)).astype(np.int64 if dtype.kind == "u" else dtype)
            got = node("Gemm", schema.since_version, [a, b, c], alpha=2.0)(a, b, c)[0]
            same(got, want.astype(dtype), atol=1e-5)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(op, dtype, node, same, sample):
    def wanted(x, axes):
        e = np.exp(x - x.max(axes, keepdims=True))
        y = e / e.sum(axes, keepdims=True)
        return np.log(y) if op == "LogSoftmax" else y

    x = sample(dtype, (2, 3, 4))
    wide = x.astype(np.float64)
    for axis in (0, 1, 2, -1, -3):
        same(node(op, 13, [x], axis=axis)(x)[0], wanted(wide, axis).astype(dtype), atol=1e-3 if x.itemsize == 2 else 1e-6)
    same(node(op, 13, [x])(x)[0], wanted(wide, -1).astype(dtype), atol=1e-3 if x.itemsize == 2 else 1e-6)
    if dtype != ml_dtypes.bfloat16:
        for opset in (1, 11):
            for axis in (0, 1, 2):
                flat = tuple(range(axis, 3))
                same(node(op, opset, [x], axis=axis)(x)[0], wanted(wide, flat).astype(dtype), atol=1e-3 if x.itemsize == 2 else 1e-6)
            same(node(op, opset, [x])(x)[0], wanted(wide, (1, 2)).astype(dtype), atol=1e-3 if x.itemsize == 2 else 1e-6)


def test_softmax_of_extremes(node, same):
    x = np.array([[1000, 1000], [-np.inf, 0], [-np.inf, -np.inf]], np.float32)
    same(node("Softmax", 13, [x])(x)[0], np.array([[0.5, 0.5], [0, 1], [np.nan, np.nan]], np.float32))
    nothing = np.zeros((2, 0), np.float32)
    same(node("Softmax", 13, [nothing])(nothing)[0], nothing)


@pytest.mark.parametrize("axis", [-1, 1, 2, 0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_normalization(axis, dtype, node, same, sample):
    x = sample(dtype, (2, 3, 4))
    scale, bias = sample(dtype, x.shape[axis:], seed=1), sample(dtype, x.shape[axis:], seed=2)
    wide, axes = x.astype(np.float64), tuple(range(axis % 3, 3))
    mean = wide.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(wide.var(axes, keepdims=True) + 1e-3)
    normalized = (wide - mean) * inverse * scale.astype(np.float64)
    attributes = {"axis": axis, "epsilon": 1e-3}
    atol = 1e-2 if x.itemsize == 2 else 2e-6
    got = node("LayerNormalization", 17, [x, scale, bias], 3, **attributes)(x, scale, bias)
    same(got[0], (normalized + bias.astype(np.float64)).astype(dtype), atol=atol)
    same(got[1], mean.astype(np.float32), rtol=1e-5)
    same(got[2], inverse.astype(np.float32), rtol=1e-5)
    same(node("LayerNormalization", 17, [x, scale], **attributes)(x, scale)[0], normalized.astype(dtype), atol=atol)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_normalization(axis, dtype, node, same, sample):
    x = sample(dtype, (2, 3, 4))
    scale = sample(np.float32, x.shape[axis:], seed=1)
    wide, axes = x.astype(np.float64), tuple(range(axis % 3, 3))
    want = wide / np.sqrt((wide**2).mean(axes, keepdims=True) + 1e-5) * scale
    same(
        node("RMSNormalization", 23, [x, scale.astype(dtype)], axis=axis)(x, scale.astype(dtype))[0],
        want.astype(dtype),
        atol=1e-2 if x.itemsize == 2 else 1e-5,
    )
    same(node("RMSNormalization", 23, [x, scale], axis=axis)(x, scale)[0], want.astype(np.float32), atol=1e-5)
