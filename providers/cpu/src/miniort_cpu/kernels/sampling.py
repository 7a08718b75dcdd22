"""Images sampled at places that lie between their elements: GridSample, AffineGrid, DeformConv."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import STRING, Array
from miniort.windows import sliding_window
from miniort_cpu.floating_point import FLOAT32, FLOAT64, as_dtype, compute_dtype, widen
from miniort_cpu.integers import is_integer
from miniort_cpu.kernels.convolution import add_bias
from miniort_cpu.kernels.matrix import widened_constant
from miniort_cpu.kernels.resize import cubic_weight

kernels = KernelTable("cpu")

GRID_CUBIC = -0.75
"""GridSample's coefficient `a` of cubic interpolation, which the op fixes."""


def _reflected(at: Array, low: float, high: float) -> Array:
    """Places folded back at both borders as often as it takes to lie between them. at: [...] -> same shape."""
    width = high - low
    if width <= 0:
        return np.full_like(at, low)
    folded = np.mod(at - low, 2 * width)
    return np.minimum(folded, 2 * width - folded) + low


def sample(source: Array, places: Sequence[Array], mode: str, padding: str, borders: Sequence[tuple[float, float]]) -> Array:
    """Elements at places, an element's index being its center.

    padding says what lies outside: `zeros`, the nearest element (`border`), or the image mirrored at its borders (`reflection`).

    source: [C, *sizes]; places: an array [P] per spatial axis, float; borders: (low, high) per axis -> [C, P]
    """
    channels, *sizes = source.shape
    flat = source.reshape(channels, -1)
    axes: list[list[tuple[Array, Array | None, Array]]] = []  # per axis and neighbour: index, weight, whether it's inside
    for axis, (size, place) in enumerate(zip(sizes, places, strict=True)):
        axes.append([_neighbour(index, weight, size, padding, borders[axis]) for index, weight in _around(place, mode)])
    total: Array | None = None
    for chosen in product(*axes):
        index: Array = np.zeros(places[0].shape, np.int64)
        weight: Array | None = None
        inside: Array = np.ones(places[0].shape, np.bool_)
        for (at, part, within), size in zip(chosen, sizes, strict=True):
            index = index * size + at
            inside = inside & within
            weight = part if weight is None else weight if part is None else weight * part
        values = flat.take(index, 1)
        if not inside.all():
            values[:, ~inside] = "" if source.dtype == STRING else 0
        if weight is not None:
            np.multiply(values, as_dtype(weight, values.real.dtype), out=values)
        if total is None:
            total = values
        else:
            np.add(total, values, out=total)
    assert total is not None
    return total


def _around(place: Array, mode: str) -> list[tuple[Array, Array | None]]:
    """The elements that make up a place on one axis, with their weights: one, two or four of them."""
    if mode == "nearest":
        return [(np.rint(place), None)]
    base = np.floor(place)
    rest = place - base
    if mode == "linear":
        return [(base, 1 - rest), (base + 1, rest)]
    return [(base + step, cubic_weight(rest - step, GRID_CUBIC)) for step in (-1, 0, 1, 2)]


def _neighbour(at: Array, weight: Array | None, size: int, padding: str, border: tuple[float, float]) -> tuple[Array, Array | None, Array]:
    inside = (at >= 0) & (at <= size - 1)
    if padding == "reflection":
        at, inside = _reflected(at, *border), np.ones(at.shape, np.bool_)
    elif padding == "border":
        inside = np.ones(at.shape, np.bool_)
    return np.clip(at, 0, size - 1).astype(np.int64), weight, inside


@kernels.register("GridSample", versions=(16, None))
def grid_sample(node: NodeContext) -> Run:
    """`x` sampled where a grid says (Jaderberg et al. 2015, arXiv:1506.02025).

    A grid's coordinates are in [-1, 1], the innermost axis' first; -1 and 1 are the outer edges of the border elements, and with
    `align_corners` their centers.

    x: [N, C, *sizes]; grid: [N, *output sizes, rank] -> [N, C, *output sizes]
    """
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(node.attribute("mode", "linear"), node.attribute("mode", "linear"))
    padding, corners = node.attribute("padding_mode", "zeros"), bool(node.attribute("align_corners", 0))
    if mode not in ("nearest", "linear", "cubic"):
        raise KernelError(f"node {node.name!r} (GridSample) has mode {mode!r}; known are nearest, linear and cubic")
    if padding not in ("zeros", "border", "reflection"):
        raise KernelError(f"node {node.name!r} (GridSample) has padding_mode {padding!r}; known are zeros, border and reflection")
    allocate = node.provider.allocate

    def run(x: Array, grid: Array) -> Array:
        if x.dtype == STRING and mode != "nearest":
            raise TypeError(f"GridSample can't interpolate text in mode {mode!r}; use nearest")
        batch, channels, *sizes = x.shape
        outputs = grid.shape[1:-1]
        y: Array = allocate((batch, channels, *outputs), x.dtype)
        if not y.size:
            return y
        wide, coordinates = x, widen(grid)
        if mode != "nearest":
            wide = as_dtype(x, FLOAT64 if is_integer(x.dtype) else FLOAT32 if x.dtype.kind == "b" else compute_dtype(x.dtype))
        borders = [(0.0, size - 1.0) if corners else (-0.5, size - 0.5) for size in sizes]
        for image in range(batch):
            places = []
            for axis, size in enumerate(sizes):
                at = coordinates[image, ..., len(sizes) - 1 - axis].reshape(-1)
                at = (at + 1) / 2 * (size - 1) if corners else ((at + 1) * size - 1) / 2
                if mode == "nearest":
                    at = np.rint(at)
                if padding != "zeros":  # what is out of bounds is moved first; only neighbours of what isn't may still be outside
                    low, high = borders[axis]
                    moved = np.clip(at, 0, size - 1) if padding == "border" else _reflected(at, low, high)
                    at = np.where((at < low) | (at > high), moved, at)
                places.append(at)
            y[image] = as_dtype(sample(wide[image], places, mode, padding, borders), x.dtype).reshape(channels, *outputs)
        return y

    return run


