"""ReduceL1, ReduceLogSum, ReduceLogSumExp and CumProd: each version and type, every way to name axes, empty tensors, infinities."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest


def l1(x, **axes):
    return np.abs(x).sum(**axes)


def log_sum(x, **axes):
    return np.log(x.sum(**axes))


def log_sum_exp(x, **axes):
    return np.log(np.exp(x).sum(**axes))


FUNCTIONS = {"ReduceL1": l1, "ReduceLogSum": log_sum, "ReduceLogSumExp": log_sum_exp}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_every_version_and_type(op, node, same, sample, versions, types_of):
    for schema in versions(op):
        for dtype in types_of(schema, "T"):
            x = sample(dtype, (2, 3, 4), low=1)
            for axes in ((1,), (0, 2), (-1,)):
                if min(axes) < 0 and schema.since_version < 11:
                    continue
                want = FUNCTIONS[op](x.astype(np.float64), axis=axes, keepdims=True).astype(dtype)
                if schema.since_version < 18:
                    same(node(op, schema.since_version, [x], axes=axes)(x)[0], want)
                    continue
                given = np.array(axes)
                same(node(op, schema.since_version, [x, given])(x, given)[0], want)
                same(node(op, schema.since_version, [x, given], constants={1: given}, keepdims=0)(x, given)[0], want.squeeze(axes))


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("opset", [11, 18])
def test_without_axes(op, opset, node, same, sample):
    for shape in ((), (3,), (2, 3, 4)):
        x = sample(np.float32, shape, low=1)
        want = FUNCTIONS[op](x.astype(np.float64))
        same(node(op, opset, [x], keepdims=0)(x)[0], np.array(want, np.float32))
        same(node(op, opset, [x])(x)[0], np.array(want, np.float32).reshape((1,) * x.ndim))


@pytest.mark.parametrize(("op", "function"), [("ReduceL1", np.abs), ("ReduceLogSum", np.log), ("ReduceLogSumExp", lambda x: x)])
def test_an_empty_set_of_axes_still_applies_the_function(op, function, node, same, sample):
    x, none = sample(np.float32, (2, 3), low=0.5), np.zeros(0, np.int64)
    for inputs in ([x], [x, none]):
        same(node(op, 18, inputs, noop_with_empty_axes=1)(*inputs)[0], function(x))


def test_nothing_to_reduce(node, same):
    x, axes = np.zeros((2, 0, 3), np.float32), np.array([1])
    same(node("ReduceL1", 18, [x, axes])(x, axes)[0], np.zeros((2, 1, 3), np.float32))
    for op in ("ReduceLogSum", "ReduceLogSumExp"):
        same(node(op, 18, [x, axes])(x, axes)[0], np.full((2, 1, 3), -np.inf, np.float32))
    x, axes = np.zeros((1, 0), np.float32), np.array([1])
    same(node("ReduceL1", 18, [x, axes], keepdims=0)(x, axes)[0], np.zeros(1, np.float32))


def test_log_sum_exp_does_not_overflow(node, same):
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        x = np.array([[1000, 1000], [-1000, -1000], [np.inf, 0], [-np.inf, -np.inf], [np.nan, 0], [-np.inf, 3]], dtype)
        want = np.array([1000 + np.log(2), -1000 + np.log(2), np.inf, -np.inf, np.nan, 3]).astype(dtype)
        axes = np.array([1])
        same(node("ReduceLogSumExp", 18, [x, axes], keepdims=0)(x, axes)[0], want)


class TestCumProd:
    @pytest.mark.parametrize("exclusive", [0, 1])
    @pytest.mark.parametrize("reverse", [0, 1])
    def test_every_type(self, exclusive, reverse, node, same, sample, versions, types_of):
        for dtype in types_of(versions("CumProd")[0], "T"):
            x = sample(dtype, (3, 4), low=1, high=4)
            for axis in (0, 1, -1):
                wide = x.astype(np.float64)
                if reverse:
                    wide = np.flip(wide, axis)
                want = np.cumprod(wide, axis)
                if exclusive:
                    ones = np.ones_like(want.take([0], axis))
                    want = np.concatenate((ones, np.delete(want, -1, axis)), axis)
                want = (np.flip(want, axis) if reverse else want).astype(dtype)
                place = np.array(axis, np.int32)
                same(node("CumProd", 26, [x, place], exclusive=exclusive, reverse=reverse)(x, place)[0], want)

    def test_empty_and_large(self, node, same):
        axis = np.array(1)
        for shape in ((2, 0), (0, 3)):
            for exclusive in (0, 1):
                x = np.zeros(shape, np.float32)
                same(node("CumProd", 26, [x, axis], exclusive=exclusive)(x, axis)[0], x)
        x = np.linspace(0.99, 1.01, 60_000, dtype=np.float32).reshape(300, 200)
        same(node("CumProd", 26, [x, axis])(x, axis)[0], np.cumprod(x, 1), rtol=1e-5)
