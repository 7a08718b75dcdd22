"""Pad and CenterCropPad."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import KernelError, RunError


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad_like_numpy(mode, node, same):
    generator = np.random.default_rng(0)
    for _ in range(20):
        shape = generator.integers(1, 5, generator.integers(1, 5))
        x = generator.standard_normal(shape).astype(np.float32)
        amounts = generator.integers(0, 9, (2, x.ndim))
        pads = amounts.ravel()
        want = np.pad(x, list(zip(*amounts.tolist(), strict=True)), mode)
        same(node("Pad", 19, [x, pads], mode=mode)(x, pads)[0], want)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
def test_negative_pads_like_onnxruntime(mode, node, same):
    x = np.arange(35, dtype=np.float32).reshape(5, 7)
    for pads in ([-1, 2, 2, -3], [1, -2, -3, 1], [-2, -1, 0, 0], [-5, 0, 0, 0] if mode == "constant" else [0, 0, 0, 0]):
        amounts = np.array(pads)
        model = node("Pad", 13, [x, amounts], mode=mode)
        same(model(x, amounts)[0], model.onnxruntime(x, amounts)[0])


def test_pad_versions_and_types(node, same, versions, types_of, sample):
    for schema in versions("Pad"):
        version = schema.since_version
        for dtype in types_of(schema, "T"):
            x, value = sample(dtype, (2, 3)), sample(dtype, (), 5)
            if version == 2:
                got = node("Pad", 2, [x], pads=[0, 1, 1, 0], value=2.0)(x)[0]
                value = np.array(2).astype(dtype)
                pads = np.array([0, 1, 1, 0])
            else:
                pads = np.array([0, 1, 1, 0])
                got = node("Pad", version, [x, pads, value])(x, pads, value)[0]
                zero = node("Pad", version, [x, pads, None])(x, pads)[0]
                assert zero[2, 0] == ("" if dtype == np.dtype(object) else np.zeros(1, dtype)[0])
            want = np.empty((3, 4), x.dtype)
            want[...] = value[()]
            want[:2, 1:] = x
            same(got, want)


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_pad_axes(index_type, node, same):
    x = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    pads, axes = np.array([1, 0, 0, 2]), np.array([-1, 0], index_type)
    for mode in ("constant", "edge", "wrap"):
        got = node("Pad", 19, [x, pads, None, axes], mode=mode)(x, pads, None, axes)[0]
        same(got, np.pad(x, [(0, 2), (0, 0), (1, 0)], mode))


def test_pad_edges(node, same):
    x = np.arange(4, dtype=np.float32)
    nothing = np.zeros(2, np.int64)
    for mode in ("constant", "reflect"):
        got = node("Pad", 13, [x, nothing], mode=mode)(x, nothing)[0]
        same(got, x)
        assert got.flags.writeable
    empty, pads = np.zeros((0, 2), np.float32), np.array([1, 0, 1, 0])
    same(node("Pad", 13, [empty, pads])(empty, pads)[0], np.zeros((2, 2), np.float32))
    with pytest.raises(RunError, match="no element"):
        node("Pad", 13, [empty, pads], mode="edge")(empty, pads)
    with pytest.raises(KernelError, match="mode 'mirror'"):
        node("Pad", 13, [x, nothing], mode="mirror")(x, nothing)
    scalar, none = np.array(3, np.float32), np.zeros(0, np.int64)
    same(node("Pad", 13, [scalar, none])(scalar, none)[0], scalar)


def test_center_crop_pad(node, same, versions, types_of, sample):
    for dtype in types_of(versions("CenterCropPad")[0], "T"):
        x, shape = sample(dtype, (4, 5)), np.array([7, 2])
        got = node("CenterCropPad", 18, [x, shape])(x, shape)[0]
        want = np.empty((7, 2), x.dtype)
        want[...] = "" if dtype == np.dtype(object) else np.zeros((), dtype)
        want[1:5] = x[:, 1:3]
        same(got, want)
    x, shape = np.arange(60).reshape(3, 4, 5), np.array([2, 6], np.int32)
    model = node("CenterCropPad", 18, [x, shape], axes=[-3, 2])
    same(model(x, shape)[0], model.reference(x, shape)[0])
