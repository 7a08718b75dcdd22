"""QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear, and products of integer matrices: every version, type and granularity."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from miniort.types import dtype_to_onnx

F32 = np.float32
SMALL = [ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz]


def limits(dtype):
    info = ml_dtypes.iinfo(dtype)
    return int(info.min), int(info.max)


def is_integer(dtype):
    return dtype.kind in "iu" or (dtype.kind == "V" and "int" in dtype.name)


def divided(x, scale, precision):
    """`x` / scale, rounded to the type that the specification says the division has."""
    wide = F32 if "float8_e8m0" in precision.name else np.float64 if precision.kind in "iu" else precision
    a, b = x.astype(wide), scale.astype(precision).astype(wide)
    return (a.astype(F32) / b.astype(F32)).astype(wide) if np.dtype(wide).itemsize < 4 else a / b


@np.errstate(all="ignore")
def quantized(x, scale, zero_point, dtype, precision=None):
    """The specification's formula, with NumPy."""
    quotient = divided(x, scale, np.dtype(precision or scale.dtype)).astype(np.float64)
    if not is_integer(np.dtype(dtype)):
        largest = float(ml_dtypes.finfo(dtype).max)
        return np.clip(quotient, -largest, largest).astype(F32).astype(dtype)
    low, high = limits(dtype)
    return np.clip(np.rint(quotient) + zero_point, low, high).astype(dtype)


X = np.array([[-300, -7.5, -2.5, -0.5, 0, 0.5], [1.5, 2.5, 3.49, 100, 300, 1e5]], F32)


