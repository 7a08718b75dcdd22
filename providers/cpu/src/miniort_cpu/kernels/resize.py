"""Resize and Upsample: nearest, linear and cubic interpolation, one axis at a time.

Each output of an axis is a weighted sum of a few inputs, at places and with weights that depend on the sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import STRING, Array, DType
from miniort_cpu.axes import normalize_axes
from miniort_cpu.buffers import Allocate, copied
from miniort_cpu.floating_point import FLOAT32, FLOAT64, as_dtype, compute_dtype
from miniort_cpu.integers import is_integer

kernels = KernelTable("cpu")


@dataclass(frozen=True)
class Interpolation:
    """How to interpolate: the attributes of Resize that aren't about the output's shape."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_coefficient: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation_value: float = 0.0


@dataclass(frozen=True)
class AxisScale:
    """One axis to resize: its size, the output's, and the output's size before it was rounded down (size · scale).

    start, end: of the part of the axis to resize, as parts of its length; only `tf_crop_and_resize` looks at it.
    """

    size: int
    output: int
    exact_output: float
    start: float = 0.0
    end: float = 1.0

    @property
    def is_identity(self) -> bool:
        return self.size == self.output == self.exact_output and (self.start, self.end) == (0.0, 1.0)

    @property
    def is_up(self) -> bool:
        return self.exact_output >= self.size


def _source(axis: AxisScale, coordinates: str) -> Array:
    """Where each output lies among the inputs, an input's index being its center. -> [output] float64, from the op's own equations."""
    at = np.arange(axis.output, dtype=FLOAT64)
    if coordinates == "align_corners":
        return np.asarray(at * (axis.size - 1) / (axis.exact_output - 1) if axis.output > 1 else at * 0)
    if coordinates == "asymmetric":
        return at * axis.size / axis.exact_output
    if coordinates == "tf_half_pixel_for_nn":  # of version 11 only
        return (at + 0.5) * axis.size / axis.exact_output
    if coordinates == "tf_crop_and_resize":
        last = axis.size - 1
        if axis.output > 1:
            return axis.start * last + at * (axis.end - axis.start) * last / (axis.exact_output - 1)
        return 0.5 * (axis.start + axis.end) * last + at * 0
    if coordinates == "pytorch_half_pixel" and axis.output <= 1:
        return at * 0
    centered: Array = (at + 0.5) * axis.size / axis.exact_output - 0.5
    if coordinates == "half_pixel_symmetric":
        return centered + axis.size / 2 * (1 - axis.output / axis.exact_output)
    if coordinates in ("half_pixel", "pytorch_half_pixel"):
        return centered
    raise ValueError(f"Resize's coordinate_transformation_mode {coordinates!r} is none that the op defines")


def _nearest(source: Array, mode: str) -> Array:
    """The index of the nearest input. source: [n] -> [n] int64, not yet clipped to the axis."""
    if mode == "round_prefer_floor":
        return np.ceil(source - 0.5).astype(np.int64)
    if mode == "round_prefer_ceil":
        return np.floor(source + 0.5).astype(np.int64)
    if mode == "floor":
        return np.floor(source).astype(np.int64)
    if mode == "ceil":
        return np.ceil(source).astype(np.int64)
    raise ValueError(f"Resize's nearest_mode {mode!r} is none that the op defines")


def _triangle(distance: Array) -> Array:
    """The weight of an input at a distance from the output, for linear interpolation."""
    return np.maximum(1 - np.abs(distance), 0)  # type: ignore[no-any-return]


def cubic_weight(distance: Array, a: float) -> Array:
    """The weight of an input at a distance from the output, for cubic interpolation (Keys 1981, equation 4)."""
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


@lru_cache(maxsize=256)
def _neighbours(axis: AxisScale, how: Interpolation) -> tuple[Array, Array | None, Array | None]:
    """What makes up each output of an axis.

    -> indices of inputs [n, output] int64; their weights [n, output] float64, None for the nearest alone; which outputs lie outside of the
       input and take the extrapolation value [output] bool, or None
    """
    source = _source(axis, how.coordinates)
    outside = (source < 0) | (source > axis.size - 1) if how.coordinates == "tf_crop_and_resize" else None
    if outside is not None and not outside.any():
        outside = None
    if how.mode == "nearest":
        if how.coordinates == "tf_crop_and_resize":
            source = source.astype(FLOAT32)  # a region's corners are float32 numbers: what they say of a half, they say in its precision
        rounding = how.nearest
        if rounding == "before_opset_11":
            rounding = "floor" if axis.is_up else "ceil"
        return np.clip(_nearest(source, rounding), 0, axis.size - 1)[None], None, outside
    reach = 1 if how.mode == "linear" else 2
    stretch = min(axis.exact_output / axis.size, 1.0) if how.antialias else 1.0
    first = floor(-reach / stretch) + 1
    base = np.ceil(source).astype(np.int64) - 1
    at = base + np.arange(first, 2 - first)[:, None]
    distance = (at - source) * stretch
    weights = _triangle(distance) if how.mode == "linear" else cubic_weight(distance, how.cubic_coefficient)
    if how.exclude_outside:
        weights = np.where((at < 0) | (at >= axis.size), 0, weights)
    if how.exclude_outside or how.antialias:
        weights = weights / weights.sum(axis=0)
    return np.clip(at, 0, axis.size - 1), weights, outside


