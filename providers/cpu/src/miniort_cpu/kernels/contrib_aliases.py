"""Ops of com.microsoft that the default domain has, or has since: under this name they take no attribute or type more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import normalize_axis
from miniort_cpu.kernels.contrib_activation import CONTRIB
from miniort_cpu.kernels.filtering import unique
from miniort_cpu.kernels.generation import range_
from miniort_cpu.kernels.indexing import gather_nd
from miniort_cpu.kernels.padding import pad
from miniort_cpu.kernels.selection import trilu

kernels = KernelTable("cpu")

kernels.register("Trilu", domain=CONTRIB)(trilu)
kernels.register("GatherND", domain=CONTRIB, view_of=0)(gather_nd)


@kernels.register("Pad", domain=CONTRIB)
def contrib_pad(node: NodeContext) -> Run:
    """Pad with its pads in an input. x: [...]; pads: [2 · rank] or [1, 2 · rank]; value: [] or [1] -> [size + before + after...]."""
    return pad(replace(node, version=11))


@kernels.register("Unique", domain=CONTRIB)
def contrib_unique(node: NodeContext) -> Run:
    """The different elements as they come first. x: [N] -> values [U], number of each of x's in the values [N], counts [U]."""
    find = unique(replace(node, attributes={"sorted": 0}))

    def run(x: Array) -> tuple[Array, Array, Array]:
        values, _, inverse, counts = find(x)
        return values, inverse, counts

    return run


@kernels.register("ExpandDims", domain=CONTRIB, view_of=0)
def expand_dims(node: NodeContext) -> Run:
    """`x` with a new axis of size 1 at a place counted in the result. x: [...]; axis: [] int32 -> [..., 1, ...]."""

    def run(x: Array, axis: Array) -> Array:
        place = normalize_axis(int(axis.reshape(-1)[0]), x.ndim + 1)
        return x.reshape(*x.shape[:place], 1, *x.shape[place:])

    return run


@kernels.register("Range", domain=CONTRIB)
def contrib_range(node: NodeContext) -> Run:
    """Range whose step may be absent, which is 1. start, limit, delta: [] or [1] -> [max(ceil((limit - start) / delta), 0)]."""
    count = range_(node)

    def run(start: Array, limit: Array, delta: Array | None = None) -> Array:
        return count(start, limit, np.ones((), start.dtype) if delta is None else delta)  # type: ignore[no-any-return]

    return run
