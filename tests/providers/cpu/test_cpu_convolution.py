"""Conv, ConvTranspose, ConvInteger, QLinearConv and DeformConv, over their attributes, types and versions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def random_window(generator, rank):
    """Attributes of a window, and sizes that it fits on."""
    kernel, strides, dilations = (generator.integers(1, high, rank) for high in (4, 4, 3))
    attributes = {"strides": strides.tolist(), "dilations": dilations.tolist()}
    sizes = ((kernel - 1) * dilations + 1 + generator.integers(0, 9, rank)).tolist()
    how = str(generator.choice(["pads", "pads", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if how == "pads":
        attributes["pads"] = generator.integers(0, 3, 2 * rank).tolist()
    else:
        attributes["auto_pad"] = how
        if how != "VALID":
            attributes["dilations"] = [1] * rank  # onnxruntime refuses others here
    return kernel.tolist(), attributes, sizes


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_conv_like_onnxruntime(rank, constant, node, same):
    generator = np.random.default_rng(rank)
    for _ in range(25):
        kernel, attributes, sizes = random_window(generator, rank)
        groups = int(generator.choice([1, 1, 2, 4]))
        channels, features = groups * int(generator.choice([1, 1, 3])), groups * int(generator.choice([1, 2]))
        x = generator.standard_normal((2, channels, *sizes)).astype(np.float32)
        w = generator.standard_normal((features, channels // groups, *kernel)).astype(np.float32)
        b = generator.standard_normal(features).astype(np.float32)
        inputs = (x, w, b) if generator.integers(2) else (x, w)
        model = node("Conv", 11, inputs, constants={1: w} if constant else {}, group=groups, **attributes)
        same(model(*inputs)[0], model.onnxruntime(*inputs)[0], rtol=1e-4, atol=1e-5)


def test_conv_by_row_and_in_blocks(node, same):
    """Large enough that windows are gathered in several blocks, and so shaped that a product per row of the kernel pays."""
    generator = np.random.default_rng(0)
    for channels, features, size, stride, dilation in [
        (96, 4, 90, 1, 1),
        (64, 8, 120, 2, 1),
        (64, 4, 100, 1, 2),
        (8, 64, 120, 1, 1),
        (40, 4, 90, 3, 2),
    ]:
        x = generator.standard_normal((2, channels, size, size)).astype(np.float32)
        w = generator.standard_normal((features, channels, 3, 3)).astype(np.float32)
        attributes = {"pads": [1, 2, 0, 1], "strides": [stride] * 2, "dilations": [dilation] * 2}
        for constants in ({}, {1: w}):
            model = node("Conv", 22, [x, w], constants=constants, **attributes)
            same(model(x, w)[0], model.onnxruntime(x, w)[0], rtol=1e-3, atol=1e-3)


def test_conv_types_and_versions(node, same, versions, types_of, sample):
    for schema in versions("Conv"):
        for dtype in types_of(schema, "T"):
            x, w, b = sample(dtype, (1, 4, 7, 6)), sample(dtype, (6, 2, 3, 2), 1), sample(dtype, (6,), 2)
            got = node("Conv", schema.since_version, [x, w, b], group=2, pads=[1, 0, 1, 1])(x, w, b)[0]
            wide = [each.astype(np.float64) for each in (x, w, b)]
            want = node("Conv", 22, wide, group=2, pads=[1, 0, 1, 1])(*wide)[0]
            same(got, want.astype(dtype), rtol=1e-4 if dtype == np.float32 else None)


def test_conv_of_nothing(node, same):
    w = np.ones((3, 2, 3, 3), np.float32)
    model = node("Conv", 11, [w, w], pads=[1, 1, 1, 1])
    same(model(np.zeros((0, 2, 4, 4), np.float32), w)[0], np.zeros((0, 3, 4, 4), np.float32))
    same(model(np.zeros((1, 2, 1, 1), np.float32), w)[0], np.zeros((1, 3, 1, 1), np.float32))
    depthwise = node("Conv", 11, [w, w], group=2, pads=[1, 1, 1, 1])
    same(
        depthwise(np.full((1, 2, 1, 1), np.inf, np.float32), np.ones((2, 1, 3, 3), np.float32))[0],
        np.full((1, 2, 1, 1), np.inf, np.float32),
    )


def test_conv_of_a_view(node, same):
    """An input that isn't contiguous, such as what a Transpose gives."""
    x = np.arange(2 * 5 * 6 * 3, dtype=np.float32).reshape(2, 5, 6, 3).transpose(0, 3, 1, 2)
    w = np.ones((4, 3, 1, 1), np.float32)
    same(node("Conv", 11, [x, w])(x, w)[0], np.repeat(x.sum(1, keepdims=True), 4, 1))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_conv_transpose_like_onnxruntime(rank, node, same):
    generator = np.random.default_rng(10 + rank)
    for _ in range(20):
        kernel, attributes, sizes = random_window(generator, rank)
        if "auto_pad" in attributes:
            continue  # see test_conv_transpose_padding
        groups = int(generator.choice([1, 2]))
        attributes["pads"] = [min(pad, (k - 1) // 2) for pad, k in zip(attributes["pads"], [*kernel, *kernel], strict=True)]
        attributes["output_padding"] = [min(1, stride - 1) for stride in attributes["strides"]]
        x = generator.standard_normal((2, 2 * groups, *sizes)).astype(np.float32)
        w = generator.standard_normal((2 * groups, 3, *kernel)).astype(np.float32)
        b = generator.standard_normal(3 * groups).astype(np.float32)
        model = node("ConvTranspose", 11, [x, w, b], group=groups, **attributes)
        same(model(x, w, b)[0], model.onnxruntime(x, w, b)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "attributes", [{"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}, {"auto_pad": "VALID"}, {"output_shape": [9, 8]}]
)
def test_conv_transpose_padding(attributes, node, same):
    x = np.arange(2 * 4 * 4, dtype=np.float32).reshape(1, 2, 4, 4)
    w = np.arange(2 * 1 * 3 * 3, dtype=np.float32).reshape(2, 1, 3, 3)
    model = node("ConvTranspose", 11, [x, w], strides=[2, 2], **attributes)
    same(model(x, w)[0], model.onnxruntime(x, w)[0])


def test_conv_transpose_types(node, same, versions, types_of, sample):
    for schema in versions("ConvTranspose"):
        for dtype in types_of(schema, "T"):
            x, w = sample(dtype, (1, 2, 4, 3)), sample(dtype, (2, 1, 3, 3), 1)
            got = node("ConvTranspose", schema.since_version, [x, w], strides=[2, 1])(x, w)[0]
            want = node("ConvTranspose", 22, [np.float64] * 2, strides=[2, 1])(x.astype(np.float64), w.astype(np.float64))[0]
            same(got, want.astype(dtype), rtol=1e-4 if dtype == np.float32 else None)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("x_type", "w_type"), [(np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8)])
def test_integer_convolutions_like_onnxruntime(x_type, w_type, constant, node, same):
    generator = np.random.default_rng(0)
    for channels in (3, 64):  # the second is too large for exact sums in float32
        x = generator.integers(np.iinfo(x_type).min, np.iinfo(x_type).max + 1, (2, channels, 6, 6)).astype(x_type)
        w = np.full((4, channels, 3, 3), np.iinfo(w_type).max, w_type)
        w[1:] = generator.integers(np.iinfo(w_type).min, np.iinfo(w_type).max + 1, w[1:].shape).astype(w_type)
        zero = np.array(3, x_type)
        plain = node("ConvInteger", 10, [x, w, zero], constants={1: w} if constant else {}, pads=[1, 1, 1, 1])
        if x_type == np.uint8:
            same(plain(x, w, zero)[0], plain.onnxruntime(x, w, zero)[0])
        want = node("Conv", 22, [np.float64] * 2, pads=[1, 1, 1, 1])(x.astype(np.float64) - 3, w.astype(np.float64))[0]
        same(plain(x, w, zero)[0], want.astype(np.int32))

        scales = [np.array(value, np.float32) for value in (0.02, 0.03, 0.9)]
        per_channel = np.linspace(0.01, 0.05, 4, dtype=np.float32)
        bias = generator.integers(-1000, 1000, 4).astype(np.int32)
        for w_scale, w_zero in ((scales[1], np.array(0, w_type)), (per_channel, np.zeros(4, w_type))):
            inputs = (x, scales[0], zero, w, w_scale, w_zero, scales[2], np.array(5, x_type), bias)
            model = node("QLinearConv", 10, inputs, constants={3: w, 5: w_zero} if constant else {}, strides=[2, 1])
            same(model(*inputs)[0], model.onnxruntime(*inputs)[0])


def test_conv_integer_without_zero_points_and_with_one_per_channel(node, same):
    x = np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4)
    w = np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2)
    model = node("ConvInteger", 10, [x, w])
    same(model(x, w)[0], model.onnxruntime(x, w)[0])
    zeros = np.array([1, 4], np.uint8)
    got = node("ConvInteger", 10, [x, w, None, zeros])(x, w, None, zeros)[0]
    want = node("Conv", 22, [np.float64] * 2)(x.astype(np.float64), w - zeros.astype(np.float64).reshape(2, 1, 1, 1))[0]
    same(got, want.astype(np.int32))


def test_deformable_convolution(node, same, versions, types_of):
    """Without offsets it's a convolution; with them onnxruntime's, and in three dimensions that of shifted images."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 4, 7, 6)).astype(np.float32)
    w = generator.standard_normal((6, 2, 3, 2)).astype(np.float32)
    b = generator.standard_normal(6).astype(np.float32)
    attributes = {"pads": [1, 0, 1, 1], "strides": [2, 1], "dilations": [1, 2], "group": 2}
    want = node("Conv", 22, [x, w, b], **attributes)(x, w, b)[0]
    offset = np.zeros((2, 2 * 6 * 2, *want.shape[2:]), np.float32)
    deform = node("DeformConv", 19, [x, w, offset, b], offset_group=2, **attributes)
    same(deform(x, w, offset, b)[0], want, rtol=1e-4, atol=1e-5)
    offset = generator.normal(0, 2, offset.shape).astype(np.float32)
    mask = generator.uniform(0, 1, (2, 2 * 6, *want.shape[2:])).astype(np.float32)
    masked = node("DeformConv", 19, [x, w, offset, b, mask], offset_group=2, **attributes)
    same(masked(x, w, offset, b, mask)[0], masked.onnxruntime(x, w, offset, b, mask)[0], rtol=1e-3, atol=1e-4)
    for schema in versions("DeformConv"):
        for dtype in types_of(schema, "T"):
            inputs = [each.astype(dtype) for each in (x, w, offset)]
            got = node("DeformConv", schema.since_version, inputs, offset_group=2, **attributes)(*inputs)[0]
            wide = [each.astype(np.float64) for each in inputs]
            want = node("DeformConv", 22, wide, offset_group=2, **attributes)(*wide)[0].astype(dtype)
            same(got, want, atol=1e-4 if dtype == np.float32 else 0.05 if dtype != np.float64 else 1e-9)
    cube = generator.standard_normal((1, 1, 4, 4, 4)).astype(np.float32)
    one = np.ones((1, 1, 1, 1, 1), np.float32)
    shift = np.zeros((1, 3, 4, 4, 4), np.float32)
    shift[:, 1] = 1
    moved = node("DeformConv", 22, [cube, one, shift])(cube, one, shift)[0]
    same(moved[:, :, :, :-1], cube[:, :, :, 1:])
    same(moved[:, :, :, -1], np.zeros((1, 1, 4, 4), np.float32))