def _repeats(indices: Array, size: int) -> int:
    """How often each input is repeated, if each is as often as the others and in order; else 0. indices: [output]."""
    times = len(indices) // size if size else 0
    return times if times * size == len(indices) and np.array_equal(indices, np.arange(len(indices)) // max(times, 1)) else 0


def resize(allocate: Allocate, x: Array, axes: Sequence[AxisScale], how: Interpolation) -> Array:
    """`x` with its axes resized. x: [...], an AxisScale for each -> [output...], same dtype; integers are rounded and saturate."""
    changed = [axis for axis, scale in enumerate(axes) if not scale.is_identity]
    if not all(scale.output for scale in axes):
        return allocate([scale.output for scale in axes], x.dtype)
    if how.mode == "nearest":
        y = _resize_nearest(allocate, x, axes, changed, how)
    else:
        if x.dtype == STRING:
            raise TypeError(f"Resize can't interpolate text in mode {how.mode!r}; use nearest")
        # Integers and booleans are interpolated in float: in float64 where float32 can't hold them.
        dtype = FLOAT32 if x.dtype.kind == "b" or (is_integer(x.dtype) and x.dtype.itemsize <= 2) else x.dtype
        dtype = FLOAT64 if is_integer(dtype) else compute_dtype(dtype)
        y = as_dtype(x, dtype)
        # What makes an axis shorter first, so that the others have less to do.
        for axis in sorted(changed, key=lambda axis: axes[axis].exact_output / axes[axis].size):
            y = _interpolate(allocate, y, axis, axes[axis], how)
        y = _rounded(y, x.dtype)
    return copied(allocate, y) if np.may_share_memory(y, x) else y


def _resize_nearest(allocate: Allocate, x: Array, axes: Sequence[AxisScale], changed: Sequence[int], how: Interpolation) -> Array:
    found = {axis: _neighbours(axes[axis], how) for axis in changed}
    times = [_repeats(found[axis][0][0], x.shape[axis]) if axis in found else 1 for axis in range(x.ndim)]
    if all(times) and all(outside is None for _, _, outside in found.values()):
        y = allocate([scale.output for scale in axes], x.dtype)
        parts = [part for size, repeat in zip(x.shape, times, strict=True) for part in ((size, repeat) if repeat > 1 else (size,))]
        places = tuple(part for repeat in times for part in ((slice(None), None) if repeat > 1 else (slice(None),)))
        y.reshape(parts)[...] = x[places]
        return y
    for axis in sorted(changed, key=lambda axis: axes[axis].exact_output / axes[axis].size):
        indices, _, outside = found[axis]
        x = x.take(indices[0], axis)
        if outside is not None:
            x[(slice(None),) * axis + (outside,)] = how.extrapolation_value
    return x


def _interpolate(allocate: Allocate, x: Array, axis: int, scale: AxisScale, how: Interpolation) -> Array:
    """Each output of one axis: Σ weight · input. x: [..., size, ...] -> [..., output, ...]."""
    indices, weights, outside = _neighbours(scale, how)
    assert weights is not None
    shape = [*x.shape[:axis], scale.output, *x.shape[axis + 1 :]]
    total = allocate(shape, x.dtype)
    term = allocate(shape, x.dtype)
    for place, (index, weight) in enumerate(zip(indices, weights, strict=True)):
        factor = weight.astype(x.real.dtype).reshape(-1, *(1,) * (x.ndim - axis - 1))
        out = term if place else total
        np.take(x, index, axis, out=out, mode="clip")
        np.multiply(out, factor, out=out)
        if place:
            np.add(total, term, out=total)
    if outside is not None:
        total[(slice(None),) * axis + (outside,)] = how.extrapolation_value
    return total


def _rounded(y: Array, dtype: DType) -> Array:
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        return np.clip(np.rint(y), limits.min, limits.max).astype(dtype)
    return as_dtype(y, dtype)


def _scaled_axis(size: int, scale: float, start: float = 0.0, end: float = 1.0) -> AxisScale:
    """An axis that is scaled by a float32 number: the output's size is rounded down, where float32 arithmetic has it.

    A scale that is the float32 nearest to output / size stands for that ratio itself.
    """
    output = int(np.floor(np.float32(size) * np.float32(end - start) * np.float32(scale)))
    means_ratio = size and np.float32(output / size) == np.float32(scale)
    return AxisScale(size, output, float(output) if means_ratio else size * float(scale), start, end)


def _sized_axes(shape: Sequence[int], places: Sequence[int], sizes: Sequence[int], policy: str, roi: Sequence[float]) -> list[AxisScale]:
    """Axes whose output sizes are given, all with the same scale unless the policy is stretch."""
    axes = [AxisScale(size, size, float(size)) for size in shape]
    count = len(places)
    common: tuple[int, int] | None = None  # (output, size) of the axis that decides
    if policy != "stretch":
        ratios = [(output / shape[axis], output, shape[axis]) for axis, output in zip(places, sizes, strict=True)]
        common = (min(ratios) if policy == "not_larger" else max(ratios))[1:]
    for index, axis in enumerate(places):
        size, output = shape[axis], sizes[index]
        exact = float(output)
        if common is not None:
            exact = size * common[0] / common[1]
            output = int(exact + 0.5)
        axes[axis] = AxisScale(size, output, exact, *((roi[index], roi[index + count]) if roi else (0.0, 1.0)))
    return axes


@kernels.register("Resize", versions=(11, None))
def resize_op(node: NodeContext) -> Run:
    """`x` with its axes, or those of `axes`, resized to `sizes`, or by `scales`.

    x: [...]; roi: [2 · axes] (starts, then ends), scales: [axes] float32, sizes: [axes] int64; one of scales and sizes -> [output...]
    """
    how = Interpolation(
        node.attribute("mode", "nearest"),
        node.attribute("coordinate_transformation_mode", "half_pixel"),
        node.attribute("nearest_mode", "round_prefer_floor"),
        node.attribute("cubic_coeff_a", -0.75),
        bool(node.attribute("exclude_outside", 0)),
        bool(node.attribute("antialias", 0)),
        node.attribute("extrapolation_value", 0.0),
    )
    if how.mode not in ("nearest", "linear", "cubic"):
        raise KernelError(f"node {node.name!r} (Resize) has mode {how.mode!r}; known are nearest, linear and cubic")
    chosen, policy = node.attribute("axes", None), node.attribute("keep_aspect_ratio_policy", "stretch")
    crops = how.coordinates == "tf_crop_and_resize"
    allocate = node.provider.allocate

    def run(x: Array, roi: Array | None = None, scales: Array | None = None, sizes: Array | None = None) -> Array:
        places = normalize_axes(range(x.ndim) if chosen is None else chosen, x.ndim)
        part: list[float] = roi.astype(FLOAT64).tolist() if crops and roi is not None else []
        if sizes is not None and sizes.size:
            return resize(allocate, x, _sized_axes(x.shape, places, sizes.tolist(), policy, part), how)
        if scales is None or not scales.size:
            raise ValueError("Resize needs one of its inputs scales and sizes, and found neither")
        axes = [AxisScale(size, size, float(size)) for size in x.shape]
        for index, (axis, scale) in enumerate(zip(places, scales.tolist(), strict=True)):
            axes[axis] = _scaled_axis(x.shape[axis], scale, *((part[index], part[index + len(places)]) if part else (0.0, 1.0)))
        return resize(allocate, x, axes, how)

    return run


@kernels.register("Resize", versions=(10, 10))
@kernels.register("Upsample", versions=(7, None))
def upsample(node: NodeContext) -> Run:
    """`x` with its axes scaled. x: [...]; scales: [rank] (an attribute until version 7) -> [floor(size · scale)...].

    Output i lies at input i / scale, and the nearest input is the one before that, or the one after it where an axis shrinks: these
    versions' texts don't say, but the ONNX project's test data of their time do, and onnxruntime.
    """
    mode = node.attribute("mode", "nearest")
    how = Interpolation("linear" if mode in ("linear", "bilinear") else mode, "asymmetric", "before_opset_11")
    if how.mode not in ("nearest", "linear"):
        raise KernelError(f"node {node.name!r} ({node.op}) has mode {mode!r}; known are nearest and linear")
    fixed = node.attribute("scales", None)
    allocate = node.provider.allocate

    def run(x: Array, scales: Array | None = None) -> Array:
        factors: Sequence[float] = scales.tolist() if scales is not None else fixed
        return resize(allocate, x, [_scaled_axis(size, scale) for size, scale in zip(x.shape, factors, strict=True)], how)

    return run
