"""Larger or smaller tensors around the same elements: Pad, CenterCropPad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import STRING, Array, DType
from miniort_cpu.axes import as_ints, normalize_axes
from miniort_cpu.buffers import Allocate

kernels = KernelTable("cpu")


def _zero(dtype: DType) -> Any:
    """What a tensor of a type is padded with unless told otherwise: 0, False, "", and of float8e8m0, which has no 0, the smallest."""
    return "" if dtype == STRING else np.zeros((), dtype)


def pad_constant(allocate: Allocate, x: Array, begins: Sequence[int], ends: Sequence[int], value: Any) -> Array:
    """`x` with so many elements of `value` before and after each axis; negative numbers cut elements off."""
    out = allocate([size + begin + end for size, begin, end in zip(x.shape, begins, ends, strict=True)], x.dtype)
    inside, kept = [], []
    for axis, (size, begin, end) in enumerate(zip(x.shape, begins, ends, strict=True)):
        first, last = max(begin, 0), max(out.shape[axis] - max(end, 0), max(begin, 0))
        slab = (slice(None),) * axis
        if first:
            out[(*slab, slice(first))] = value
        if last < out.shape[axis]:
            out[(*slab, slice(last, None))] = value
        inside.append(slice(first, last))
        kept.append(slice(max(-begin, 0), max(size - max(-end, 0), max(-begin, 0))))
    out[tuple(inside)] = x[tuple(kept)]
    return out


def _mirrored(at: Array, size: int) -> Array:
    """Positions reflected at the centers of the first and the last element, as often as it takes. at: [n] int."""
    period = max(2 * (size - 1), 1)
    folded = at % period
    return np.minimum(folded, period - folded) if size > 1 else np.zeros_like(at)


def _pad_from_itself(x: Array, begins: Sequence[int], ends: Sequence[int], mode: str) -> Array:
    """`x` with each axis continued by its own elements. Negative numbers cut elements off before anything is continued."""
    x = x[tuple(slice(max(-begin, 0), size - max(-end, 0)) for size, begin, end in zip(x.shape, begins, ends, strict=True))]
    for axis, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        size, before, after = x.shape[axis], max(begin, 0), max(end, 0)
        if not before and not after:
            continue
        if not size:
            raise ValueError(f"axis {axis} has no element that Pad's mode {mode!r} could continue it with")
        at = np.arange(-before, size + after)
        at = np.clip(at, 0, size - 1) if mode == "edge" else at % size if mode == "wrap" else _mirrored(at, size)
        x = x.take(at, axis)
    return x


@kernels.register("Pad", versions=(2, None))
def pad(node: NodeContext) -> Run:
    """`x` with elements added before and after its axes, or cut off where a number is negative.

    mode constant: the value given, or zero; edge: the nearest element; reflect: mirrored at the border elements; wrap: from the other end

    x: [...]; pads: [2 · axes] (all before, then all after; an attribute until version 2); axes: [axes] -> [size + before + after...]
    """
    mode = node.attribute("mode", "constant")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise KernelError(f"node {node.name!r} (Pad) has mode {mode!r}; known are constant, edge, reflect and wrap")
    allocate = node.provider.allocate

    def padded(x: Array, amounts: Sequence[int], value: Any, axes: Sequence[int] | None) -> Array:
        begins, ends = [0] * x.ndim, [0] * x.ndim
        places = normalize_axes(range(x.ndim) if axes is None else axes, x.ndim)
        for index, axis in enumerate(places):
            begins[axis], ends[axis] = amounts[index], amounts[index + len(places)]
        if mode == "constant":
            return pad_constant(allocate, x, begins, ends, value)
        y = _pad_from_itself(x, begins, ends, mode)
        return y.copy() if np.may_share_memory(y, x) else y

    if node.version < 11:
        pads, fill = node.attribute("pads"), node.attribute("value", 0.0)
        return lambda x: padded(x, pads, fill, None)

    def run(x: Array, pads: Array, value: Array | None = None, axes: Array | None = None) -> Array:
        filler = _zero(x.dtype) if value is None or not value.size else value.reshape(-1)[0]
        return padded(x, pads.ravel().tolist(), filler, as_ints(axes))

    return run


@kernels.register("CenterCropPad", versions=(18, None))
def center_crop_pad(node: NodeContext) -> Run:
    """`x` cut or padded with zeros to a shape, its center kept; an odd element is cut, or added, at the end.

    x: [...]; shape: [axes] -> x's shape with these sizes in its place
    """
    chosen = node.attribute("axes", None)
    allocate = node.provider.allocate

    def run(x: Array, shape: Array) -> Array:
        begins, ends = [0] * x.ndim, [0] * x.ndim
        for axis, size in zip(normalize_axes(range(x.ndim) if chosen is None else chosen, x.ndim), shape.tolist(), strict=True):
            more = size - x.shape[axis]
            begins[axis] = more // 2 if more >= 0 else -(-more // 2)
            ends[axis] = more - begins[axis]
        return pad_constant(allocate, x, begins, ends, _zero(x.dtype))

    return run
