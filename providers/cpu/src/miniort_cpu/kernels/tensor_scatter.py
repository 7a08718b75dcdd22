"""Writing new elements into a buffer at a place of each row's own: TensorScatter."""

from __future__ import annotations

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import normalize_axis
from miniort_cpu.buffers import copied

kernels = KernelTable("cpu")


@kernels.register("TensorScatter", versions=(24, None))
def tensor_scatter(node: NodeContext) -> Run:
    """A cache with an update written over it, along `axis`, from each row's index on; "circular" goes on at the start where it ends.

    cache: [batch, ..., M, ...]; update: [batch, ..., N, ...], N at most M; indices: [batch] int64, 0 if absent -> cache's shape
    """
    axis, mode = node.attribute("axis", -2), node.attribute("mode", "linear")
    if mode not in ("linear", "circular"):
        raise KernelError(f"node {node.name!r} (TensorScatter): its mode must be linear or circular, found {mode!r}")
    allocate = node.provider.allocate

    def run(cache: Array, update: Array, indices: Array | None = None) -> Array:
        along = normalize_axis(axis, cache.ndim)
        length, count = cache.shape[along], update.shape[along]
        out = copied(allocate, cache)
        if indices is None:
            out[(slice(None),) * along + (slice(count),)] = update
            return out
        places = indices.reshape(-1, 1) + np.arange(count)
        if mode == "circular":
            places %= length
        elif places.size and not (places.min() >= 0 and places.max() < length):
            raise IndexError(f"TensorScatter writes at {places.min()} to {places.max()}, outside the {length} elements of its cache's axis")
        rows = np.arange(cache.shape[0])[:, None]
        np.moveaxis(out, along, 1)[rows, places] = np.moveaxis(update, along, 1)
        return out

    return run
