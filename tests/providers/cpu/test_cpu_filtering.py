"""Compress, Unique, OneHot, Hardmax, EyeLike, ReverseSequence, Scatter: each version, type and way to name axes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from miniort.errors import KernelError, RunError

INT64 = np.int64


class TestCompress:
    def test_every_version_and_type(self, node, same, sample, versions, types_of):
        keep = np.array([False, True, True])
        for schema in versions("Compress"):
            for dtype in types_of(schema, "T"):
                x = sample(dtype, (3, 4))
                same(node("Compress", schema.since_version, [x, keep], axis=0)(x, keep)[0], x[1:])
                same(node("Compress", schema.since_version, [x, keep])(x, keep)[0], x.ravel()[1:3])

    def test_axes_and_empty_tensors(self, node, same, sample):
        x = sample(np.float32, (2, 3, 4))
        for axis in (-3, -1, 1, 2):
            keep = np.arange(x.shape[axis]) % 2 == 1
            same(node("Compress", 11, [x, keep], axis=axis)(x, keep)[0], np.compress(keep, x, axis))
        none = np.zeros(0, bool)
        same(node("Compress", 11, [x, none], axis=1)(x, none)[0], np.zeros((2, 0, 4), np.float32))
        empty = np.zeros((0, 3), np.float32)
        same(node("Compress", 11, [empty, none], axis=0)(empty, none)[0], empty)


class TestUnique:
    @pytest.mark.parametrize("in_order", [0, 1])
    def test_every_version_and_type(self, in_order, node, same, sample, versions, types_of):
        for schema in versions("Unique"):
            for dtype in types_of(schema, "T"):
                if dtype.kind in "cV":
                    continue  # test_complex_and_bfloat16
                x = sample(dtype, (4, 3))
                for attributes in ({}, {"axis": 0}, {"axis": -1}):
                    got = node("Unique", schema.since_version, [x], 4, sorted=in_order, **attributes)(x)
                    self.check(same, x, got, attributes.get("axis"), in_order)

    @staticmethod
    def check(same, x, got, axis, in_order):
        """Put together again, the values are x; each is there once, in the order that was asked for."""
        values, first, inverse, counts = got
        flat, place = (x.ravel(), 0) if axis is None else (x, axis)
        same(values.take(inverse, place), flat)
        same(flat.take(first, place), values)
        slices = [np.moveaxis(values, place, 0)[i : i + 1].ravel().tolist() for i in range(values.shape[place])]
        assert len({repr(each) for each in slices}) == len(slices)
        assert slices == sorted(slices) if in_order else first.tolist() == sorted(first.tolist())
        same(counts, np.bincount(inverse, minlength=len(slices)))
        assert [inverse.tolist().index(i) for i in range(len(slices))] == first.tolist()

    def test_against_onnxruntime(self, node, same, sample):
        for dtype in (np.float32, np.int64, object):
            x = sample(dtype, (3, 2, 4), high=0)
            for in_order in (0, 1):
                for attributes in ({}, {"axis": 0}, {"axis": 1}, {"axis": 2}):
                    model = node("Unique", 11, [x], 4, sorted=in_order, **attributes)
                    for got, want in zip(model(x), model.onnxruntime(x), strict=True):
                        same(got, want)

    def test_complex_and_bfloat16(self, node, same):
        x = np.array([2 + 1j, 1, 2 + 1j, 1 + 1j], np.complex64)
        same(node("Unique", 11, [x])(x)[0], np.array([1, 1 + 1j, 2 + 1j], np.complex64))
        x = np.array([[2, 1, 2], [2, 1, 2]], ml_dtypes.bfloat16)
        same(node("Unique", 28, [x], axis=1)(x)[0], np.array([[1, 2], [1, 2]], ml_dtypes.bfloat16))

    def test_nan_counts_once(self, node, same):
        x = np.array([np.nan, 1, np.nan, 0.0, -0.0], np.float32)
        values, first, inverse, counts = node("Unique", 11, [x], 4)(x)
        same(values, np.array([0, 1, np.nan], np.float32))
        assert (first.tolist(), inverse.tolist(), counts.tolist()) == ([3, 1, 0], [2, 1, 2, 0, 0], [2, 1, 2])

    def test_empty_tensors(self, node, same):
        for shape, axis, values in (((0,), None, (0,)), ((0, 2), 0, (0, 2)), ((3, 0), 0, (1, 0)), ((2, 0), 1, (2, 0))):
            x = np.zeros(shape, np.float32)
            got = node("Unique", 11, [x], 4, **({} if axis is None else {"axis": axis}))(x)
            same(got[0], np.zeros(values, np.float32))
            assert got[1].size == got[3].size == (x.size if axis is None else values[axis])
        scalar = np.array(3, np.int64)
        same(node("Unique", 11, [scalar])(scalar)[0], np.array([3]))

    def test_only_the_outputs_that_are_asked_for(self, node, same):
        x = np.array([3, 1, 3])
        same(node("Unique", 11, [x])(x)[0], np.array([1, 3]))
        same(node("Unique", 11, [x], 2)(x)[1], np.array([1, 0]))


class TestOneHot:
    def test_every_version_and_type(self, node, same, versions, types_of):
        for schema in versions("OneHot"):
            since = schema.since_version
            for dtype in types_of(schema, "T3"):
                values = np.array(["off", "on"], object) if dtype.kind == "O" else np.array([0, 1]).astype(dtype)
                indices, depth = np.array([[0, 2], [1, 5]]), np.array(3)
                want = values[(indices[..., None] == np.arange(3)).astype(int)]
                same(node("OneHot", since, [indices, depth, values])(indices, depth, values)[0], want)
            for dtype in types_of(schema, "T1"):
                indices, depth, values = np.array([0, 2]).astype(dtype), np.array([3]).astype(dtype), np.array([5, 7])
                same(node("OneHot", since, [indices, depth, values])(indices, depth, values)[0], np.array([[7, 5, 5], [5, 5, 7]]))

    def test_axes(self, node, same):
        indices, depth, values = np.array([[0, 2, -1], [1, -3, 5]]), np.array(3), np.array([0, 1], np.float32)
        for axis in (-3, -2, -1, 0, 1, 2):
            model = node("OneHot", 11, [indices, depth, values], axis=axis)
            same(model(indices, depth, values)[0], model.onnxruntime(indices, depth, values)[0])

    def test_negative_indices_count_from_the_end_since_opset_11(self, node, same):
        indices, depth, values = np.array([-1, -4]), np.array(3), np.array([0, 1])
        same(node("OneHot", 11, [indices, depth, values])(indices, depth, values)[0], np.array([[0, 0, 1], [0, 0, 0]]))
        same(node("OneHot", 9, [indices, depth, values])(indices, depth, values)[0], np.zeros((2, 3), INT64))

    def test_scalars_and_empty_tensors(self, node, same):
        depth, values = np.array(2), np.array([0, 1])
        for indices, want in ((np.array(1), np.array([0, 1])), (np.zeros((0, 3), INT64), np.zeros((0, 3, 2), INT64))):
            same(node("OneHot", 11, [indices, depth, values])(indices, depth, values)[0], want)
        none = np.array(0)
        same(node("OneHot", 11, [depth, none, values])(depth, none, values)[0], np.zeros(0, INT64))


class TestHardmax:
    def test_every_version_and_type(self, node, same, sample, versions, types_of):
        for schema in versions("Hardmax"):
            for dtype in types_of(schema, "T"):
                x = sample(dtype, (2, 3, 4))
                for attributes in ({}, {"axis": 0}, {"axis": 2}):
                    model = node("Hardmax", schema.since_version, [x], **attributes)
                    axis = attributes.get("axis", 1 if schema.since_version < 13 else -1)
                    rows = x.astype(np.float64)
                    rows = rows.reshape(int(np.prod(x.shape[:axis])), -1) if schema.since_version < 13 else np.moveaxis(rows, axis, -1)
                    want = (rows.argmax(-1)[..., None] == np.arange(rows.shape[-1])).astype(dtype)
                    same(model(x)[0], want.reshape(x.shape) if schema.since_version < 13 else np.moveaxis(want, -1, axis))

    def test_the_first_of_equal_ones(self, node, same):
        x = np.array([[1, 3, 3], [2, 2, 2]], np.float32)
        same(node("Hardmax", 13, [x])(x)[0], np.array([[0, 1, 0], [1, 0, 0]], np.float32))
        for opset in (11, 13):
            empty = np.zeros((0, 3), np.float32)
            same(node("Hardmax", opset, [empty], axis=1)(empty)[0], empty)


class TestEyeLike:
    def test_every_version_and_type(self, node, same, sample, versions, types_of):
        from miniort.types import dtype_to_onnx

        for schema in versions("EyeLike"):
            for dtype in types_of(schema, "T1"):
                x = sample(dtype, (2, 3))
                same(node("EyeLike", schema.since_version, [x])(x)[0], np.eye(2, 3).astype(dtype))
            for dtype in types_of(schema, "T2"):
                x = sample(np.float32, (3, 2))
                for k in (0, 1, -1, 5):
                    got = node("EyeLike", schema.since_version, [x], dtype=dtype_to_onnx(dtype), k=k)(x)[0]
                    same(got, np.eye(3, 2, k).astype(dtype))


class TestReverseSequence:
    @pytest.mark.parametrize(("time_axis", "batch_axis"), [(0, 1), (1, 0)])
    def test_every_version_and_type(self, time_axis, batch_axis, node, same, sample, versions, types_of):
        for schema in versions("ReverseSequence"):
            for dtype in types_of(schema, "T"):
                x = sample(dtype, (4, 3, 2) if time_axis == 0 else (3, 4, 2))
                lengths = np.array([4, 0, 3])
                want = x.copy()
                for row, length in enumerate(lengths):
                    here = np.moveaxis(want, batch_axis, 0)[row]
                    here[:length] = here[:length][::-1].copy()
                attributes = {"time_axis": time_axis, "batch_axis": batch_axis}
                same(node("ReverseSequence", schema.since_version, [x, lengths], **attributes)(x, lengths)[0], want)

    def test_an_empty_batch(self, node, same):
        x, lengths = np.zeros((4, 0), np.float32), np.zeros(0, INT64)
        same(node("ReverseSequence", 10, [x, lengths])(x, lengths)[0], x)

    def test_other_axes(self, node):
        with pytest.raises(KernelError, match="time_axis"):
            node("ReverseSequence", 10, [np.float32, INT64], time_axis=1, batch_axis=1)(np.zeros((2, 2), np.float32), np.zeros(2, INT64))


def test_scatter_is_scatter_elements(node, same, sample):
    for dtype in (np.float32, object, np.int8):
        x, indices, updates = sample(dtype, (3, 3)), np.array([[1, 0, 2], [0, 2, -1]]), sample(dtype, (2, 3), seed=1)
        want = node("ScatterElements", 11, [x, indices, updates], axis=1)(x, indices, updates)[0]
        for opset in (9, 10, 11):
            same(node("Scatter", opset, [x, indices, updates], axis=1)(x, indices, updates)[0], want)


def test_an_index_in_compress_that_is_not_there(node):
    x, keep = np.zeros(2, np.float32), np.ones(3, bool)
    model = node("Compress", 11, [x, keep], axis=0)
    with pytest.raises(RunError, match="Compress"):
        model(x, keep)
