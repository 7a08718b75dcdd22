"""Resize and Upsample by nearest and linear interpolation, one axis at a time.

Where each output lies, and with which weights, depends on sizes alone: that is computed on the device, and kept for each pair of sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from typing import Any

import numpy as np

from miniort.errors import InputError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_cuda.element_types import BYTES, FLOATS, compute_dtype
from miniort_cuda.namespace import array_namespace

kernels = KernelTable("cuda")

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn")
KEPT_SIZES = 64


def _refuse(node: NodeView) -> str | None:
    mode, coordinates = node.attribute("mode", "nearest"), node.attribute("coordinate_transformation_mode", "half_pixel")
    if mode not in ("nearest", "linear"):
        return f"its kernel has the modes nearest and linear, the node has {mode!r}"
    if coordinates not in COORDINATES:
        return f"its kernel has no coordinate_transformation_mode {coordinates!r}"
    for name, usual in (("antialias", 0), ("exclude_outside", 0), ("keep_aspect_ratio_policy", "stretch"), ("axes", None)):
        if node.attribute(name, usual) != usual:
            return f"its kernel has no {name}"
    return None


@dataclass(frozen=True)
class _Axis:
    """One axis: its size, the output's, and output per input element."""

    size: int
    output: int
    scale: float


def _source(xp: Any, axis: _Axis, coordinates: str) -> Any:
    """Where each output lies among the inputs, by the op's equations. -> [output] float64."""
    at = xp.arange(axis.output).astype(np.float64)
    if coordinates == "align_corners":
        return at * ((axis.size - 1) / (axis.size * axis.scale - 1)) if axis.output > 1 else at * 0
    if coordinates == "asymmetric":
        return at / axis.scale
    if coordinates == "tf_half_pixel_for_nn":
        return (at + 0.5) / axis.scale
    if coordinates == "pytorch_half_pixel" and axis.output <= 1:
        return at * 0
    centred = (at + 0.5) / axis.scale - 0.5
    if coordinates == "half_pixel_symmetric":
        return centred + axis.size / 2 * (1 - axis.output / (axis.size * axis.scale))
    return centred


BEFORE_OPSET_11 = "before_opset_11"
"""How the nearest input was found then: the one before, or where an axis shrinks the one behind."""


def _nearest(xp: Any, source: Any, rounding: str) -> Any:
    if rounding == "round_prefer_floor":
        return xp.ceil(source - 0.5)
    if rounding == "round_prefer_ceil":
        return xp.floor(source + 0.5)
    return xp.floor(source) if rounding == "floor" else xp.ceil(source)


def _axes(shape: Sequence[int], sizes: Array | None, scales: Array | None) -> list[_Axis]:
    if sizes is not None and sizes.size:
        return [_Axis(size, int(output), int(output) / size if size else 1.0) for size, output in zip(shape, sizes.tolist(), strict=True)]
    if scales is None or scales.size != len(shape):
        raise InputError(f"Resize needs a size or a scale for each of the {len(shape)} axes")
    return [_Axis(size, floor(size * scale), float(scale)) for size, scale in zip(shape, scales.tolist(), strict=True)]


def _compile(node: NodeContext, coordinates: str, rounding: str) -> Any:
    """f(x, axes) -> x with its axes resized. x: [...], an _Axis for each -> [output...], same dtype."""
    xp, mode = array_namespace(node), node.attribute("mode", "nearest")

    @lru_cache(maxsize=KEPT_SIZES)
    def neighbours(axis: _Axis) -> tuple[Any, Any, Any]:
        """The inputs before and after each output, and the share of the latter: [output] int64, int64, float64."""
        source = _source(xp, axis, coordinates)
        chosen = ("floor" if axis.scale >= 1 else "ceil") if rounding == BEFORE_OPSET_11 else rounding
        first = _nearest(xp, source, chosen) if mode == "nearest" else xp.floor(source)
        low, high = (xp.clip(place, 0, axis.size - 1).astype(np.int64) for place in (first, first + 1))
        return low, high, source - first

    def resized(x: Any, axes: Sequence[_Axis]) -> Any:
        y = x
        for place, axis in enumerate(axes):
            if axis.size == axis.output and axis.scale == 1:
                continue
            low, high, share = neighbours(axis)
            if mode == "nearest":
                y = xp.take(y, low, axis=place)
                continue
            wide = y.astype(compute_dtype(y.dtype), copy=False) if y.dtype.kind == "f" else y.astype(np.float32)
            weight = share.astype(wide.dtype).reshape((-1,) + (1,) * (x.ndim - 1 - place))
            y = xp.take(wide, low, axis=place) * (1 - weight) + xp.take(wide, high, axis=place) * weight
        if y is x:
            return x.copy()
        return y.astype(x.dtype, copy=False) if x.dtype.kind == "f" else xp.rint(y).astype(x.dtype)

    return resized


@kernels.register("Resize", (11, None), types={"T1": FLOATS | BYTES}, host_inputs=(1, 2, 3), refuse=_refuse)
def resize(node: NodeContext) -> Run:
    """`x` scaled to `sizes`, or by `scales`, which stand for each axis. x: [...] -> [size...]."""
    coordinates = node.attribute("coordinate_transformation_mode", "half_pixel")
    resized = _compile(node, coordinates, node.attribute("nearest_mode", "round_prefer_floor"))

    def run(x: Any, roi: Array | None = None, scales: Array | None = None, sizes: Array | None = None) -> Any:
        return resized(x, _axes(x.shape, sizes, scales))

    return run


@kernels.register("Resize", (10, 10), types={"T": FLOATS | BYTES}, host_inputs=(1,), refuse=_refuse)
@kernels.register("Upsample", (9, 10), types={"T": FLOATS | BYTES}, host_inputs=(1,), refuse=_refuse)
def upsample(node: NodeContext) -> Run:
    """`x` scaled by `scales`, one for each axis, from its first element on. x: [...] -> [⌊size · scale⌋...]."""
    resized = _compile(node, "asymmetric", BEFORE_OPSET_11)
    return lambda x, scales: resized(x, _axes(x.shape, None, scales))
