"""Reductions, running sums and orders: each version, axes wherever they may stand, empty tensors, all types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

INT64 = np.int64

WANTED = {
    "ReduceSum": lambda x, axes, keep: np.sum(x, axes, keepdims=keep),
    "ReduceProd": lambda x, axes, keep: np.prod(x, axes, keepdims=keep),
    "ReduceMean": lambda x, axes, keep: np.mean(x, axes, keepdims=keep),
    "ReduceSumSquare": lambda x, axes, keep: np.sum(x * x, axes, keepdims=keep),
    "ReduceL2": lambda x, axes, keep: np.sqrt(np.sum(x * x, axes, keepdims=keep)),
    "ReduceMax": lambda x, axes, keep: np.max(x, axes, keepdims=keep),
    "ReduceMin": lambda x, axes, keep: np.min(x, axes, keepdims=keep),
}
"""In float64, as NumPy spells it."""


def axes_are_an_input(op, version):
    return version >= (13 if op == "ReduceSum" else 18)


@pytest.mark.parametrize("op", WANTED)
def test_every_version_and_type(op, node, same, sample, versions, types_of):
    for schema in versions(op, 1):
        for dtype in types_of(schema, "T"):
            x = sample(dtype, (2, 3, 4), low=1, high=3)
            want = np.asarray(WANTED[op](x.astype(np.float64), (1,), True)).astype(dtype)
            if axes_are_an_input(op, schema.since_version):
                got = node(op, schema.since_version, [x, INT64])(x, np.array([1]))[0]
            else:
                got = node(op, schema.since_version, [x], axes=[1])(x)[0]
            same(got, want)


@pytest.mark.parametrize("op", WANTED)
@pytest.mark.parametrize("axes", [None, (), (0,), (-1,), (0, 2), (0, 1, 2), (2, -3)])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_axes(op, axes, keepdims, node, same, sample):
    x = sample(np.float32, (2, 3, 4), low=0.5)
    want = np.asarray(WANTED[op](x.astype(np.float64), axes or None, bool(keepdims))).astype(np.float32)
    attributes = {"keepdims": keepdims} | ({} if not axes else {"axes": axes})
    same(node(op, 11, [x], **attributes)(x)[0], want)
    inputs = [x] if axes is None else [x, np.array(axes, INT64)]
    for constants in (None, {1: inputs[1]} if len(inputs) == 2 else None):
        same(node(op, 18, inputs, constants=constants, keepdims=keepdims)(*inputs)[0], want)
    if not axes:
        quiet = node(op, 18, inputs, keepdims=keepdims, noop_with_empty_axes=1)(*inputs)[0]
        same(quiet, WANTED[op](x[..., None], -1, False))


def test_nothing_to_reduce(node, same):
    x, axes = np.zeros((1, 0), np.float32), np.array([1])
    for op, value in (
        ("ReduceSum", 0),
        ("ReduceProd", 1),
        ("ReduceMax", -np.inf),
        ("ReduceMin", np.inf),
        ("ReduceL2", 0),
        ("ReduceMean", np.nan),
    ):
        same(node(op, 20, [x, axes], keepdims=0)(x, axes)[0], np.array([value], np.float32))
        same(node(op, 20, [x, axes], keepdims=0)(x, np.array([0]))[0], np.zeros(0, np.float32))
    whole, switches = np.zeros((1, 0), np.int32), np.zeros((1, 0), bool)
    same(node("ReduceMax", 20, [whole, axes])(whole, axes)[0], np.array([[-(2**31)]], np.int32))
    same(node("ReduceMin", 20, [whole, axes])(whole, axes)[0], np.array([[2**31 - 1]], np.int32))
    same(node("ReduceMax", 20, [switches, axes])(switches, axes)[0], np.array([[False]]))
    same(node("ReduceMin", 20, [switches, axes])(switches, axes)[0], np.array([[True]]))


def test_a_scalar(node, same):
    x = np.array(3, np.float32)
    for op, value in (("ReduceSum", 3), ("ReduceL2", 3), ("ReduceSumSquare", 9), ("ReduceMax", 3)):
        same(node(op, 18, [x])(x)[0], np.array(value, np.float32))


def test_narrow_floats_are_summed_in_float32(node, same):
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = np.full(4096, 0.125, dtype)
        same(node("ReduceSum", 13, [x], keepdims=0)(x)[0], np.array(512, dtype))
        same(node("ReduceMean", 18, [x], keepdims=0)(x)[0], np.array(0.125, dtype))


def test_integers_keep_their_type_and_wrap(node, same):
    x = np.array([2**31 - 1, 1], np.int32)
    same(node("ReduceSum", 13, [x], keepdims=0)(x)[0], np.array(-(2**31), np.int32))
    x = np.array([-3, -4], np.int64)
    same(node("ReduceMean", 18, [x], keepdims=0)(x)[0], np.array(-3, np.int64))


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_cumulative_sum(exclusive, reverse, node, same, sample, versions, types_of):
    for schema in versions("CumSum"):
        for dtype in types_of(schema, "T"):
            for axis in (np.array(0, np.int32), np.array(-1), np.array([1])):
                x = sample(dtype, (3, 4))
                place = int(axis.item())
                wide = np.flip(x, place) if reverse else x
                total = np.cumsum(wide.astype(np.float64), place) - (wide.astype(np.float64) if exclusive else 0)
                want = (np.flip(total, place) if reverse else total).astype(dtype)
                same(node("CumSum", schema.since_version, [x, axis], exclusive=exclusive, reverse=reverse)(x, axis)[0], want, atol=1e-5)
    nothing = np.zeros((0, 2), np.float32)
    same(node("CumSum", 14, [nothing, INT64], exclusive=exclusive)(nothing, np.array(0))[0], nothing)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_where_extremes_are(op, node, same, versions, types_of):
    find = np.argmax if op == "ArgMax" else np.argmin
    for schema in versions(op):
        for dtype in types_of(schema, "T"):
            x = np.array([[3, 1, 3], [1, 1, 2]]).astype(dtype)
            wide = x.astype(np.float64)
            for axis in (0, 1) + ((-1, -2) if schema.since_version >= 11 else ()):
                for keepdims in (0, 1):
                    got = node(op, schema.since_version, [x], axis=axis, keepdims=keepdims)(x)[0]
                    same(got, find(wide, axis, keepdims=bool(keepdims)))
                    if schema.since_version >= 12:
                        got = node(op, schema.since_version, [x], axis=axis, keepdims=keepdims, select_last_index=1)(x)[0]
                        same(got, x.shape[axis] - 1 - find(np.flip(wide, axis), axis, keepdims=bool(keepdims)))
    row = np.array([1, 3, 2], np.float32)
    same(node(op, 13, [row], keepdims=0)(row)[0], np.array(1 if op == "ArgMax" else 0, INT64))


class TestTopK:
    def test_equal_elements_keep_their_order(self, node, same):
        x, k = np.array([1, 3, 3, 2, 3], np.float32), np.array([2])
        values, indices = node("TopK", 11, [x, k], 2)(x, k)
        same(values, np.array([3, 3], np.float32))
        same(indices, np.array([1, 2], INT64))
        values, indices = node("TopK", 11, [x, k], 2, largest=0)(x, k)
        same(values, np.array([1, 2], np.float32))
        same(indices, np.array([0, 3], INT64))

    def test_every_version_and_type(self, node, same, sample, versions, types_of):
        for schema in versions("TopK", 1):
            for dtype in types_of(schema, "T"):
                x = sample(dtype, (3, 6), seed=3)
                want = np.argsort(-x.astype(np.float64), -1, kind="stable")[:, :2]
                if schema.since_version < 10:
                    values, indices = node("TopK", schema.since_version, [x], 2, k=2)(x)
                else:
                    values, indices = node("TopK", schema.since_version, [x, INT64], 2)(x, np.array([2]))
                same(indices, want)
                same(values, np.take_along_axis(x, want, -1))

    @pytest.mark.parametrize("largest", [0, 1])
    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_many_equal_among_many(self, largest, axis, node, same):
        generator = np.random.default_rng(0)
        for dtype in (np.float32, np.int8, np.uint64):
            x = generator.integers(0, 20, (90, 80)).astype(dtype)
            for count in (0, 1, 5, 80):
                k = np.array([count])
                order = np.argsort(x.astype(np.float64) * (-1 if largest else 1), axis, kind="stable").take(np.arange(count), axis)
                values, indices = node("TopK", 11, [x, k], 2, axis=axis, largest=largest)(x, k)
                same(indices, order)
                same(values, np.take_along_axis(x, order, axis))

    def test_not_a_number(self, node):
        x = np.arange(100, dtype=np.float32)
        x[7] = np.nan
        values, indices = node("TopK", 11, [x, INT64], 2)(x, np.array([3]))
        assert indices.tolist() == [7, 99, 98]
        assert np.isnan(values[0])

    def test_more_than_there_are(self, node):
        from miniort.errors import RunError

        x = np.zeros(3, np.float32)
        with pytest.raises(RunError, match="k must lie in"):
            node("TopK", 11, [x, INT64], 2)(x, np.array([4]))
