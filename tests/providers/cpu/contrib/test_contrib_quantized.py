"""Quantized ops of com.microsoft against onnxruntime: integers exactly, or one apart where a tie may be rounded either way."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

TYPES = [np.int8, np.uint8]


def integers(dtype, *shape, seed=0):
    limits = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(limits.min, limits.max + 1, shape).astype(dtype)


def floats(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def scale(value):
    return np.array(value, np.float32)


def exact_or_tie(contrib, op, inputs, **attributes):
    """The same but for at most one element in a hundred, which is one apart: quotients are rounded in another order there."""
    made = contrib(op, inputs, **attributes)
    got, want = made.run()[0], made.onnxruntime()[0]
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    apart = np.abs(got.astype(np.int64) - want.astype(np.int64))
    assert apart.max(initial=0) <= 1
    assert (apart > 0).mean() <= 0.01 if apart.size else True


class TestElementwise:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
    def test_of_two(self, op, dtype, contrib):
        zero, other = np.array(5, dtype), np.array(100, dtype)
        for shapes in (((3, 4), (3, 4)), ((2, 3, 4), (4,)), ((3, 1), (1, 4)), ((), (3,)), ((0, 4), (4,)), ((300, 200), (300, 200))):
            a, b = integers(dtype, *shapes[0]), integers(dtype, *shapes[1], seed=1)
            exact_or_tie(contrib, op, [a, scale(0.03), zero, b, scale(0.011), other, scale(0.07), zero])

    @pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
    def test_absent_zero_points_are_zero(self, op, contrib):
        a, b, none = integers(np.uint8, 3, 4), integers(np.uint8, 4, seed=1), np.array(0, np.uint8)
        got = contrib(op, [a, scale(0.03), None, b, scale(0.011), None, scale(0.07), None]).run()[0]
        want = contrib(op, [a, scale(0.03), none, b, scale(0.011), none, scale(0.07), none]).run()[0]
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("dtype", TYPES)
    def test_of_one(self, dtype, contrib):
        x = np.arange(256, dtype=np.uint8).view(dtype)
        exact_or_tie(contrib, "QLinearSigmoid", [x, scale(0.05), np.array(3, dtype), scale(1 / 256), np.array(0, dtype)])
        exact_or_tie(contrib, "QLinearLeakyRelu", [x, scale(0.05), np.array(3, dtype), scale(0.04), np.array(20, dtype)], alpha=0.2)

    @pytest.mark.parametrize("dtype", TYPES)
    def test_softmax(self, dtype, contrib):
        x = integers(dtype, 2, 3, 7)
        for axis in (-1, 1, 0):
            for opset in (12, 13):
                inputs = [x, scale(0.04), np.array(3, dtype), scale(1 / 256), np.array(np.iinfo(dtype).min, dtype)]
                exact_or_tie(contrib, "QLinearSoftmax", inputs, axis=axis, opset=opset)

    @pytest.mark.parametrize("dtype", TYPES)
    def test_concat_and_where(self, dtype, contrib):
        parts = []
        for place, size in enumerate((2, 3, 1)):
            parts += [integers(dtype, 2, size, 4, seed=place), scale(0.02 * (place + 1)), np.array(3 * place, dtype)]
        for axis in (1, -2):
            exact_or_tie(contrib, "QLinearConcat", [scale(0.05), np.array(7, dtype), *parts], constants=range(8), axis=axis)
        x, y = integers(dtype, 3, 4), integers(dtype, 4, seed=1)
        parameters = [scale(0.02), np.array(3, dtype)], [scale(0.03), np.array(9, dtype)], [scale(0.04), np.array(5, dtype)]
        inputs = [floats(3, 1) > 0, x, *parameters[0], y, *parameters[1], *parameters[2]]
        exact_or_tie(contrib, "QLinearWhere", inputs)


class TestPooling:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("channels_last", [0, 1])
    def test_average(self, dtype, channels_last, contrib):
        x = integers(dtype, 2, 7, 6, 5) if channels_last else integers(dtype, 2, 5, 7, 6)
        parameters = [scale(0.04), np.array(3, dtype), scale(0.03), np.array(9, dtype)]
        for attributes in ({}, {"pads": [1, 1, 1, 1], "strides": [2, 2]}, {"pads": [1, 1, 1, 1], "count_include_pad": 1}):
            exact_or_tie(contrib, "QLinearAveragePool", [x, *parameters], kernel_shape=[3, 3], channels_last=channels_last, **attributes)
        exact_or_tie(contrib, "QLinearGlobalAveragePool", [x, *parameters], channels_last=channels_last)

    @pytest.mark.parametrize("axes", [None, [0], [1, -1]])
    def test_mean(self, axes, contrib):
        inputs = [integers(np.uint8, 2, 3, 4), scale(0.04), np.array(3, np.uint8), scale(0.03), np.array(9, np.uint8)]
        got = contrib("QLinearReduceMean", inputs, axes=axes, keepdims=0).run()[0]
        mean = ((inputs[0].astype(np.float64) - 3) * 0.04).mean(None if axes is None else tuple(axes))
        np.testing.assert_array_equal(got, np.clip(np.rint(mean / 0.03) + 9, 0, 255).astype(np.uint8))


class TestMatrix:
    @pytest.mark.parametrize("types", [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)])
    @pytest.mark.parametrize("per_column", [False, True])
    def test_integer_to_float(self, types, per_column, agree):
        size = (6,) if per_column else ()
        a, b = integers(types[0], 2, 4, 5), integers(types[1], 5, 6)
        b_scale, b_zero = np.abs(floats(*size)) * 0.01 + 0.01, np.broadcast_to(np.array(7, types[1]), size).copy()
        b_scale = np.asarray(b_scale, np.float32)
        for inputs in (
            [a, b, scale(0.02), b_scale, np.array(9, types[0]), b_zero, floats(6, seed=3)],
            [a, b, scale(0.02), b_scale, np.array(9, types[0])],
            [a, b, scale(0.02), b_scale],
        ):
            agree("MatMulIntegerToFloat", inputs)
        agree("MatMulIntegerToFloat", [a, b, scale(0.02), b_scale, np.array(9, types[0]), b_zero], 1, [1, 3, 5])

    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("per_column", [False, True])
    def test_dynamic(self, dtype, per_column, agree):
        size = (6,) if per_column else ()
        b_scale = np.asarray(np.abs(floats(*size)) * 0.01 + 0.01, np.float32)
        b_zero = np.broadcast_to(np.array(7, dtype), size).copy()
        for constants in ((), (1, 2, 3)):
            agree("DynamicQuantizeMatMul", [floats(2, 4, 5), integers(dtype, 5, 6), b_scale, b_zero, floats(6, seed=3)], 1, constants)
        agree("DynamicQuantizeMatMul", [floats(4, 5), integers(dtype, 5, 6), b_scale])
        agree("DynamicQuantizeMatMul", [np.zeros((4, 5), np.float32), integers(dtype, 5, 6), b_scale, b_zero])

    @pytest.mark.parametrize("transpose", [(0, 0), (1, 1)])
    @pytest.mark.parametrize("per_column", [False, True])
    def test_gemm(self, transpose, per_column, agree, contrib):
        a = integers(np.uint8, *((5, 4) if transpose[0] else (4, 5)))
        b = integers(np.int8, *((6, 5) if transpose[1] else (5, 6)), seed=1)
        size = (6,) if per_column else ()
        b_scale = np.asarray(np.abs(floats(*size)) * 0.01 + 0.01, np.float32)
        left, right = [a, scale(0.02), np.array(9, np.uint8)], [b, b_scale, np.zeros(size, np.int8)]
        c = np.random.default_rng(2).integers(-1000, 1000, 6).astype(np.int32)
        attributes = {"transA": transpose[0], "transB": transpose[1], "alpha": 0.7}
        agree("QGemm", [*left, *right, c], 1, **attributes)
        for constants in ((), (3, 4, 5)):
            exact_or_tie(contrib, "QGemm", [*left, *right, c, scale(0.05), np.array(8, np.uint8)], constants=constants, **attributes)


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
def test_linear(op, agree):
    for dtype in (np.int8, np.uint8, np.int16, np.uint16):
        for size, attributes in ((), {}), ((4,), {"axis": 1}):
            step, zero = np.asarray(np.abs(floats(*size)) * 0.1 + 0.01, np.float32), np.full(size, 5, dtype)
            agree(op, [floats(3, 4) * 9 if op == "QuantizeLinear" else integers(dtype, 3, 4), step, zero], **attributes)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_lstm(direction, per_channel, contrib):
    ways, hidden, count = (2 if direction == "bidirectional" else 1), 8, 5
    w, r = integers(np.int8, ways, 6, 4 * hidden), integers(np.int8, ways, hidden, 4 * hidden, seed=1)
    size = (ways, 4 * hidden) if per_channel else (ways,)
    parameters = [np.full(size, 0.004, np.float32), np.zeros(size, np.int8)]
    state = floats(ways, 2, hidden, seed=3), floats(ways, 2, hidden, seed=4)
    # A row that has ended has a part in the range that all hidden states are rounded in; onnxruntime has other numbers in it by then.
    for lengths, tolerance in ((None, 1e-6), (np.array([5, 5], np.int32), 1e-6), (np.array([5, 3], np.int32), 1e-2)):
        inputs = [floats(count, 2, 6), w, r, floats(ways, 8 * hidden, seed=2), lengths, *state, None, *parameters, *parameters]
        made = contrib("DynamicQuantizeLSTM", inputs, 3, [1, 2, 8, 9, 10, 11], hidden_size=hidden, direction=direction)
        for got, want in zip(made.run(), made.onnxruntime(), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=tolerance)


def packed_numbers(bits, rows, blocks, block, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks, block * bits // 8)).astype(np.uint8)


class TestMatMulNBits:
    # onnxruntime takes zero points that are floats with 4 bits only
    @pytest.mark.parametrize(("bits", "points"), [*itertools.product((2, 4, 8), ("none", "packed")), (4, "floats")])
    @pytest.mark.parametrize("columns", [64, 70])
    @pytest.mark.parametrize("constant", [False, True])
    def test_blocks(self, bits, columns, points, constant, agree):
        rows, block = 5, 32
        blocks = -(-columns // block)
        scales = floats(rows, blocks, seed=1) * 0.1
        zero_points = {
            "none": None,
            "packed": integers(np.uint8, rows, -(-blocks * bits // 8), seed=2),
            "floats": np.random.default_rng(3).uniform(0, 3, (rows, blocks)).astype(np.float32),
        }[points]
        fixed = [1, 2] if points == "none" else [1, 2, 3]
        inputs = [floats(2, 3, columns), packed_numbers(bits, rows, blocks, block), scales, zero_points, None, floats(rows, seed=4)]
        attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block}
        agree("MatMulNBits", inputs, 1, [*fixed, 5] if constant else [], tolerance=1e-4, **attributes)
        agree("MatMulNBits", [inputs[0][0, :1], *inputs[1:4]], 1, fixed if constant else [], tolerance=1e-4, **attributes)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_activations_in_eight_bits(self, bits, agree):
        inputs = [floats(3, 64), packed_numbers(bits, 5, 2, 32), floats(5, 2, seed=1) * 0.1]
        agree("MatMulNBits", inputs, 1, [1, 2], tolerance=1e-4, K=64, N=5, bits=bits, block_size=32, accuracy_level=4)

    def test_weights_too_large_to_keep(self, agree):
        """More than 2^22 numbers are dequantized in every run, some rows at a time."""
        rows, columns = 4200, 1024
        inputs = [packed_numbers(4, rows, 8, 128), floats(rows, 8, seed=1) * 0.1, integers(np.uint8, rows, 4, seed=2)]
        for count in (1, 2):
            a = floats(count, columns)
            agree("MatMulNBits", [a, *inputs], 1, [1, 2, 3], tolerance=1e-3, K=columns, N=rows, bits=4, block_size=128)

    def test_groups(self, agree):
        group = (np.arange(64) % 2).astype(np.int32)
        inputs = [floats(3, 64), packed_numbers(4, 5, 2, 32), floats(5, 2, seed=1), None, group]
        agree("MatMulNBits", inputs, 1, [1, 2, 4], tolerance=1e-4, K=64, N=5, bits=4, block_size=32)

    def test_groups_with_zero_points(self, contrib):
        """A group has one scale and one zero point. onnxruntime pairs a group's scale with another's zero point here."""
        group = np.arange(64) % 2
        numbers, scales, points = packed_numbers(4, 5, 2, 32), floats(5, 2, seed=1), integers(np.uint8, 5, 1, seed=2)
        a = floats(3, 64)
        got = contrib("MatMulNBits", [a, numbers, scales, points, group.astype(np.int32)], K=64, N=5, bits=4, block_size=32).run()[0]
        number = np.stack((numbers & 15, numbers >> 4), -1).reshape(5, 64).astype(np.float32)
        point = np.stack((points[:, 0] & 15, points[:, 0] >> 4), -1).astype(np.float32)
        np.testing.assert_allclose(got, a @ ((number - point[:, group]) * scales[:, group]).T, rtol=1e-4, atol=1e-4)

    def test_no_weights(self, contrib):
        inputs = [floats(3, 64), np.zeros((0, 2, 16), np.uint8), floats(0, 2), None, None, floats(5)]
        got = contrib("MatMulNBits", inputs, K=64, N=5, bits=4, block_size=32).run()[0]
        np.testing.assert_array_equal(got, np.broadcast_to(inputs[5], (3, 5)))

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_narrow_floats(self, dtype, contrib):
        numbers = packed_numbers(4, 5, 2, 32)
        a, scales = floats(3, 64).astype(dtype), (floats(5, 2, seed=1) * 0.1).astype(dtype)
        attributes = {"K": 64, "N": 5, "bits": 4, "block_size": 32}
        got = contrib("MatMulNBits", [a, numbers, scales], **attributes).run()[0]
        want = contrib("MatMulNBits", [a.astype(np.float32), numbers, scales.astype(np.float32)], **attributes).run()[0]
        np.testing.assert_array_equal(got, want.astype(dtype))


class TestGatherBlockQuantized:
    INDICES = (np.array([3, 0, -1]), np.array([[1, 2], [4, 0]], np.int32), np.array(2))

    @pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
    @pytest.mark.parametrize("pointed", [False, True])
    @pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0, 2), (0, 0)])
    def test_four_bits(self, dtype, pointed, axes, agree):
        gather_axis, quantize_axis = axes
        shape = (5, 20, 18)
        low = -8 if dtype == ml_dtypes.int4 else 0
        data = np.random.default_rng(0).integers(low, low + 16, shape).astype(dtype)
        by_block = tuple(-(-size // 16) if axis == quantize_axis else size for axis, size in enumerate(shape))
        points = np.random.default_rng(1).integers(low, low + 16, by_block).astype(dtype) if pointed else None
        for indices in self.INDICES:
            inputs = [data, indices, floats(*by_block, seed=2), points]
            constants = [0, 2, *([3] if pointed else [])]
            attributes = {"gather_axis": gather_axis, "quantize_axis": quantize_axis, "block_size": 16}
            agree("GatherBlockQuantized", inputs, 1, constants, **attributes)

    @pytest.mark.parametrize("bits", [2, 4, 8])
    @pytest.mark.parametrize("pointed", [False, True])
    def test_bytes(self, bits, pointed, agree):
        data = integers(np.uint8, 5, 64 * bits // 8)
        points = integers(np.uint8, 5, -(-4 * bits // 8), seed=1) if pointed else None
        for indices in self.INDICES:
            inputs = [data, indices, floats(5, 4, seed=2), points]
            constants = [0, 2, *([3] if pointed else [])]
            attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": 16, "bits": bits}
            agree("GatherBlockQuantized", inputs, 1, constants, **attributes)

    def test_index_out_of_range(self, contrib):
        data = np.full((5, 32), 3, ml_dtypes.int4)
        got = contrib("GatherBlockQuantized", [data, np.array([1, 5, -6]), np.ones((5, 2), np.float32)], block_size=16).run()[0]
        np.testing.assert_array_equal(got, np.float32([[3] * 32, [0] * 32, [0] * 32]))

    @pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn])
    def test_narrow_floats(self, dtype, contrib):
        data = (floats(5, 32) * 2).astype(dtype)
        for size, scales in ((16, floats(5, 2)), (0, floats(1, 1))):
            got = contrib("GatherBlockQuantized", [data, np.array([[1, 4]]), scales], block_size=size).run()[0]
            whole = data.astype(np.float32) * np.broadcast_to(scales.repeat(16 if size else 32, 1), (5, 32))
            np.testing.assert_array_equal(got, whole[[[1, 4]]])
