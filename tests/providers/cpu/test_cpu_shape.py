"""Shapes and places: ops that move elements, against onnxruntime, the reference evaluator and what the specification says."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from miniort_cpu.kernels.shape import reshaped

INT64 = np.int64


def ints(*values):
    return np.array(values, INT64)


RESHAPES = [
    ((2, 3, 4), [4, 2, 3], 0, (4, 2, 3)),
    ((2, 3, 4), [2, -1], 0, (2, 12)),
    ((2, 3, 4), [0, -1], 0, (2, 12)),
    ((2, 3, 4), [2, 0, 1, -1], 0, (2, 3, 1, 4)),
    ((2, 3, 4), [-1], 0, (24,)),
    ((1,), [], 0, ()),
    ((0, 6, 2), [3, 2, -1], 0, (3, 2, 0)),
    ((0, 6, 2), [0, 0, 3], 1, (0, 0, 3)),
    ((0, 3), [0, -1], 0, (0, 3)),
    ((0, 3, 4), [0, -1], 0, (0, 12)),
    ((0, 3, 4), [-1, 4], 0, (0, 4)),
]


@pytest.mark.parametrize(("shape", "target", "allowzero", "want"), RESHAPES)
@pytest.mark.parametrize("constant", [False, True])
def test_reshape(shape, target, allowzero, want, constant, node, same):
    x, s = np.arange(np.prod(shape), dtype=np.float32).reshape(shape), np.array(target, INT64)
    for opset in (5, 13, 14, 25):
        if opset < 14 and allowzero:
            continue
        attributes = {"allowzero": 1} if allowzero else {}
        same(node("Reshape", opset, [x, s], constants={1: s} if constant else None, **attributes)(x, s)[0], x.reshape(want))


def test_reshape_of_what_is_not_contiguous(node, same, sample):
    for shape in ((4, 3), (300, 200)):
        x = sample(np.float32, shape).T
        same(node("Reshape", 14, [x, INT64])(x, ints(-1))[0], x.reshape(-1))


def test_shape_and_size(node, same):
    for dtype in (np.float32, np.int8, object, ml_dtypes.bfloat16):
        x = np.zeros((2, 3, 4), dtype)
        for opset in (1, 13, 15, 25) if dtype != ml_dtypes.bfloat16 else (13, 25):
            same(node("Shape", opset, [x])(x)[0], ints(2, 3, 4))
            same(node("Size", opset, [x])(x)[0], np.array(24, INT64))
    x = np.zeros((2, 3, 4), np.float32)
    for start, end in ((0, 2), (1, None), (-1, None), (-2, -1), (5, None), (0, -9), (-9, 9), (2, 1)):
        attributes = {"start": start} | ({} if end is None else {"end": end})
        model = node("Shape", 15, [x], **attributes)
        same(model(x)[0], model.onnxruntime(x)[0])
    same(node("Shape", 15, [x])(np.float32(1).reshape(()))[0], np.zeros(0, INT64))


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -3])
def test_flatten(axis, node, same, sample):
    for opset in (9, 11, 13, 25):
        if axis < 0 and opset < 11:
            continue
        x = sample(np.float32, (2, 3, 4))
        model = node("Flatten", opset, [x], axis=axis)
        same(model(x)[0], x.reshape(int(np.prod(x.shape[:axis])), -1))


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (-1,), (-2, 0)])
def test_squeeze_and_unsqueeze(axes, node, same, sample):
    x, narrow = sample(np.float32, (3, 4)), sample(np.float32, (1, 3, 1))
    places = np.array(axes, INT64)
    for opset in (1, 11):
        if opset == 1 and min(axes) < 0:
            continue
        same(node("Unsqueeze", opset, [x], axes=axes)(x)[0], np.expand_dims(x, axes))
        if all(narrow.shape[axis] == 1 for axis in axes):
            same(node("Squeeze", opset, [narrow], axes=axes)(narrow)[0], narrow.squeeze(axes))
    for constants in (None, {1: places}):
        for opset in (13, 25):
            same(node("Unsqueeze", opset, [x, places], constants=constants)(x, places)[0], np.expand_dims(x, axes))
            if all(narrow.shape[axis] == 1 for axis in axes):
                same(node("Squeeze", opset, [narrow, places], constants=constants)(narrow, places)[0], narrow.squeeze(axes))


def test_squeeze_of_all(node, same, sample):
    x = sample(np.float32, (1, 3, 1))
    for opset in (1, 11, 13, 25):
        same(node("Squeeze", opset, [x])(x)[0], x.squeeze())
    scalar = node("Unsqueeze", 13, [np.float32, INT64])(np.array(2, np.float32), ints(0))[0]
    same(scalar, np.array([2], np.float32))


def test_transpose(node, same, sample, versions, types_of):
    for schema in versions("Transpose"):
        for dtype in types_of(schema, "T"):
            x = sample(dtype, (2, 3, 4))
            same(node("Transpose", schema.since_version, [x])(x)[0], x.T)
            same(node("Transpose", schema.since_version, [x], perm=(1, 0, 2))(x)[0], x.transpose(1, 0, 2))


def test_expand(node, same, sample):
    for shape, target in (((3, 1), (2, 1, 4)), ((3, 1), (1,)), ((), (2, 2)), ((2, 3), (2, 3)), ((1,), (0,)), ((1, 3), (400, 200, 1))):
        x, s = sample(np.float32, shape), np.array(target, INT64)
        for constants in (None, {1: s}):
            got = node("Expand", 13, [x, s], constants=constants)(x, s)[0]
            same(got, x * np.ones(target, np.float32))


def test_identity(node, same, sample, versions, types_of):
    for schema in versions("Identity"):
        for dtype in types_of(schema, "V" if schema.since_version >= 14 else "T"):
            x = sample(dtype, (2, 3))
            same(node("Identity", schema.since_version, [x])(x)[0], x)


class TestJoining:
    SHAPES: ClassVar = [((2, 3), (2, 1), (2, 0)), ((0, 3), (0, 3)), ((200, 300), (200, 5))]

    def test_concat(self, node, same, sample, versions, types_of):
        for schema in versions("Concat", 4):
            for dtype in types_of(schema, "T"):
                xs = [sample(dtype, (2, n), seed=n) for n in (3, 1)]
                same(node("Concat", schema.since_version, xs, axis=1)(*xs)[0], np.concatenate(xs, 1))
        for shapes in self.SHAPES:
            xs = [sample(np.float32, shape) for shape in shapes]
            for axis in (1, -1):
                same(node("Concat", 13, xs, axis=axis)(*xs)[0], np.concatenate(xs, axis))
        one = sample(np.float32, (2, 3))
        same(node("Concat", 13, [one], axis=0)(one)[0], one)

    def test_split(self, node, same, sample):
        x = sample(np.float32, (6, 4))
        sizes = ints(1, 3, 2)
        wants = [x[:1], x[1:4], x[4:]]
        for opset in (2, 11):
            for got, want in zip(node("Split", opset, [x], 3, axis=0, split=(1, 3, 2))(x), wants, strict=True):
                same(got, want)
        for opset in (13, 18):
            for constants in (None, {1: sizes}):
                for axis in (0, -2):
                    for got, want in zip(node("Split", opset, [x, sizes], 3, constants, axis=axis)(x, sizes), wants, strict=True):
                        same(got, want)
        for opset in (2, 11, 13):
            for got, want in zip(node("Split", opset, [x], 2, axis=1)(x), (x[:, :2], x[:, 2:]), strict=True):
                same(got, want)
        for got, want in zip(node("Split", 18, [x], 4, axis=0, num_outputs=4)(x), (x[:2], x[2:4], x[4:6], x[6:]), strict=True):
            same(got, want)
        for got, want in zip(node("Split", 18, [x, sizes], 3, axis=0)(x, ints(0, 6, 0)), (x[:0], x, x[:0]), strict=True):
            same(got, want)

    def test_tile(self, node, same, sample):
        x = sample(np.int64, (2, 3))
        for opset in (6, 13):
            for repeats in (ints(1, 2), ints(2, 1), ints(0, 3)):
                same(node("Tile", opset, [x, repeats])(x, repeats)[0], np.tile(x, repeats))


SLICES = [
    ([0, 0], [3, 10], [0, 1], [1, 1]),
    ([1], [-1], [1], [1]),
    ([-1], [-1000], [1], [-1]),
    ([1000], [0], [0], [-2]),
    ([20], [100], [1], [1]),
    ([3], [0], [-1], [-1]),
    ([0], [2**63 - 1], [2], [2]),
    ([-(2**63)], [2**63 - 1], [0], [3]),
    ([2**63 - 1], [-(2**63)], [1], [-1]),
]


@pytest.mark.parametrize(("starts", "ends", "axes", "steps"), SLICES)
def test_slice(starts, ends, axes, steps, node, same, sample):
    x = sample(np.float32, (5, 7, 4))
    values = [np.array(each, INT64) for each in (starts, ends, axes, steps)]
    for opset in (10, 11, 13):
        if opset == 10 and min(axes) < 0:
            continue
        model = node("Slice", opset, [x, *values])
        want = model.onnxruntime(x, *values)[0]
        same(model(x, *values)[0], want)
        same(node("Slice", opset, [x, *values], constants=dict(enumerate(values, 1)))(x)[0], want)
    if steps == [1] * len(steps) and min(axes) >= 0:
        same(node("Slice", 1, [x], starts=starts, ends=ends, axes=axes)(x)[0], want)


def test_slice_without_axes(node, same, sample):
    x = sample(np.float32, (5, 7, 4))
    for dtype in (np.int32, np.int64):
        starts, ends, steps = np.array([1, 2], dtype), np.array([4, -1], dtype), np.array([2, 1], dtype)
        same(node("Slice", 13, [x, starts, ends])(x, starts, ends)[0], x[1:4, 2:-1])
        same(node("Slice", 13, [x, starts, ends, None, steps])(x, starts, ends, None, steps)[0], x[1:4:2, 2:-1])
    same(node("Slice", 1, [x], starts=(1,), ends=(3,))(x)[0], x[1:3])


def test_a_backward_slice_that_starts_before_the_first_element_starts_at_it(node, same):
    x = np.arange(3, dtype=np.float32)
    values = [ints(-(2**31)), ints(-(2**31)), ints(0), ints(-1)]
    same(node("Slice", 13, [x, *values])(x, *values)[0], x[:1])
    same(node("Slice", 13, [x, *values], constants=dict(enumerate(values, 1)))(x)[0], x[:1])
    empty = x[:0]
    same(node("Slice", 13, [empty, *values])(empty, *values)[0], empty)


class TestGather:
    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_gather(self, axis, node, same, sample, versions, types_of):
        for schema in versions("Gather"):
            if axis < 0 and schema.since_version < 11:
                continue
            for dtype in types_of(schema, "T"):
                x = sample(dtype, (3, 4))
                for indices in (ints(1, 0), ints(2).reshape(()), ints(0, 1, 2, 0).reshape(2, 2), np.array([1], np.int32)):
                    for constants in (None, {1: indices}):
                        got = node("Gather", schema.since_version, [x, indices], constants=constants, axis=axis)(x, indices)[0]
                        same(got, np.asarray(np.take(x, indices, axis)).reshape(got.shape))

    def test_negative_indices_and_large_tables(self, node, same, sample):
        table = sample(np.float32, (500, 64))
        indices = np.arange(-500, 500).reshape(2, 500)
        same(node("Gather", 13, [table, indices])(table, indices)[0], table[indices])
        same(node("Gather", 13, [table, indices], axis=1)(table, indices[:, 450:550] % 64 - 64)[0], table[:, indices[:, 450:550] % 64])
        vector = ints(5, 6, 7)
        same(node("Gather", 13, [vector, INT64])(vector, np.array(-1))[0], np.array(7, INT64))
        same(node("Gather", 13, [vector, INT64])(vector, np.zeros((0, 2), INT64))[0], np.zeros((0, 2), INT64))

    def test_an_index_that_is_not_there(self, node):
        from miniort.errors import RunError

        for table in (np.zeros((3, 2), np.float32), np.zeros((500, 64), np.float32)):
            for index in (500, -501):
                with pytest.raises(RunError, match="IndexError"):
                    node("Gather", 13, [table, INT64])(table, ints(index))

    def test_gather_elements(self, node, same, sample):
        for dtype in (np.float32, object, np.int8):
            x = sample(dtype, (3, 4))
            for indices, axis in ((ints(0, 2, 1, -1).reshape(1, 4), 0), (ints(3, -1, 0).reshape(3, 1), 1), (ints(1, 0).reshape(2, 1), -1)):
                for opset in (11, 13):
                    model = node("GatherElements", opset, [x, indices], axis=axis)
                    same(model(x, indices)[0], model.onnxruntime(x, indices)[0])

    def test_gather_nd(self, node, same, sample):
        x = sample(np.float32, (2, 3, 4))
        for indices, batch in (
            (ints(0, 1, 1, 2).reshape(2, 2), 0),
            (ints(0, 1, -1).reshape(1, 3), 0),
            (ints(1).reshape(1, 1), 0),
            (ints(1, 0).reshape(2, 1), 1),
            (ints(1, 2, 0, 3).reshape(2, 1, 2), 1),
            (ints(1, 2, 0, 3, 1, 0).reshape(2, 3, 1), 2),
            (ints(1, 2), 0),
        ):
            model = node("GatherND", 13, [x, indices], batch_dims=batch)
            same(model(x, indices)[0], model.onnxruntime(x, indices)[0])
        same(node("GatherND", 11, [x, INT64])(x, ints(1, 2, 3))[0], x[1, 2, 3, ...])


class TestScatter:
    @pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
    @pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16, ml_dtypes.bfloat16])
    def test_reductions(self, reduction, dtype, node, same):
        opset = {"none": 11, "add": 16, "mul": 16}.get(reduction, 18)
        if dtype == ml_dtypes.bfloat16:
            opset = max(opset, 13)
        attributes = {} if reduction == "none" else {"reduction": reduction}
        combine = {"none": lambda _, u: u, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
        data = np.arange(1, 7).reshape(2, 3).astype(dtype)
        indices, updates = ints(1, 0, 0, 2).reshape(2, 2), np.array([-5, 7], dtype)
        want = data.copy()
        for place, update in zip(indices, updates, strict=True):
            want[tuple(place)] = combine(want[tuple(place)], update)
        same(node("ScatterND", opset, [data, indices, updates], **attributes)(data, indices, updates)[0], want)
        indices, updates = ints(2, -3).reshape(2, 1), np.array([[-5], [7]], dtype)
        want = data.copy()
        for row, (place, update) in enumerate(zip(indices[:, 0], updates[:, 0], strict=True)):
            want[row, place] = combine(want[row, place], update)
        same(node("ScatterElements", opset, [data, indices, updates], axis=1, **attributes)(data, indices, updates)[0], want)

    def test_scatter_nd_min(self, node, same):
        data, index, update = np.array([[0, 1], [2, 3]], np.float32), ints(1, 1).reshape(1, 2), np.array([-5], np.float32)
        want = np.array([[0, 1], [2, -5]], np.float32)
        same(node("ScatterND", 18, [data, index, update], reduction="min")(data, index, update)[0], want)

    def test_slices_and_repeated_places(self, node, same):
        data, indices = np.zeros((3, 2), np.float32), ints(1, 1).reshape(2, 1)
        updates = np.array([[1, 2], [3, 4]], np.float32)
        want = np.array([[0, 0], [4, 6], [0, 0]], np.float32)
        same(node("ScatterND", 16, [data, indices, updates], reduction="add")(data, indices, updates)[0], want)

    def test_text(self, node, same):
        data, indices, updates = np.array(["a", "b"], object), ints(1).reshape(1, 1), np.array(["z"], object)
        same(node("ScatterND", 13, [data, indices, updates])(data, indices, updates)[0], np.array(["a", "z"], object))


def test_where(node, same, sample, versions, types_of):
    for schema in versions("Where"):
        for dtype in types_of(schema, "T"):
            c, x, y = sample(bool, (3, 1)), sample(dtype, (3, 4)), sample(dtype, (4,), seed=1)
            same(node("Where", schema.since_version, [c, x, y])(c, x, y)[0], np.where(c, x, y).astype(dtype))
    for shapes in (((), (), ()), ((0, 1), (1, 3), ()), ((300, 200), (200,), (300, 1)), ((1,), (300, 200), ())):
        c, x, y = sample(bool, shapes[0]), sample(np.float32, shapes[1]), sample(np.float32, shapes[2], seed=1)
        same(node("Where", 16, [c, x, y])(c, x, y)[0], np.where(c, x, y))


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, 0, 1, -1, 5, -5])
def test_trilu(upper, k, node, same, sample):
    want = np.triu if upper else np.tril
    for dtype in (np.float32, np.int64, bool, ml_dtypes.bfloat16):
        for shape in ((3, 4), (2, 4, 3), (0, 3)):
            x = sample(dtype, shape)
            inputs = [x] if k is None else [x, np.array(k)]
            same(node("Trilu", 14, inputs, upper=upper)(*inputs)[0], want(x, k or 0).astype(dtype))
    words = np.full((2, 2), "a", object)
    same(node("Trilu", 14, [words], upper=1)(words)[0], np.array([["a", "a"], ["", "a"]], object))


def test_non_zero(node, same, sample):
    for dtype in (np.float32, np.int8, bool, ml_dtypes.bfloat16):
        for shape in ((3, 4), (5,), (0, 2), (2, 2, 2)):
            x = sample(dtype, shape)
            same(node("NonZero", 13, [x])(x)[0], np.array(np.nonzero(x), INT64))
    for value, count in ((0, 0), (3, 1)):
        x = np.array(value, np.float32)
        same(node("NonZero", 13, [x])(x)[0], np.zeros((0, count), INT64))


class TestGeneration:
    def test_constant(self, node, same):
        tensor = np.array([[1, 2]], np.float16)
        for opset in (1, 9, 11, 13, 25):
            same(node("Constant", opset, [], value=tensor)()[0], tensor)
        for attributes, want in (
            ({"value_int": 3}, np.array(3, INT64)),
            ({"value_ints": [1, 2]}, ints(1, 2)),
            ({"value_float": 0.5}, np.array(0.5, np.float32)),
            ({"value_floats": [0.5]}, np.array([0.5], np.float32)),
            ({"value_string": "x"}, np.array("x", object)),
            ({"value_strings": ["x", "y"]}, np.array(["x", "y"], object)),
        ):
            same(node("Constant", 13, [], **attributes)()[0], want)

    def test_constant_of_shape(self, node, same):
        for shape in (ints(2, 3), ints(0, 2), np.zeros(0, INT64), ints(300, 200)):
            same(node("ConstantOfShape", 9, [shape])(shape)[0], np.zeros(shape, np.float32))
            for value in (np.array([7], np.int8), np.array([True]), np.array([1.5], np.float64)):
                same(node("ConstantOfShape", 9, [shape], value=value)(shape)[0], np.full(shape, value[0]))
        value = np.array([2], ml_dtypes.bfloat16)
        same(node("ConstantOfShape", 20, [INT64], value=value)(ints(2))[0], np.full(2, value[0]))

    def test_range(self, node, same):
        for dtype in (np.int16, np.int32, np.int64, np.float32, np.float64):
            for start, limit, delta in ((3, 9, 3), (10, 4, -2), (0, 5, 2), (5, 0, 1), (0, 0, 1)):
                inputs = [np.array(each, dtype) for each in (start, limit, delta)]
                for opset in (11, 27):
                    same(node("Range", opset, inputs)(*inputs)[0], np.arange(start, limit, delta).astype(dtype))
        fine = [np.array(each, np.float32) for each in (0, 1, 0.1)]
        same(node("Range", 11, fine)(*fine)[0], np.arange(10).astype(np.float32) * np.float32(0.1))
        for dtype in (np.float16, ml_dtypes.bfloat16):
            inputs = [np.array(each, dtype) for each in (0, 3000, 1)]
            same(node("Range", 27, inputs)(*inputs)[0], np.arange(float(inputs[1]), dtype=np.float32).astype(dtype))


def test_a_part_of_a_large_array_is_reshaped_without_a_copy_where_that_can_be() -> None:
    part = np.arange(100 * 3000, dtype=np.float32).reshape(100, 3000)[:, :2000]
    heads = reshaped(np.empty, part, (100, 20, 100))
    assert np.shares_memory(heads, part)
    np.testing.assert_array_equal(heads, part.copy().reshape(100, 20, 100))
    halves = reshaped(np.empty, part, (200, 1000))
    assert not np.shares_memory(halves, part)
    np.testing.assert_array_equal(halves, part.copy().reshape(200, 1000))
