"""AveragePool, MaxPool, LpPool, the global pools and MaxUnpool."""

from __future__ import annotations

import numpy as np
import pytest

from miniort.errors import RunError


def test_average_pool_that_ends_in_its_padding(node, same):
    """microsoft/onnxruntime PR#29629: what lies past the padding never counts; windows must not start in it."""
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    model = node("AveragePool", 11, [x], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, count_include_pad=1)
    same(model(x)[0], np.array([[[[6, 7.5], [12, 13.5]]]], np.float32))
    padded = node("AveragePool", 19, [x], kernel_shape=[3, 3], strides=[3, 3], ceil_mode=1, pads=[1, 1, 1, 1], count_include_pad=1)
    same(
        padded(x)[0],
        np.array([[[[(1 + 2 + 5 + 6) / 9, (3 + 4 + 7 + 8) / 9], [(9 + 10 + 13 + 14) / 9, (11 + 12 + 15 + 16) / 9]]]], np.float32),
    )
    last_outside = node("MaxPool", 12, [x], kernel_shape=[1, 1], strides=[3, 3], ceil_mode=1, pads=[0, 0, 2, 2])
    same(last_outside(x)[0], x[:, :, ::3, ::3])


def pools(generator, rank):
    kernel, strides, dilations = (generator.integers(1, high, rank) for high in (5, 4, 3))
    sizes = (kernel - 1) * dilations + 1 + generator.integers(0, 9, rank)
    attributes = {"kernel_shape": kernel.tolist(), "strides": strides.tolist(), "ceil_mode": int(generator.integers(2))}
    if generator.integers(4) == 0:
        attributes |= {"auto_pad": str(generator.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))}
        attributes["ceil_mode"] = 0
    else:
        attributes |= {"dilations": dilations.tolist(), "pads": [int(generator.integers(0, k)) for k in (*kernel, *kernel)]}
    return attributes, generator.standard_normal((2, 3, *sizes)).astype(np.float32)


@pytest.mark.parametrize("op", ["AveragePool", "MaxPool", "LpPool"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pools_like_the_definition(op, rank, node, same):
    """Each window's elements, one window at a time."""
    generator = np.random.default_rng(rank)
    for _ in range(12):
        attributes, x = pools(generator, rank)
        with_padding = op == "AveragePool" and bool(generator.integers(2))
        model = node(op, 22, [x], **attributes, **({"count_include_pad": 1} if with_padding else {}))
        got = model(x)[0]
        kernel, strides = attributes["kernel_shape"], attributes["strides"]
        dilations = attributes.get("dilations", [1] * rank)
        if "pads" in attributes:
            begins, ends = attributes["pads"][:rank], attributes["pads"][rank:]
        else:
            total = [
                max((got.shape[2 + a] - 1) * strides[a] + (kernel[a] - 1) * dilations[a] + 1 - x.shape[2 + a], 0)
                if attributes["auto_pad"] != "VALID"
                else 0
                for a in range(rank)
            ]
            less, more = [each // 2 for each in total], [each - each // 2 for each in total]
            begins, ends = (more, less) if attributes["auto_pad"] == "SAME_LOWER" else (less, more)
        want = np.empty_like(got)
        for place in np.ndindex(*got.shape[2:]):
            grids, counts = [], 1
            for a in range(rank):
                at = place[a] * strides[a] - begins[a] + np.arange(kernel[a]) * dilations[a]
                grids.append(at[(at >= 0) & (at < x.shape[2 + a])])
                counts *= ((at >= -begins[a]) & (at < x.shape[2 + a] + ends[a])).sum()
            seen = x[np.ix_(range(2), range(3), *grids)].reshape(2, 3, -1)
            index = (slice(None), slice(None), *place)
            if op == "MaxPool":
                want[index] = seen.max(-1)
            elif op == "LpPool":
                want[index] = np.sqrt((seen.astype(np.float64) ** 2).sum(-1))
            else:
                want[index] = seen.sum(-1) / (counts if with_padding else seen.shape[-1])
        same(got, want, rtol=1e-5, atol=1e-6)


def test_max_pool_indices_like_onnxruntime(node, same):
    generator = np.random.default_rng(0)
    for _ in range(10):
        attributes, x = pools(generator, 2)
        x = np.round(x)  # ties
        for order in (0, 1):
            model = node("MaxPool", 12, [x], outputs=2, storage_order=order, **attributes)
            for got, want in zip(model(x), model.onnxruntime(x), strict=True):
                same(got, want)


def test_pool_types(node, same, versions, types_of, sample):
    for op in ("AveragePool", "MaxPool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
        for schema in versions(op):
            for dtype in types_of(schema, "T"):
                x = sample(dtype, (2, 3, 6, 5))
                attributes = {} if op.startswith("Global") else {"kernel_shape": [2, 3], "pads": [1, 1, 0, 1]}
                got = node(op, schema.since_version, [x], **attributes)(x)[0]
                want = node(op, 22, [np.float64], **attributes)(x.astype(np.float64))[0]
                same(got, want.astype(dtype), rtol=1e-5 if dtype == np.float32 else None)


def test_pool_edges(node, same):
    x = np.array([[[[np.nan, 1], [2, np.inf]]]], np.float32)
    same(node("MaxPool", 12, [x], kernel_shape=[1, 2])(x)[0], np.array([[[[np.nan], [np.inf]]]], np.float32))
    got, index = node("MaxPool", 12, [x], outputs=2, kernel_shape=[2, 2])(x)
    assert np.isnan(got).all()
    assert index.item() == 0
    lowest = np.full((1, 1, 2, 2), -np.inf, np.float32)
    got, index = node("MaxPool", 12, [x], outputs=2, kernel_shape=[2, 2])(lowest)
    same(got, np.full((1, 1, 1, 1), -np.inf, np.float32))
    assert index.item() == 0
    empty = np.zeros((0, 2, 4, 4), np.float32)
    same(node("MaxPool", 12, [empty], kernel_shape=[2, 2])(empty)[0], np.zeros((0, 2, 3, 3), np.float32))
    same(node("AveragePool", 12, [x], kernel_shape=[1, 1])(x)[0], x)
    with pytest.raises(RunError, match="doesn't fit"):
        node("MaxPool", 12, [x], kernel_shape=[5, 5])(x)


def test_global_pool_over_three_axes(node, same):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5, 6)).astype(np.float32)
    for op, attributes in (("GlobalAveragePool", {}), ("GlobalMaxPool", {}), ("GlobalLpPool", {"p": 3})):
        model = node(op, 2, [x], **attributes)
        same(model(x)[0], model.onnxruntime(x)[0], rtol=1e-4)


def test_max_unpool(node, same, versions, types_of, sample):
    for schema in versions("MaxUnpool"):
        for dtype in types_of(schema, "T1"):
            x = sample(dtype, (1, 2, 4, 4))
            y, at = node("MaxPool", 22, [x], outputs=2, kernel_shape=[2, 2], strides=[2, 2])(x)
            got = node("MaxUnpool", schema.since_version, [y, at], kernel_shape=[2, 2], strides=[2, 2])(y, at)[0]
            want = np.zeros(x.size, dtype)
            want[at.ravel()] = y.ravel()
            same(got, want.reshape(x.shape))
    y, at = np.ones((1, 1, 1, 1), np.float32), np.array([[[[3]]]])
    shape = np.array([1, 1, 3, 4])
    got = node("MaxUnpool", 11, [y, at, shape], kernel_shape=[2, 2])(y, at, shape)[0]
    want = np.zeros((1, 1, 3, 4), np.float32)
    want[0, 0, 1, 1] = 1
    same(got, want)
