"""Builders of pools over windows, over all of the space, and over regions."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse, is_float
from miniort.testing.operators.convolution import kernel_sizes, summable, window_attributes
from miniort.types import Array, DType

FLOAT32 = np.dtype(np.float32)


def pooled(d: Draws, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Numbers that are different ones mostly; any of an integer type."""
    return summable(d, dtype, shape) if is_float(dtype) else d.array(dtype, shape)


@builds("AveragePool", "MaxPool", "LpPool")
def pool(d: Draws, operator: Operator) -> NodeCase:
    """One to three axes: x [N, C, *sizes]."""
    dtype, kernel = d.dtype(operator), kernel_sizes(d)
    attributes, sizes = window_attributes(d, operator, kernel)
    attributes["kernel_shape"] = list(kernel)
    choices = {"ceil_mode": [0, 1], "count_include_pad": [0, 1], "storage_order": [0, 1], "p": [1, 2, 3]}
    attributes |= {name: d.choice(values) for name, values in choices.items() if operator.has_attribute(name) and d.boolean()}
    x = pooled(d, dtype, (d.choice([1, 2, 2, 0]), d.integer(1, 2), *sizes))
    outputs = d.integer(1, 2) if operator.op == "MaxPool" and operator.version >= 8 else 1
    tolerance = 0.02 if is_coarse(dtype) else None
    return NodeCase(
        [x], attributes, outputs, tolerance=tolerance, expected=lambda inputs: pool_formula(operator.op, attributes, x)[:outputs]
    )


