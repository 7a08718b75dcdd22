"""BatchNormalization, InstanceNormalization, GroupNormalization, LRN, LpNormalization, MeanVarianceNormalization."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import KernelError


def channels(dtype, count=3):
    generator = np.random.default_rng(1)
    return [generator.uniform(0.5, 2, count).astype(dtype) for _ in range(4)]


def loose(dtype):
    return 1e-5 if dtype == np.float32 else None


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (0, 3, 4)])
def test_batch_normalization(shape, constant, node, same, versions, types_of, sample):
    for schema in versions("BatchNormalization"):
        for dtype in types_of(schema, "T"):
            x, (scale, bias, mean, variance) = sample(dtype, shape), channels(dtype)
            inputs = (x, scale, bias, mean, variance)
            constants = dict(enumerate(inputs)) if constant else {}
            constants.pop(0, None)
            got = node("BatchNormalization", schema.since_version, inputs, constants=constants, epsilon=0.01)(*inputs)[0]
            wide = [each.astype(np.float64).reshape(-1, *[1] * (len(shape) - 2)) for each in inputs[1:]]
            want = (x.astype(np.float64) - wide[2]) / np.sqrt(wide[3] + np.float32(0.01)) * wide[0] + wide[1]
            same(got, want.astype(dtype), rtol=loose(dtype), atol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-5)


def test_batch_normalization_of_places_and_mixed_types(node, same):
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    parts = [each.reshape(3, 4) for each in channels(np.float32, 12)]
    got = node("BatchNormalization", 7, [x, *parts], spatial=0)(x, *parts)[0]
    same(got, (x - parts[2]) / np.sqrt(parts[3] + np.float32(1e-5)) * parts[0] + parts[1], rtol=1e-4, atol=1e-5)
    half, wide = x.astype(np.float16), channels(np.float32)
    inputs = (half, wide[0].astype(np.float16), wide[1].astype(np.float16), wide[2], wide[3])
    model = node("BatchNormalization", 15, inputs)
    same(model(*inputs)[0], model.reference(*inputs)[0], atol=1e-2)


def test_batch_normalization_in_training(node, same):
    x = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
    inputs = (x, *channels(np.float32))
    model = node("BatchNormalization", 15, inputs, outputs=3, training_mode=1, momentum=0.7)
    for got, want in zip(model(*inputs), model.reference(*inputs), strict=True):
        same(got, want, rtol=1e-4, atol=1e-5)
    old = node("BatchNormalization", 9, inputs, outputs=5, momentum=0.7)(*inputs)
    for got, want in zip(old, [*model.reference(*inputs), x.mean((0, 2)), x.var((0, 2))], strict=True):
        same(got, want, rtol=1e-4, atol=1e-5)


def test_instance_normalization(node, same, versions, types_of, sample):
    for schema in versions("InstanceNormalization"):
        for dtype in types_of(schema, "T"):
            x, (scale, bias, *_) = sample(dtype, (2, 3, 4, 5)), channels(dtype)
            got = node("InstanceNormalization", schema.since_version, [x, scale, bias])(x, scale, bias)[0]
            wide = x.astype(np.float64)
            want = (wide - wide.mean((2, 3), keepdims=True)) / np.sqrt(wide.var((2, 3), keepdims=True) + 1e-5)
            want = want * scale.astype(np.float64).reshape(3, 1, 1) + bias.astype(np.float64).reshape(3, 1, 1)
            same(got, want.astype(dtype), rtol=loose(dtype), atol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-5)


def test_group_normalization(node, same, versions, types_of, sample):
    for schema in versions("GroupNormalization"):
        for dtype in types_of(schema, "T"):
            count = 2 if schema.since_version == 18 else 6
            x, (scale, bias, *_) = sample(dtype, (2, 6, 3, 2)), channels(dtype, count)
            got = node("GroupNormalization", schema.since_version, [x, scale, bias], num_groups=2, epsilon=0.1)(x, scale, bias)[0]
            rows = x.astype(np.float64).reshape(2, 2, -1)
            rows = (rows - rows.mean(2, keepdims=True)) / np.sqrt(rows.var(2, keepdims=True) + np.float32(0.1))
            factor, term = (each.astype(np.float64).repeat(6 // count).reshape(6, 1, 1) for each in (scale, bias))
            want = rows.reshape(x.shape) * factor + term
            same(got, want.astype(dtype), rtol=loose(dtype), atol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-5)
    none = np.zeros((0, 6, 2), np.float32)
    ones = np.ones(6, np.float32)
    same(node("GroupNormalization", 21, [none, ones, ones], num_groups=3)(none, ones, ones)[0], none)


def test_local_response_normalization(node, same, versions, types_of, sample):
    for schema in versions("LRN"):
        for dtype in types_of(schema, "T"):
            for size in (1, 2, 3, 5, 9):
                x = sample(dtype, (2, 4, 3, 3))
                got = node("LRN", schema.since_version, [x], size=size, alpha=0.3, beta=0.6, bias=1.5)(x)[0]
                wide = x.astype(np.float64)
                total = [(wide[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1] ** 2).sum(1) for c in range(4)]
                want = wide / (1.5 + 0.3 / size * np.stack(total, 1)) ** 0.6
                same(got, want.astype(dtype), rtol=loose(dtype))


def test_lp_normalization(node, same, versions, types_of):
    x = np.array([[3, 0, -4], [0, 0, 0], [np.inf, 1, 2]])
    for schema in versions("LpNormalization"):
        for dtype in types_of(schema, "T"):
            rows = x.astype(dtype)
            got = node("LpNormalization", schema.since_version, [rows], p=2, axis=-1)(rows)[0]
            same(got, np.array([[0.6, 0, -0.8], [0, 0, 0], [np.nan, 0, 0]]).astype(dtype))
            got = node("LpNormalization", schema.since_version, [rows], p=1, axis=1)(rows)[0]
            same(got[:2], np.array([[3 / 7, 0, -4 / 7], [0, 0, 0]]).astype(dtype))
    with pytest.raises(KernelError, match="p 3"):
        node("LpNormalization", 22, [x], p=3)(x)


def test_mean_variance_normalization(node, same, versions, types_of, sample):
    for schema in versions("MeanVarianceNormalization"):
        for dtype in types_of(schema, "T"):
            x = sample(dtype, (2, 3, 4, 5))
            for axes in ([0, 2, 3], [-1, 1]):
                got = node("MeanVarianceNormalization", schema.since_version, [x], axes=axes)(x)[0]
                wide = x.astype(np.float64)
                want = (wide - wide.mean(tuple(axes), keepdims=True)) / wide.std(tuple(axes), keepdims=True)
                same(got, want.astype(dtype), rtol=loose(dtype), atol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-5)