@kernels.register("AffineGrid", versions=(20, None))
def affine_grid(node: NodeContext) -> Run:
    """A grid for GridSample: theta applied to each place (x, y, [z,] 1) of an image of a size.

    On an axis with one element, `align_corners` can't tell -1 from 1, and its coordinate is 0.

    theta: [N, r, r + 1]; size: [r + 2] int64, N, C, *sizes -> [N, *sizes, r]
    """
    corners = bool(node.attribute("align_corners", 0))

    def run(theta: Array, size: Array) -> Array:
        wide = widen(theta)
        sizes: list[int] = size.tolist()[2:]
        axes = []
        for count in sizes:
            step = np.arange(count)
            at = (2 * step + 1) / count - 1 if not corners else step * 2 / (count - 1) - 1 if count > 1 else step * 0.0
            axes.append(at.astype(wide.dtype))
        places = np.meshgrid(*axes, indexing="ij")
        points = np.stack([*(each.reshape(-1) for each in reversed(places)), np.ones(prod(sizes), wide.dtype)])
        grid = np.matmul(points.T, wide.swapaxes(1, 2))
        return as_dtype(grid.reshape(len(theta), *sizes, len(sizes)), theta.dtype)

    return run


@kernels.register("DeformConv", versions=(19, None))
def deform_conv(node: NodeContext) -> Run:
    """A convolution whose kernel's elements each look at a place of their own (Dai et al. 2017, arXiv:1703.06211; mask: 1811.11168).

    x: [N, C, *sizes]; w: [M, C / group, *kernel]; offset: [N, offset_group · Π kernel · rank, *counts];
    mask: [N, offset_group · Π kernel, *counts]; bias: [M] -> [N, M, *counts]
    """
    groups, offset_groups = node.attribute("group", 1), node.attribute("offset_group", 1)
    weights = widened_constant(node, 1)
    allocate = node.provider.allocate

    def run(x: Array, w: Array, offset: Array, bias: Array | None = None, mask: Array | None = None) -> Array:
        wide, wide_w, wide_offset = widen(x), widen(w) if weights is None else weights, widen(offset)
        window = sliding_window(node, w.shape[2:])
        batch, channels, *sizes = x.shape
        counts, rank, taps = offset.shape[2:], len(sizes), prod(window.kernel)
        y = allocate((batch, w.shape[0], *counts), wide.dtype)
        if not y.size:
            return as_dtype(y, x.dtype)
        shifts = wide_offset.reshape(batch, offset_groups, taps, rank, *counts)
        taken = np.stack(
            np.meshgrid(*(np.arange(size) * gap for size, gap in zip(window.kernel, window.dilations, strict=True)), indexing="ij")
        )
        start = np.stack(
            np.meshgrid(
                *(np.arange(n) * step - begin for n, step, begin in zip(counts, window.strides, window.begins, strict=True)), indexing="ij"
            )
        )
        fixed = taken.reshape(rank, taps, *(1,) * rank) + start.reshape(rank, 1, *counts)  # [rank, taps, *counts]
        per_group = channels // offset_groups
        columns = allocate((channels, taps, *counts), wide.dtype)
        kernel = wide_w.reshape(groups, -1, channels // groups * taps)
        for image in range(batch):
            for part in range(offset_groups):
                places = [(fixed[axis] + shifts[image, part, :, axis]).reshape(-1) for axis in range(rank)]
                seen = slice(part * per_group, (part + 1) * per_group)
                values = sample(wide[image, seen], places, "linear", "zeros", [(0.0, 0.0)] * rank).reshape(per_group, taps, *counts)
                if mask is not None:
                    values *= widen(mask)[image].reshape(offset_groups, taps, *counts)[part]
                columns[seen] = values
            np.matmul(kernel, columns.reshape(groups, channels // groups * taps, -1), y[image].reshape(groups, w.shape[0] // groups, -1))
        if bias is not None:
            add_bias(y, widen(bias))
        return as_dtype(y, x.dtype)

    return run
