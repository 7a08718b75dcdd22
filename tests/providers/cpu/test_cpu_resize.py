"""Resize and Upsample, over their modes, versions and types."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import RunError
from miniort.types import STRING

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def test_nearest_halves_go_up(node, same):
    """microsoft/onnxruntime#28291: 1.5 / 0.3 - 0.5 is 4.5, also where the scale comes in float32."""
    x = np.arange(20, dtype=np.float32).reshape(1, 1, 1, 20)
    want = np.array([1, 5, 8, 11, 15, 18], np.float32).reshape(1, 1, 1, 6)
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    sizes = np.array([1, 1, 1, 6])
    same(node("Resize", 19, [x, None, None, sizes], **attributes)(x, None, None, sizes)[0], want)
    scales = np.array([1, 1, 1, 0.3], np.float32)
    same(node("Resize", 19, [x, None, scales], **attributes)(x, None, scales)[0], want)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_sizes_like_the_reference(mode, coordinates, node, same):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, 2, 7, 9)).astype(np.float32)
    nearest = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil") if mode == "nearest" else ("round_prefer_floor",)
    for height, width in ((14, 27), (3, 4), (7, 20), (10, 2)):
        sizes = np.array([1, 2, height, width])
        for how in nearest:
            model = node("Resize", 19, [x, None, None, sizes], mode=mode, coordinate_transformation_mode=coordinates, nearest_mode=how)
            same(model(x, None, None, sizes)[0], model.reference(x, None, None, sizes)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("outside", [0, 1])
def test_antialias_like_the_reference(mode, outside, node, same):
    x = np.random.default_rng(0).standard_normal((1, 1, 12, 13)).astype(np.float32)
    for scale in (0.3, 0.5, 0.77, 1.4):
        scales = np.array([1, 1, scale, scale], np.float32)
        model = node("Resize", 19, [x, None, scales], mode=mode, antialias=1, exclude_outside=outside)
        same(model(x, None, scales)[0], model.reference(x, None, scales)[0], rtol=1e-3, atol=1e-4)


def test_one_output_of_pytorch_half_pixel(node, same):
    """The formula gives 0 for an axis with one output; onnx.reference takes -0.5."""
    x = np.array([3, 5, 7], np.float32)
    sizes = np.array([1])
    model = node("Resize", 13, [x, None, None, sizes], mode="linear", coordinate_transformation_mode="pytorch_half_pixel")
    same(model(x, None, None, sizes)[0], np.array([3], np.float32))


def test_crop_like_onnxruntime(node, same):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, 1, 6, 6)).astype(np.float32)
    for mode in ("nearest", "linear"):
        for roi in ([0, 0, 0.2, 0.3, 1, 1, 0.7, 0.9], [0, 0, -0.5, 0.5, 1, 1, 0.5, 1.5]):
            inputs = x, np.array(roi, np.float32), None, np.array([1, 1, 4, 3])
            model = node("Resize", 13, inputs, mode=mode, coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=7.0)
            same(model(*inputs)[0], model.onnxruntime(*inputs)[0], rtol=1e-4, atol=1e-5)


def test_axes_and_policies(node, same):
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for axes in ([2, 0], [-1, 0]):
        scales = np.array([2, 1.5], np.float32)
        model = node("Resize", 18, [x, None, scales], axes=axes)
        assert model(x, None, scales)[0].shape == (3, 3, 8)
    sizes = np.array([9, 5])
    for policy, shape in (("not_larger", (2, 4, 5)), ("not_smaller", (2, 9, 12)), ("stretch", (2, 9, 5))):
        model = node("Resize", 18, [x, None, None, sizes], axes=[1, 2], keep_aspect_ratio_policy=policy)
        assert model(x, None, None, sizes)[0].shape == shape


def test_resize_types(node, same, versions, types_of, sample):
    scales = np.array([1, 2, 1.5], np.float32)
    for schema in versions("Resize", 10):
        version = schema.since_version
        parameter = "T" if version == 10 else "T1"
        for dtype in types_of(schema, parameter):
            x = sample(dtype, (2, 3, 4))
            inputs = (x, scales) if version == 10 else (x, np.zeros(0, np.float32), scales)
            attributes = {} if version == 10 else {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            got = node("Resize", version, inputs, **attributes)(*inputs)[0]
            same(got, x.repeat(2, 1)[:, :, [0, 0, 1, 2, 2, 3]])
            if version < 19:
                continue
            if dtype == STRING:
                with pytest.raises(RunError, match="text"):
                    node("Resize", version, inputs, mode="linear")(*inputs)
                continue
            linear = node("Resize", version, inputs, mode="linear", **attributes)(*inputs)[0]
            assert (linear.shape, linear.dtype) == ((2, 6, 6), x.dtype)
            if np.dtype(dtype).kind in "iu":
                halves = (x.astype(np.float64)[:, :-1] + x.astype(np.float64)[:, 1:]) / 2
                np.testing.assert_array_equal(linear[:, 1:-1:2, 0], np.rint(halves[:, :, 0]))


def test_upsample(node, same, versions, types_of, sample):
    for schema in versions("Upsample", 7):
        if schema.since_version >= 10:
            continue  # deprecated: only Resize is in those opsets
        for dtype in types_of(schema, "T"):
            x = sample(dtype, (1, 2, 3))
            scales = np.array([1, 2, 3], np.float32)
            if schema.since_version == 7:
                got = node("Upsample", 7, [x], scales=[1.0, 2.0, 3.0])(x)[0]
            else:
                got = node("Upsample", 9, [x, scales])(x, scales)[0]
            same(got, x.repeat(2, 1).repeat(3, 2))
    x = np.random.default_rng(0).standard_normal((1, 1, 3, 4)).astype(np.float32)
    scales = np.array([1, 1, 2, 2.5], np.float32)
    for mode in ("nearest", "linear"):
        model = node("Upsample", 9, [x, scales], mode=mode)
        same(model(x, scales)[0], model.onnxruntime(x, scales)[0], rtol=1e-4, atol=1e-5)


def test_nothing_to_resize(node, same):
    x = np.random.default_rng(0).standard_normal((1, 2, 3)).astype(np.float32)
    scales = np.ones(3, np.float32)
    for mode in ("nearest", "linear"):
        got = node("Resize", 13, [x, None, scales], mode=mode)(x, None, scales)[0]
        same(got, x)
    sizes = np.array([1, 2, 0])
    same(node("Resize", 13, [x, None, None, sizes])(x, None, None, sizes)[0], np.zeros((1, 2, 0), np.float32))
    with pytest.raises(RunError, match="neither"):
        node("Resize", 13, [x])(x)
