"""Builders of ops that sample images at other places: resizing, warping, and putting columns back."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse, is_float
from miniort.testing.operators.convolution import summable
from miniort.types import STRING, Array, DType

FLOAT32 = np.dtype(np.float32)
SCALES = [0.5, 0.625, 1.0, 1.5, 2.0, 2.5, 3.0]


def image(d: Draws, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Small numbers of any type, or words."""
    return summable(d, dtype, shape) if is_float(dtype) else d.array(dtype, shape, special=False)


def interpolable(dtype: DType) -> bool:
    """Whether elements of it can be weighed and added up without being rounded to whole ones."""
    return is_float(dtype)


@builds("Upsample")
def upsample(d: Draws, operator: Operator) -> NodeCase:
    """Larger by scales of at least 1, which are an attribute, then an input: x [N, C, H, W] for linear, any rank for nearest."""
    dtype = d.dtype(operator)
    attributes: dict[str, Any] = d.some(mode=d.choice(["nearest", "linear"]) if interpolable(dtype) else "nearest")
    linear = attributes.get("mode") == "linear"
    shape = d.shape(4, 4, min_size=1, max_size=3) if linear else d.shape(1, 4, min_size=1, max_size=3)
    factors = [1.0 if linear and axis < 2 else d.choice([1.0, 1.5, 2.0, 3.0]) for axis in range(len(shape))]
    x = image(d, dtype, shape)
    tolerance = 0.02 if is_coarse(dtype) else None
    if operator.has_attribute("scales"):
        attributes["scales"] = factors
        return NodeCase([x], attributes, tolerance=tolerance, expected=lambda inputs: [resampled(x, factors, linear)])
    factor_array = np.array(factors, np.float32)
    return NodeCase(
        [x, factor_array],
        attributes,
        constants=d.constants(1),
        tolerance=tolerance,
        expected=lambda inputs: [resampled(x, factors, linear)],
    )


def resampled(x: Array, factors: list[float], linear: bool) -> Array:
    """What Resize did before version 11: output i lies at i / factor; the nearest is the element before, or after where an axis shrinks."""
    wide = x.astype(np.float64) if linear else x
    for axis, factor in enumerate(factors):
        last = x.shape[axis] - 1
        at = np.arange(int(x.shape[axis] * factor)) / factor
        below = np.minimum((np.floor(at) if linear or factor >= 1 else np.ceil(at)).astype(int), last)
        if linear:
            share = (at - below).reshape(-1, *(1,) * (x.ndim - 1 - axis))
            wide = wide.take(below, axis) * (1 - share) + wide.take(np.minimum(below + 1, last), axis) * share
        else:
            wide = wide.take(below, axis)
    return wide.astype(x.dtype)


def modes(d: Draws, operator: Operator, dtype: DType) -> dict[str, Any]:
    """How Resize interpolates and how coordinates are mapped."""
    attributes: dict[str, Any] = d.some(mode=d.choice(["nearest", "linear", "cubic"]) if interpolable(dtype) else "nearest")
    if operator.version < 11:
        return {name: "linear" if value == "cubic" else value for name, value in attributes.items()}
    mode = attributes.get("mode", "nearest")
    transformations = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"]
    transformations += ["tf_half_pixel_for_nn"] if operator.version == 11 else []
    transformations += ["half_pixel_symmetric"] if operator.version >= 19 else []
    attributes |= d.some(coordinate_transformation_mode=d.choice(transformations))
    if mode == "nearest":
        attributes |= d.some(nearest_mode=d.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]))
    if mode == "cubic":
        attributes |= d.some(cubic_coeff_a=d.choice([-0.5, -0.75]), exclude_outside=d.integer(0, 1))
    if operator.has_attribute("antialias") and mode != "nearest":
        attributes |= d.some(antialias=d.integer(0, 1))
    if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        attributes |= d.some(extrapolation_value=d.number(-2, 2))
    return attributes


