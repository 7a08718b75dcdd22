"""Elements picked and put by index: GatherElements, GatherND, ScatterElements, ScatterND. Indices are device arrays, and not checked."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort_cuda.element_types import ALL
from miniort_cuda.namespace import CONTRIB, array_namespace

kernels = KernelTable("cuda")


@kernels.register("GatherElements", (11, None), types={"T": ALL})
def gather_elements(node: NodeContext) -> Run:
    """The element at `indices` along `axis`, at the index's own place on the other axes. x: any shape; indices: same rank -> as these."""
    xp, axis = array_namespace(node), node.attribute("axis", 0)

    def run(x: Any, indices: Any) -> Any:
        return x[_along(xp, indices, axis % x.ndim, x.shape[axis])]

    return run


def _along(xp: Any, indices: Any, axis: int, size: int) -> tuple[Any, ...]:
    """An index that has `indices` on `axis` and, on the others, each element's own place."""
    places: list[Any] = [
        xp.arange(length).reshape((-1,) + (1,) * (indices.ndim - 1 - position)) for position, length in enumerate(indices.shape)
    ]
    places[axis] = xp.where(indices < 0, indices + size, indices)
    return tuple(places)


@kernels.register("GatherND", (11, None), types={"T": ALL})
@kernels.register("GatherND", domain=CONTRIB, types={0: ALL})
def gather_nd(node: NodeContext) -> Run:
    """Slices of x at the tuples that `indices` has in its last axis.

    x: [B..., sizes of the tuple's axes..., rest...]; indices: [B..., I..., k] -> [B..., I..., rest...]; B are `batch_dims` axes.
    """
    xp, batched = array_namespace(node), node.attribute("batch_dims", 0)

    def run(x: Any, indices: Any) -> Any:
        batch, width = x.shape[:batched], indices.shape[-1]
        sizes, rest = x.shape[batched : batched + width], x.shape[batched + width :]
        flat = x.reshape((prod(batch), prod(sizes), *rest))
        places = flattened(indices, sizes).reshape((prod(batch), -1))
        rows = xp.arange(prod(batch)).reshape(-1, 1)
        return flat[rows, places].reshape((*batch, *indices.shape[batched:-1], *rest))

    return run


def flattened(indices: Any, sizes: tuple[int, ...]) -> Any:
    """Tuples of indices as one index into the flattened axes. indices: [..., k]; sizes: [k] -> [...]."""
    place: Any = 0
    for position, size in enumerate(sizes):
        index = indices[..., position]
        place = place * size + index % size  # a negative index counts from the end
    return place


def _refuse_reduction(node: NodeView) -> str | None:
    kind = node.attribute("reduction", "none")
    return None if kind == "none" else f"its kernel has no reduction {kind!r}: several updates of one element would have to take turns"


@kernels.register("ScatterND", (11, None), types={"T": ALL}, refuse=_refuse_reduction)
def scatter_nd(node: NodeContext) -> Run:
    """`x` with slices at the tuples of `indices` replaced. x: [sizes of the tuple's axes..., rest...]; indices: [I..., k];

    updates: [I..., rest...] -> x's shape
    """

    def run(x: Any, indices: Any, updates: Any) -> Any:
        width = indices.shape[-1]
        sizes, rest = x.shape[:width], x.shape[width:]
        out = x.copy().reshape((prod(sizes), *rest))
        out[flattened(indices, sizes).reshape(-1)] = updates.reshape((-1, *rest)) if updates.size else updates.reshape((0, *rest))
        return out.reshape(x.shape)

    return run


@kernels.register("ScatterElements", (11, None), types={"T": ALL}, refuse=_refuse_reduction)
def scatter_elements(node: NodeContext) -> Run:
    """`x` with elements at `indices` along `axis` replaced. x: any shape; indices, updates: same rank -> x's shape."""
    xp, axis = array_namespace(node), node.attribute("axis", 0)

    def run(x: Any, indices: Any, updates: Any) -> Any:
        out = x.copy()
        out[_along(xp, indices, axis % x.ndim, x.shape[axis])] = updates
        return out

    return run


@kernels.register("OneHot", (9, None), types={"T1": frozenset({np.dtype(np.int64), np.dtype(np.int32)}), "T3": ALL}, host_inputs=(1,))
def one_hot(node: NodeContext) -> Run:
    """`on` where an axis' position is the index, else `off`. indices: [I...]; depth: []; values: [off, on] -> [I..., depth] at `axis`."""
    xp, axis = array_namespace(node), node.attribute("axis", -1)

    def run(indices: Any, depth: Any, values: Any) -> Any:
        size = int(depth.reshape(-1)[0])
        place = axis % (indices.ndim + 1)
        shape = (size,) + (1,) * (indices.ndim - place)
        index = xp.expand_dims(xp.where(indices < 0, indices + size, indices), place)
        return xp.where(xp.arange(size).reshape(shape) == index, values[1], values[0])

    return run
