"""NonMaxSuppression, RoiAlign and MaxRoiPool."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize("centered", [0, 1])
def test_non_max_suppression_like_onnxruntime(centered, node, same):
    generator = np.random.default_rng(0)
    for trial in range(6):
        count = int(generator.integers(0, 40))
        corners = generator.uniform(0, 10, (2, count, 4)).astype(np.float32)
        scores = np.round(generator.uniform(0, 1, (2, 3, count)), 2 if trial % 2 else 6).astype(np.float32)
        values = [np.array([5]), np.array([0.3], np.float32), np.array([0.4], np.float32)]
        for kept in range(4):
            inputs = [corners, scores, *values[:kept]]
            model = node("NonMaxSuppression", 11, inputs, center_point_box=centered)
            same(model(*inputs)[0], model.onnxruntime(*inputs)[0])
        inputs = [corners, scores, values[0], None, values[2]]
        model = node("NonMaxSuppression", 10, inputs, center_point_box=centered)
        same(model(*inputs)[0], model.onnxruntime(*inputs)[0])


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align_like_onnxruntime(ratio, mode, node, same):
    generator = np.random.default_rng(0)
    x = generator.uniform(0, 1, (2, 3, 10, 12)).astype(np.float32)
    corners = generator.uniform(-2, 12, (9, 2, 2)).astype(np.float32)
    rois = np.concatenate([corners.min(1), corners.max(1)], 1)
    images = generator.integers(0, 2, 9)
    for opset, attributes in ((10, {}), (16, {}), (16, {"coordinate_transformation_mode": "output_half_pixel"})):
        model = node(
            "RoiAlign",
            opset,
            [x, rois, images],
            mode=mode,
            output_height=3,
            output_width=2,
            sampling_ratio=ratio,
            spatial_scale=0.8,
            **attributes,
        )
        same(model(x, rois, images)[0], model.onnxruntime(x, rois, images)[0], rtol=1e-4, atol=1e-5)


def test_max_roi_pool_like_onnxruntime(node, same):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 3, 10, 12)).astype(np.float32)
    corners = generator.uniform(0, 14, (9, 2, 2)).astype(np.float32)
    rois = np.concatenate([generator.integers(0, 2, (9, 1)), corners.min(1), corners.max(1)], 1).astype(np.float32)
    for scale in (1.0, 0.5):
        model = node("MaxRoiPool", 7, [x, rois], pooled_shape=[3, 2], spatial_scale=scale)
        same(model(x, rois)[0], model.onnxruntime(x, rois)[0])


def test_types(node, same, versions, types_of, sample):
    rois, images = np.array([[1, 1, 4, 5], [0, 2, 3, 3]]), np.array([0, 0])
    for op, since in (("RoiAlign", "T1"), ("MaxRoiPool", "T")):
        for schema in versions(op):
            for dtype in types_of(schema, since):
                x = sample(dtype, (1, 2, 7, 7))
                if op == "RoiAlign":
                    inputs, attributes = (x, rois.astype(dtype), images), {"output_height": 2, "output_width": 2, "sampling_ratio": 2}
                else:
                    inputs, attributes = (x, np.insert(rois, 0, 0, 1).astype(dtype)), {"pooled_shape": [2, 2]}
                got = node(op, schema.since_version, inputs, **attributes)(*inputs)[0]
                wide = [each if each.dtype == np.int64 else each.astype(np.float64) for each in inputs]
                want = node(op, schema.since_version, wide, **attributes)(*wide)[0]
                same(
                    got,
                    want.astype(dtype),
                    rtol=1e-5 if dtype == np.float32 else None,
                    atol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-6,
                )
    none = np.zeros((0, 4), np.float32)
    x = np.zeros((1, 2, 3, 3), np.float32)
    same(node("RoiAlign", 16, [x, none, np.int64])(x, none, np.zeros(0, np.int64))[0], np.zeros((0, 2, 1, 1), np.float32))
