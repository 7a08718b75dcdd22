"""GridSample and AffineGrid."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import RunError
from miniort.types import STRING


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_grid_sample_like_onnxruntime(mode, padding, corners, node, same):
    generator = np.random.default_rng(0)
    old = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    x = generator.standard_normal((2, 3, 5, 6)).astype(np.float32)
    grid = generator.uniform(-2.5, 2.5, (2, 4, 3, 2)).astype(np.float32)
    for opset, name in ((16, old), (20, mode)):
        model = node("GridSample", opset, [x, grid], mode=name, padding_mode=padding, align_corners=corners)
        if (mode, padding) == ("cubic", "border"):
            # "Use border values for out-of-bound grid locations": onnxruntime uses them for the neighbours of such a location instead.
            small = grid[:1, :2]
            newest = node("GridSample", 20, [x, grid], mode=mode, padding_mode=padding, align_corners=corners)
            same(model(x[:1], small)[0], newest.reference(x[:1], small)[0], rtol=1e-3, atol=1e-4)
        else:
            same(model(x, grid)[0], model.onnxruntime(x, grid)[0], rtol=1e-3, atol=1e-4)
    if mode != "cubic":  # onnxruntime's cubic mode is for images only
        x = generator.standard_normal((1, 2, 3, 4, 5)).astype(np.float32)
        grid = generator.uniform(-1.5, 1.5, (1, 2, 3, 2, 3)).astype(np.float32)
        model = node("GridSample", 20, [x, grid], mode=mode, padding_mode=padding, align_corners=corners)
        same(model(x, grid)[0], model.onnxruntime(x, grid)[0], rtol=1e-3, atol=1e-4)


def test_grid_sample_types(node, same, versions, types_of, sample):
    grid = np.array([[[[-1, -1], [1, 1], [0, 0], [9, 9]]]], np.float32)
    for schema in versions("GridSample"):
        for dtype in types_of(schema, "T1"):
            for grid_type in types_of(schema, "T2") if dtype == np.float32 else [np.dtype(np.float32)]:
                x = sample(dtype, (1, 2, 3, 3))
                at = grid.astype(grid_type)
                got = node("GridSample", schema.since_version, [x, at], mode="nearest", align_corners=1)(x, at)[0]
                want = np.stack([x[:, :, 0, 0], x[:, :, 2, 2], x[:, :, 1, 1], np.zeros_like(x[:, :, 0, 0])], -1)[:, :, None]
                if dtype == STRING:
                    want[..., 3] = ""
                same(got, want)
                linear = node("GridSample", schema.since_version, [x, at], align_corners=1)
                if dtype == STRING:
                    with pytest.raises(RunError, match="text"):
                        linear(x, at)
                else:
                    same(linear(x, at)[0], want)


def test_an_infinite_pixel_does_not_leak_into_the_padding(node):
    x = np.full((1, 1, 2, 2), np.inf, np.float32)
    grid = np.full((1, 1, 1, 2), 5, np.float32)
    assert node("GridSample", 20, [x, grid])(x, grid)[0].item() == 0


def test_affine_grid(node, same, versions, types_of, sample):
    for schema in versions("AffineGrid"):
        for dtype in types_of(schema, "T1"):
            for shape, size in (((2, 2, 3), [2, 1, 3, 4]), ((1, 3, 4), [1, 1, 2, 3, 4])):
                for corners in (0, 1):
                    theta = sample(dtype, shape)
                    sizes = np.array(size)
                    got = node("AffineGrid", 20, [theta, sizes], align_corners=corners)(theta, sizes)[0]
                    wide = node("AffineGrid", 20, [np.float64, sizes], align_corners=corners)
                    want = wide.reference(theta.astype(np.float64), sizes)[0]
                    same(
                        got,
                        want.astype(dtype),
                        rtol=1e-5 if dtype == np.float32 else None,
                        atol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-6,
                    )
    theta, sizes = np.array([[[1, 0, 0], [0, 1, 0]]], np.float32), np.array([1, 1, 1, 2])
    same(node("AffineGrid", 20, [theta, sizes], align_corners=1)(theta, sizes)[0], np.array([[[[-1, 0], [1, 0]]]], np.float32))