@builds("Resize")
def resize(d: Draws, operator: Operator) -> NodeCase:
    """By scales or to sizes, of all axes or some: x [N, C, H, W], the first two axes as they are where elements are weighed."""
    dtype = d.choice([d.dtype(operator, "T" if operator.version < 11 else "T1"), FLOAT32])
    attributes = modes(d, operator, dtype)
    weighed = attributes.get("mode", "nearest") != "nearest"
    shape = d.shape(4, 4, min_size=1) if weighed or d.boolean() else d.shape(1, 3, min_size=1)
    x = image(d, dtype, shape)
    resized = [2, 3] if len(shape) == 4 else list(range(len(shape)))
    factors = [d.choice(SCALES) if axis in resized else 1.0 for axis in range(len(shape))]
    tolerance: dict[str, Any] = {"tolerance": 0.05, "atol": 0.05} if is_coarse(dtype) else {"atol": 1e-4}
    factors = [factor if shape[axis] * factor >= 1 else 1.0 for axis, factor in enumerate(factors)]
    if operator.version < 11:
        linear = attributes.get("mode") == "linear"
        inputs = [x, np.array(factors, np.float32)]
        return NodeCase(inputs, attributes, constants=d.constants(1), expected=lambda inputs: [resampled(x, factors, linear)], **tolerance)
    axes = list(range(len(shape)))
    if operator.has_attribute("axes") and d.boolean():
        axes = d.permutation(resized) if d.boolean() else resized
        attributes["axes"] = [axis - len(shape) for axis in axes] if d.integer(0, 2) == 0 else list(axes)
    roi = None
    crop = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if crop or operator.version < 13 or d.integer(0, 4) == 0:
        starts = [d.choice([0.0, 0.25, -0.125]) if axis in resized else 0.0 for axis in axes]
        ends = [d.choice([1.0, 0.75, 1.125]) if axis in resized else 1.0 for axis in axes]
        roi = np.array(starts + ends, d.dtype(operator, "T2"))
    scales = sizes = None
    if crop or d.boolean():  # the size that scales give depends on the region where there is one, or doesn't, as implementers read the text
        sizes = np.array([d.integer(1, 6) if axis in resized else shape[axis] for axis in axes], np.int64)
        if operator.has_attribute("keep_aspect_ratio_policy") and not crop:
            attributes |= d.some(keep_aspect_ratio_policy=d.choice(["stretch", "not_larger", "not_smaller"]))
        if attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch" and "axes" not in attributes:
            sizes = np.array([size * d.integer(1, 2) for size in shape], np.int64)
        if operator.version < 13:
            scales = np.zeros(0, np.float32)
    else:
        scales = np.array([factors[axis] for axis in axes], np.float32)
    inputs = d.trimmed([x, roi, scales, sizes])
    constants = frozenset(range(1, len(inputs))) if d.boolean() else frozenset()
    return NodeCase(inputs, attributes, constants=constants, **tolerance)


@builds("GridSample")
def grid_sample(d: Draws, operator: Operator) -> NodeCase:
    """At places in [-1, 1], and outside: x [N, C, *sizes], grid [N, *counts, axes]; two axes, or three from version 20 on."""
    dtype = d.dtype(operator, "T1")
    rank = d.choice([2, 3]) if operator.version >= 20 else 2
    names = ["bilinear", "nearest", "bicubic"] if operator.version < 20 else ["linear", "nearest", "cubic"]
    mode = d.choice([None, *(names if rank == 2 else names[:2])]) if interpolable(dtype) else names[1]
    attributes: dict[str, Any] = d.some(align_corners=d.integer(0, 1))
    if dtype == STRING or d.boolean():  # no text says which string is zero
        attributes["padding_mode"] = d.choice(["border", "reflection", *(["zeros"] if dtype != STRING else [])])
    attributes |= {"mode": mode} if mode else {}
    batch, sizes = d.integer(1, 2), tuple(d.integer(2, 4) for _ in range(rank))
    counts = tuple(d.integer(1, 3) for _ in range(rank))
    grid = (d.rng().integers(-9, 10, (batch, *counts, rank)) / 8 + 0.03).astype(d.dtype(operator, "T2"))
    x = image(d, dtype, (batch, d.integer(1, 2), *sizes))
    coarse = is_coarse(dtype) or is_coarse(grid.dtype)
    return NodeCase([x, grid], attributes, atol=0.15 if coarse else 1e-4)


@builds("AffineGrid")
def affine_grid(d: Draws, operator: Operator) -> NodeCase:
    """Places of a two- or three-dimensional grid, moved by a matrix: theta [N, 2, 3] or [N, 3, 4]."""
    dtype = d.dtype(operator, "T1")
    rank, batch = d.choice([2, 3]), d.integer(1, 2)
    theta = d.ordinary(dtype, (batch, rank, rank + 1), -1, 1)
    size = np.array([batch, d.integer(1, 2), *(d.integer(2, 4) for _ in range(rank))], np.int64)
    return NodeCase([theta, size], d.some(align_corners=d.integer(0, 1)), constants=d.constants(1), atol=0.05 if is_coarse(dtype) else 1e-5)


@builds("Col2Im")
def col_to_image(d: Draws, operator: Operator) -> NodeCase:
    """Columns of blocks added up to an image: columns [N, C · block, count] -> [N, C, *sizes]."""
    dtype = d.choice([dtype for dtype in operator.dtypes("T") if dtype.kind not in "OSb"])
    block = d.shape(1, 3, min_size=1, max_size=3)
    attributes: dict[str, Any] = d.some(
        strides=[d.integer(1, 2) for _ in block],
        dilations=[d.integer(1, 2) for _ in block],
        pads=[d.integer(0, 1) for _ in (*block, *block)],
    )
    rank = len(block)
    strides, dilations, pads = (
        attributes.get(name, [default] * count)
        for name, default, count in (("strides", 1, rank), ("dilations", 1, rank), ("pads", 0, 2 * rank))
    )
    sizes, count = [], 1
    for axis, width in enumerate(block):
        extent = (width - 1) * dilations[axis] + 1
        padding = pads[axis] + pads[axis + rank]
        size = max(1, extent - padding) + d.integer(0, 3)
        sizes.append(size)
        count *= (size + padding - extent) // strides[axis] + 1
    columns = image(d, dtype, (d.integer(1, 2), d.integer(1, 2) * int(np.prod(block)), count))
    return NodeCase([columns, np.array(sizes, np.int64), np.array(block, np.int64)], attributes, constants=d.constants(1, 2))