class TestQuantize:
    @np.errstate(all="ignore")
    def test_every_version_and_type(self, node, same, versions, types_of):
        for schema in versions("QuantizeLinear"):
            version = schema.since_version
            parameters = {each.name: each.type_str for each in schema.inputs}
            sources = types_of(schema, parameters["x"])
            targets = [np.dtype(each) for each in types_of(schema, parameters["y_zero_point"])]
            own = parameters["y_scale"] == parameters["x"]
            scales = None if own else [np.dtype(F32)] if "(" in parameters["y_scale"] else types_of(schema, parameters["y_scale"])
            for source in sources:
                x = X.astype(source)
                for scale_type in [source] if scales is None else scales:
                    scale = np.array(2).astype(scale_type)
                    for target in targets:
                        if target != np.int8 and (source != F32 or scale_type != F32):
                            continue  # all targets from float32, and from all other types one target
                        zero_point = np.array(1 if is_integer(target) else 0).astype(target)
                        want = quantized(x, scale, 1, target)
                        same(node("QuantizeLinear", version, [x, scale, zero_point])(x, scale, zero_point)[0], want)

    def test_ties_go_to_even(self, node, same):
        x, scale = np.array([0.25, 0.75, 1.25, 1.75], F32), np.array(0.5, F32)
        for version in (10, 13, 19, 21, 23, 24, 25, 28):
            same(node("QuantizeLinear", version, [x, scale])(x, scale)[0], np.array([0, 2, 2, 4], np.uint8))
            zero_point = np.array(1, np.int8)  # added after the rounding
            same(node("QuantizeLinear", version, [x, scale, zero_point])(x, scale, zero_point)[0], np.array([1, 3, 3, 5], np.int8))

    def test_special_numbers(self, node, same):
        """Infinities saturate. onnx.reference casts them to int32 first, which makes both the smallest one; saturate() says otherwise."""
        x, scale = np.array([np.inf, -np.inf, np.nan, 3e38], F32), np.array(1, F32)
        for dtype in (np.uint8, np.int8, np.int16, ml_dtypes.int4):
            low, high = limits(dtype)
            zero_point = np.zeros((), dtype)
            same(
                node("QuantizeLinear", 21, [x, scale, zero_point])(x, scale, zero_point)[0], np.array([high, low, low, high]).astype(dtype)
            )
        zeros = np.zeros((), F32)
        same(node("QuantizeLinear", 21, [x, zeros])(np.array([1, -1], F32), zeros)[0], np.array([255, 0], np.uint8))

    @pytest.mark.parametrize("axis", [0, 1, -1, -3])
    def test_axis(self, axis, node, same):
        x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(F32) * 20
        size = x.shape[axis]
        scale, zero_point = np.arange(1, size + 1).astype(F32) / 3, np.arange(size).astype(np.uint8)
        shape = [-1 if each == axis % 3 else 1 for each in range(3)]
        want = quantized(x, scale.reshape(shape), zero_point.reshape(shape), np.uint8)
        for version in (13, 19, 28):
            made = node("QuantizeLinear", version, [x, scale, zero_point], axis=axis)
            same(made(x, scale, zero_point)[0], want)
            if version < 28:
                same(made.onnxruntime(x, scale, zero_point)[0], want)

    @pytest.mark.parametrize(("axis", "length", "block"), [(0, 6, 2), (1, 7, 3), (-1, 8, 4), (2, 5, 8)])
    def test_blocks(self, axis, length, block, node, same):
        shape = [2, 3, 4]
        shape[axis] = length
        x = np.random.default_rng(0).standard_normal(shape).astype(F32) * 20
        shape[axis] = -(-length // block)
        generator = np.random.default_rng(1)
        scale, zero_point = generator.uniform(0.5, 2, shape).astype(F32), generator.integers(-5, 5, shape).astype(np.int8)
        wide = [each.repeat(block, axis).take(range(length), axis) for each in (scale, zero_point)]
        want = quantized(x, *wide, np.int8)
        for version in (21, 28):
            given = [x, scale, zero_point]
            same(node("QuantizeLinear", version, given, axis=axis, block_size=block)(*given)[0], want)
            given = [want, scale, zero_point]
            back = ((want.astype(F32) - wide[1]) * wide[0]).astype(F32)
            same(node("DequantizeLinear", version, given, axis=axis, block_size=block)(*given)[0], back)

    def test_output_type_and_precision(self, node, same):
        x, scale = np.array([[-9, 0.3, 2.7, 1000]], F32), np.array(0.3, F32)
        for dtype in (np.int16, ml_dtypes.uint4, ml_dtypes.float8_e5m2):
            made = node("QuantizeLinear", 23, [x, scale], output_dtype=dtype_to_onnx(np.dtype(dtype)))
            same(made(x, scale)[0], quantized(x, scale, 0, dtype))
        many = np.arange(2000, dtype=F32).reshape(40, 50)
        for precision in (np.float16, ml_dtypes.bfloat16):
            attributes = {"output_dtype": dtype_to_onnx(np.dtype(np.int16)), "precision": dtype_to_onnx(np.dtype(precision))}
            got = node("QuantizeLinear", 23, [many, scale], **attributes)(many, scale)[0]
            same(got, quantized(many, scale, 0, np.int16, precision))
            assert (got != quantized(many, scale, 0, np.int16)).any(), "the precision must matter here, or this says nothing"

    @pytest.mark.parametrize("dtype", SMALL[1:])
    def test_float8_without_saturation(self, dtype, node):
        x, scale, zero = np.array([1e6, -1e6, 2], F32), np.array(1, F32), np.zeros((), dtype)
        got = node("QuantizeLinear", 19, [x, scale, zero], saturate=0)(x, scale, zero)[0].astype(F32)
        assert not np.isfinite(got[:2]).any()
        assert got[2] == 2

    def test_empty_scalar_and_large(self, node, same):
        scale = np.array(0.1, F32)
        for x in (np.zeros((0, 3), F32), np.array(3.14, F32), np.random.default_rng(0).standard_normal((300, 200)).astype(F32)):
            for zero_point in (None, np.array(3, np.uint8)):
                given = [x, scale] if zero_point is None else [x, scale, zero_point]
                made = node("QuantizeLinear", 21, given)
                same(made(*given)[0], quantized(x, scale, 0 if zero_point is None else 3, np.uint8))
        one = np.array([0.1], F32)  # a vector with one element is per tensor too
        same(node("QuantizeLinear", 13, [X, one])(X, one)[0], quantized(X, scale, 0, np.uint8))


class TestDequantize:
    @np.errstate(all="ignore")
    def test_every_version_and_type(self, node, same, versions, types_of):
        for schema in versions("DequantizeLinear"):
            version = schema.since_version
            parameters = {each.name: each.type_str for each in schema.inputs}
            scales = [np.dtype(F32)] if "(" in parameters["x_scale"] else types_of(schema, parameters["x_scale"])
            for source in types_of(schema, parameters["x"]):
                source = np.dtype(source)
                numbers = [0, 1] if not is_integer(source) or limits(source)[1] < 4 else [0, 1, 3, 4, *limits(source)]
                x = np.array([numbers]).astype(source)
                zero_point = np.array(1 if is_integer(source) and source != np.int32 else 0).astype(source)
                for scale_type in scales:
                    scale = np.array(0.5).astype(scale_type)
                    for target in (None, np.float16, ml_dtypes.bfloat16, F32) if version >= 23 else (None,):
                        if source != np.int8 and (scale_type != F32 or target is not None):
                            continue  # all sources by float32, and one source by all scales to all targets
                        if target is None and "e8m0" in scale_type.name:
                            continue
                        attributes = {} if target is None else {"output_dtype": dtype_to_onnx(np.dtype(target))}
                        want = (x.astype(F32) - zero_point.astype(F32)) * scale.astype(F32)
                        made = node("DequantizeLinear", version, [x, scale, zero_point], **attributes)
                        same(made(x, scale, zero_point)[0], want.astype(target or scale_type))

    def test_scale_of_powers_of_two_needs_an_output_type(self, node):
        x, scale = np.array([1], np.int8), np.array(2, ml_dtypes.float8_e8m0fnu)
        with pytest.raises(Exception, match="output_dtype"):
            node("DequantizeLinear", 24, [x, scale])(x, scale)

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_axis(self, axis, node, same):
        x = np.random.default_rng(0).integers(0, 255, (2, 3, 4)).astype(np.uint8)
        size = x.shape[axis]
        scale, zero_point = np.arange(1, size + 1).astype(F32) / 3, np.arange(size).astype(np.uint8)
        made = node("DequantizeLinear", 13, [x, scale, zero_point], axis=axis)
        same(made(x, scale, zero_point)[0], made.onnxruntime(x, scale, zero_point)[0])

    def test_large_int32(self, node, same):
        """The difference is exact even where float32 has no place for what it's taken of."""
        x, scale, zero_point = np.array([2**30 + 1, 2**30 + 3], np.int32), np.array(1, F32), np.array(2**30, np.int32)
        same(node("DequantizeLinear", 10, [x, scale, zero_point])(x, scale, zero_point)[0], np.array([1, 3], F32))

    def test_empty_and_absent_zero_point(self, node, same):
        scale = np.array(0.5, F32)
        for x in (np.zeros((0, 3), np.uint8), np.array(7, np.uint8)):
            same(node("DequantizeLinear", 10, [x, scale, None])(x, scale)[0], x.astype(F32) * F32(0.5))


class TestDynamicQuantize:
    @pytest.mark.parametrize(
        "x",
        [[-127, 128, 0.5], [0, 2, -3, -2.5, 1.34, 0.5], [-1, -2.1, -1.3], [1, 2.1, 1.3], [0, 0, 0], [5.5]],
        ids=lambda x: str(x),
    )
    def test_against_onnxruntime(self, x, node, same):
        """All zeros leave the scale open, 0 by the formula: 1 as there, while onnx.reference divides that by 255."""
        given = np.array(x, F32)
        made = node("DynamicQuantizeLinear", 11, [given], outputs=3)
        for got, want in zip(made(given), made.onnxruntime(given), strict=True):
            same(got, want)

    def test_rounds_before_it_adds(self, node):
        given = np.array([-127, 128, 0.5], F32)
        assert node("DynamicQuantizeLinear", 11, [given], outputs=3)(given)[0].tolist() == [0, 255, 127]

    def test_empty(self, node):
        given = np.zeros((0, 2), F32)
        y, scale, zero_point = node("DynamicQuantizeLinear", 11, [given], outputs=3)(given)
        assert (y.shape, float(scale), int(zero_point)) == ((0, 2), 1.0, 0)


def integers(dtype, *shape, seed=0):
    low, high = limits(dtype)
    return np.random.default_rng(seed).integers(low, high + 1, shape).astype(dtype)


class TestMatMulInteger:
    @pytest.mark.parametrize("types", [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.uint8), (np.int8, np.int8)])
    @pytest.mark.parametrize(
        "shapes",
        [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((0, 4), (4, 5)), ((3, 0), (0, 5))],
    )
    def test_shapes_and_types(self, types, shapes, node, same):
        a, b = integers(types[0], *shapes[0]), integers(types[1], *shapes[1], seed=1)
        points = np.array(100, types[0]), np.array(7, types[1])
        want = np.matmul(a.astype(np.int32) - 100, b.astype(np.int32) - 7).astype(np.int32)
        same(node("MatMulInteger", 10, [a, b, *points])(a, b, *points)[0], want)
        same(node("MatMulInteger", 10, [a, b, *points], constants={1: b, 3: points[1]})(a, None, points[0])[0], want)
        plain = np.matmul(a.astype(np.int32), b.astype(np.int32)).astype(np.int32)
        same(node("MatMulInteger", 10, [a, b])(a, b)[0], plain)
        same(
            node("MatMulInteger", 10, [a, b, None, points[1]])(a, b, None, points[1])[0],
            np.matmul(a.astype(np.int32), b.astype(np.int32) - 7).astype(np.int32),
        )

    def test_points_by_row_and_column(self, node, same):
        a, b = integers(np.uint8, 3, 4), integers(np.int8, 4, 5, seed=1)
        rows, columns = integers(np.uint8, 3, seed=2), integers(np.int8, 5, seed=3)
        want = (a.astype(np.int32) - rows[:, None]) @ (b.astype(np.int32) - columns)
        same(node("MatMulInteger", 10, [a, b, rows, columns])(a, b, rows, columns)[0], want.astype(np.int32))
        many, others = integers(np.uint8, 2, 3, 4), integers(np.int8, 2, 4, 5, seed=1)
        rows, columns = integers(np.uint8, 2, 3, 1, seed=2), integers(np.int8, 2, 1, 5, seed=3)
        want = (many.astype(np.int32) - rows) @ (others.astype(np.int32) - columns)
        same(node("MatMulInteger", 10, [many, others, rows, columns])(many, others, rows, columns)[0], want.astype(np.int32))

    def test_sums_past_what_float32_counts(self, node, same):
        a, b = np.full((2, 3000), 255, np.uint8), np.full((3000, 3), 255, np.uint8)
        b[::2, 1] = 254
        want = a.astype(np.int32) @ b.astype(np.int32)
        assert want.max() > 1 << 24
        same(node("MatMulInteger", 10, [a, b])(a, b)[0], want)
        same(node("MatMulInteger", 10, [a[0], b[:, 0]])(a[0], b[:, 0])[0], want[0, 0, ...])
        a, b = integers(np.uint8, 2, 3, 2500), integers(np.int8, 2, 2500, 5, seed=1)
        point = np.array(255, np.uint8)
        want = (a.astype(np.int32) - 255) @ b.astype(np.int32)
        same(node("MatMulInteger", 10, [a, b, point])(a, b, point)[0], want)