def window_placement(attributes: dict[str, Any], sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Per axis how many windows there are, and how much padding at its begin and end, by the equations of the ops' texts."""
    kernel = attributes["kernel_shape"]
    rank, auto_pad = len(kernel), attributes.get("auto_pad", "NOTSET")
    pads = attributes.get("pads", [0] * (2 * rank))
    placed = []
    for axis, size in enumerate(sizes):
        stride = attributes.get("strides", [1] * rank)[axis]
        extent = (kernel[axis] - 1) * attributes.get("dilations", [1] * rank)[axis] + 1
        begin, end = pads[axis], pads[axis + rank]
        if auto_pad.startswith("SAME"):
            count = -(-size // stride)
            padding = max((count - 1) * stride + extent - size, 0)
            begin = padding // 2 if auto_pad == "SAME_UPPER" else padding - padding // 2
            placed.append((count, begin, padding - begin))
            continue
        rest = size + begin + end - extent
        count = (-(-rest // stride) if attributes.get("ceil_mode") else rest // stride) + 1
        if (count - 1) * stride >= size + begin:  # a window starts in the input or in the padding before it
            count -= 1
        placed.append((count, begin, end))
    return placed


def pool_formula(op: str, attributes: dict[str, Any], x: Array) -> list[Array]:
    """A pool window by window, and for MaxPool where the maxima are. x: [N, C, *sizes]. ValueError for a window that sees nothing."""
    kernel, sizes = attributes["kernel_shape"], x.shape[2:]
    rank, placed = len(kernel), window_placement(attributes, x.shape[2:])
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    wide, power = x.astype(np.float64), attributes.get("p", 2)
    order: Any = "F" if attributes.get("storage_order") else "C"
    y = np.zeros((*x.shape[:2], *(count for count, _, _ in placed)))
    places = np.zeros(y.shape, np.int64)
    for window in np.ndindex(y.shape[2:]):
        taps = [window[axis] * strides[axis] - placed[axis][1] + np.arange(kernel[axis]) * dilations[axis] for axis in range(rank)]
        inside = [tap[(tap >= 0) & (tap < size)] for tap, size in zip(taps, sizes, strict=True)]
        padded = [tap[(tap >= -begin) & (tap < size + end)] for tap, size, (_, begin, end) in zip(taps, sizes, placed, strict=True)]
        counted = padded if attributes.get("count_include_pad") else inside
        seen = wide[np.ix_(np.arange(len(x)), np.arange(x.shape[1]), *inside)].reshape(*x.shape[:2], prod(len(tap) for tap in inside))
        if any(not tap.size for tap in inside):
            raise ValueError("a window sees no element")
        here = (..., *window)
        if op == "MaxPool":
            y[here] = seen.max(axis=2)
            linear = np.ravel_multi_index(np.meshgrid(*inside, indexing="ij"), sizes, order=order).ravel()
            first = np.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) * np.prod(sizes)
            places[here] = first + linear[seen.argmax(axis=2)]
        elif op == "AveragePool":
            y[here] = seen.sum(axis=2) / np.prod([len(tap) for tap in counted])
        else:
            y[here] = (np.abs(seen) ** power).sum(axis=2) ** (1 / power)
    return [y.astype(x.dtype), places]


@builds("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(d: Draws, operator: Operator) -> NodeCase:
    """Over every axis but the first two."""
    dtype = d.dtype(operator)
    x = summable(d, dtype, (d.integer(0, 2), d.integer(1, 2), *d.shape(1, 3, min_size=1)))
    attributes = d.some(p=d.integer(1, 3)) if operator.has_attribute("p") else {}
    kernel = {"kernel_shape": list(x.shape[2:])}
    return NodeCase(
        [x],
        attributes,
        tolerance=0.02 if is_coarse(dtype) else None,
        expected=lambda inputs: pool_formula(operator.op.removeprefix("Global"), attributes | kernel, x)[:1],
    )


@builds("MaxUnpool")
def max_unpool(d: Draws, operator: Operator) -> NodeCase:
    """Maxima back where a pool without overlap found them: x, indices [N, C, *counts]; with the output's shape or without."""
    kernel = kernel_sizes(d)
    counts = tuple(d.integer(1, 3) for _ in kernel)
    sizes = tuple(count * size for count, size in zip(counts, kernel, strict=True))
    batch, channels = d.integer(1, 2), d.integer(1, 2)
    total = batch * channels * int(np.prod(sizes))
    steps: tuple[Any, ...] = (..., *(slice(d.integer(0, size - 1), None, size) for size in kernel))
    places = np.arange(total).reshape(batch, channels, *sizes)[steps]
    x = d.ordinary(d.dtype(operator, "T1"), places.shape)
    shape = np.array([batch, channels, *sizes], np.int64) if d.boolean() else None
    attributes: dict[str, Any] = {"kernel_shape": list(kernel), "strides": list(kernel)} | d.some(pads=[0] * (2 * len(kernel)))
    return NodeCase(d.trimmed([x, places.astype(np.int64), shape]), attributes)


def regions(d: Draws, dtype: DType, count: int, size: int) -> Array:
    """Corners x1, y1, x2, y2 with x1 ≤ x2 and y1 ≤ y2: [count, 4]."""
    corners = d.rng().integers(0, size, (2, count, 2))
    return np.concatenate([corners.min(0), corners.max(0)], axis=1).astype(dtype)


@builds("MaxRoiPool")
def max_roi_pool(d: Draws, operator: Operator) -> NodeCase:
    """The largest of each cell of regions: x [N, C, H, W], rois [count, 5] with the number of the image first."""
    dtype = d.dtype(operator)
    x = summable(d, dtype, (d.integer(1, 2), d.integer(1, 2), d.integer(4, 6), d.integer(4, 6)))
    count = d.integer(1, 3)
    images = d.rng().integers(0, len(x), (count, 1)).astype(dtype)
    attributes: dict[str, Any] = {"pooled_shape": [d.integer(1, 3), d.integer(1, 3)]} | d.some(spatial_scale=d.choice([0.5, 1.0, 2.0]))
    rois = np.concatenate([images, regions(d, dtype, count, 4)], axis=1)
    return NodeCase([x, rois], attributes, expected=lambda inputs: [max_roi_pool_formula(x, rois, **attributes)])


def max_roi_pool_formula(x: Array, rois: Array, pooled_shape: list[int], spatial_scale: float = 1.0) -> Array:
    """Girshick 2015 (arXiv:1504.08083): cells from ⌊i · size / count⌋ to ⌈(i + 1) · size / count⌉. -> [R, C, *pooled_shape]."""
    y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
    for place in np.ndindex(len(rois), *pooled_shape):
        image, *corners = rois[place[0]].astype(np.float64)
        left, top, right, bottom = np.floor(np.array(corners) * spatial_scale + 0.5).astype(int)
        cells = []
        for axis, (first, last) in enumerate([(top, bottom), (left, right)]):
            cell = max(last - first + 1, 1) / pooled_shape[axis]
            start, end = first + np.floor(place[axis + 1] * cell), first + np.ceil((place[axis + 1] + 1) * cell)
            cells.append(slice(int(np.clip(start, 0, x.shape[axis + 2])), int(np.clip(end, 0, x.shape[axis + 2]))))
        seen = x[int(image)][:, *cells].reshape(x.shape[1], -1)
        if seen.size:
            y[place[0], :, place[1], place[2]] = seen.astype(np.float64).max(axis=1)
    return y


@builds("RoiAlign")
def roi_align(d: Draws, operator: Operator) -> NodeCase:
    """Interpolated samples of each cell of regions: x [N, C, H, W], rois [count, 4], images [count]."""
    dtype = d.dtype(operator, "T1")
    x = summable(d, dtype, (d.integer(1, 2), d.integer(1, 2), d.integer(4, 6), d.integer(4, 6)))
    count = d.integer(0, 3)
    rois = (regions(d, dtype, count, 6) + d.rng().integers(0, 4, (count, 4)).astype(dtype) / np.asarray(4, dtype)).astype(dtype)
    rois = np.concatenate([np.minimum(rois[:, :2], rois[:, 2:]), np.maximum(rois[:, :2], rois[:, 2:])], axis=1)
    attributes = d.some(
        mode=d.choice(["avg", "max"]),
        output_height=d.integer(1, 3),
        output_width=d.integer(1, 3),
        sampling_ratio=d.integer(0, 3),
        spatial_scale=d.choice([0.25, 0.5, 1.0, 2.0]),
    )
    if operator.has_attribute("coordinate_transformation_mode"):
        attributes |= d.some(coordinate_transformation_mode=d.choice(["half_pixel", "output_half_pixel"]))
    images = d.rng().integers(0, len(x), count)
    return NodeCase([x, rois, images.astype(np.int64)], attributes, atol=0.1 if is_coarse(dtype) else None)
