"""DepthToSpace, SpaceToDepth and Col2Im."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_blocks_of_space(mode, node, same, versions, types_of, sample):
    for schema in versions("DepthToSpace")[-1 if mode == "CRD" else 0 :]:
        for dtype in types_of(schema, "T"):
            x = sample(dtype, (2, 12, 3, 2))
            attributes = {} if schema.since_version < 11 else {"mode": mode}
            y = node("DepthToSpace", schema.since_version, [x], blocksize=2, **attributes)(x)[0]
            shape = (2, 2, 2, 3, 3, 2) if mode == "DCR" or not attributes else (2, 3, 2, 2, 3, 2)
            order = (0, 3, 4, 1, 5, 2) if mode == "DCR" or not attributes else (0, 1, 4, 2, 5, 3)
            same(y, x.reshape(shape).transpose(order).reshape(2, 3, 6, 4))
    for schema in versions("SpaceToDepth")[-1 if mode == "CRD" else 0 :]:
        for dtype in types_of(schema, "T"):
            x = sample(dtype, (2, 3, 6, 4))
            attributes = {} if schema.since_version < 28 else {"mode": mode}
            y = node("SpaceToDepth", schema.since_version, [x], blocksize=2, **attributes)(x)[0]
            back = node("DepthToSpace", 13, [y], blocksize=2, **({"mode": mode} if attributes else {}))(y)[0]
            same(back, x)
    none = np.zeros((0, 4, 2, 2), np.float32)
    same(node("DepthToSpace", 13, [none], blocksize=2)(none)[0], np.zeros((0, 1, 4, 4), np.float32))


def test_col2im(node, same, versions, types_of, sample):
    generator = np.random.default_rng(0)
    for _ in range(8):
        image, block = generator.integers(4, 7, 2), generator.integers(1, 4, 2)
        pads, strides = generator.integers(0, 2, 4).tolist(), generator.integers(1, 3, 2).tolist()
        counts = [(image[i] + pads[i] + pads[2 + i] - block[i]) // strides[i] + 1 for i in range(2)]
        x = generator.standard_normal((2, 3 * block.prod(), np.prod(counts))).astype(np.float32)
        model = node("Col2Im", 18, [x, image, block], pads=pads, strides=strides)
        same(model(x, image, block)[0], model.onnxruntime(x, image, block)[0], rtol=1e-5, atol=1e-5)
    for dtype in types_of(versions("Col2Im")[0], "T"):
        if dtype in (np.dtype(object), np.dtype(bool)):
            continue  # nothing says how text or truth values are added up
        x, image, block = sample(dtype, (1, 2, 3)), np.array([4]), np.array([2])
        got = node("Col2Im", 18, [x, image, block])(x, image, block)[0]
        wide = x.astype(np.complex128 if np.dtype(dtype).kind == "c" else np.float64)
        want = np.zeros((1, 1, 4), wide.dtype)
        want[:, 0, :3] += wide[:, 0]
        want[:, 0, 1:] += wide[:, 1]
        same(got, want.astype(dtype))