class TestQLinearMatMul:
    @pytest.mark.parametrize("types", [(np.uint8, np.uint8, np.uint8), (np.uint8, np.int8, np.uint8), (np.int8, np.int8, np.int8)])
    def test_against_onnxruntime(self, types, node, same):
        for shapes in (((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 3, 4), (4, 5))):
            a, b = integers(types[0], *shapes[0]), integers(types[1], *shapes[1], seed=1)
            given = [a, np.array(0.07, F32), np.array(9, types[0]), b, np.array(0.03, F32), np.array(3, types[1])]
            given += [np.array(0.4, F32), np.array(11, types[2])]
            for constants in ({}, {index: given[index] for index in (3, 4, 5)}):
                made = node("QLinearMatMul", 10, given, constants=constants)
                same(made(*given)[0], made.onnxruntime(*given)[0])

    @pytest.mark.parametrize("scale_type", [F32, np.float16, ml_dtypes.bfloat16])
    def test_by_row_and_column(self, scale_type, node):
        a, b = integers(np.uint8, 3, 4), integers(np.int8, 4, 5, seed=1)
        generator = np.random.default_rng(0)
        a_scale, b_scale, y_scale = (generator.uniform(0.02, 0.1, size).astype(scale_type) for size in (3, 5, 3))
        given = [a, a_scale, integers(np.uint8, 3), b, b_scale, integers(np.int8, 5), y_scale, integers(np.uint8, 3, seed=5)]
        got = node("QLinearMatMul", 21, given)(*given)[0]
        product = (a.astype(np.int64) - given[2][:, None]) @ (b.astype(np.int64) - given[5])
        factor = a_scale.astype(float)[:, None] * b_scale.astype(float) / y_scale.astype(float)[:, None]
        want = np.clip(np.rint(product * factor) + given[7][:, None].astype(int), 0, 255)
        assert np.abs(got.astype(int) - want).max() <= 1

    def test_vectors(self, node):
        a, b = integers(np.uint8, 4), integers(np.uint8, 4, 5, seed=1)
        point = np.array(0, np.uint8)
        given = [a, np.array(0.1, F32), point, b, np.array(0.1, F32), point, np.array(4, F32), point]
        want = np.clip(np.rint(a.astype(int) @ b.astype(int) * 0.01 / 4), 0, 255)
        assert np.abs(node("QLinearMatMul", 10, given)(*given)[0].astype(int) - want).max() <= 1

    @pytest.mark.parametrize("dtype", SMALL[1:])
    def test_float8(self, dtype, node, same):
        a, b = (np.random.default_rng(seed).integers(-3, 4, shape).astype(F32).astype(dtype) for seed, shape in enumerate(((3, 4), (4, 5))))
        one, zero = np.array(1, F32), np.zeros((), dtype)
        given = [a, np.array(0.5, F32), zero, b, one, zero, one, zero]
        same(node("QLinearMatMul", 21, given)(*given)[0], (a.astype(F32) @ b.astype(F32) / 2).astype(dtype))
