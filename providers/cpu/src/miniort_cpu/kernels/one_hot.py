"""Tensors with one element in each row set: OneHot, Hardmax, EyeLike."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, dtype_from_onnx
from miniort_cpu.axes import normalize_axis
from miniort_cpu.floating_point import widen

kernels = KernelTable("cpu")

INT64 = np.dtype(np.int64)


@kernels.register("OneHot", versions=(9, None))
def one_hot(node: NodeContext) -> Run:
    """A new axis of size `depth`, that holds the on-value where its index is the one given, and else the off-value.

    An index outside the axis sets nothing; from version 11 negative ones count from the end.

    indices: [...]; depth: [] or [1]; values: [off, on] -> [..., depth, ...]
    """
    axis, from_end = node.attribute("axis", -1), node.version >= 11
    allocate = node.provider.allocate

    def run(indices: Array, depth: Array, values: Array) -> Array:
        length = int(depth.item())
        places = indices.astype(INT64)
        if from_end:
            np.add(places, length, out=places, where=places < 0)
        place = normalize_axis(axis, indices.ndim + 1)
        positions = np.arange(length).reshape(-1, *(1,) * (indices.ndim - place))
        out: Array = allocate((*indices.shape[:place], length, *indices.shape[place:]), values.dtype)
        out[...] = values[0]
        np.copyto(out, values[1], where=np.expand_dims(places, place) == positions)
        return out

    return run


@kernels.register("Hardmax", versions=(1, None))
def hardmax(node: NodeContext) -> Run:
    """1 for the first largest element along an axis, else 0; until version 12 over all axes from `axis` on, taken as one.

    x: [...] float -> same shape, dtype
    """
    as_matrix = node.version < 13
    axis = node.attribute("axis", 1 if as_matrix else -1)

    def run(x: Array) -> Array:
        place = normalize_axis(axis, x.ndim)
        out = np.zeros(x.shape, x.dtype)
        if not x.size:
            return out
        if as_matrix:
            rows = out.reshape(int(np.prod(x.shape[:place])), -1)
            largest = np.argmax(widen(x).reshape(rows.shape), 1)
            rows[np.arange(len(rows)), largest] = 1
        else:
            np.put_along_axis(out, np.argmax(widen(x), place, keepdims=True), 1, place)
        return out

    return run


@kernels.register("EyeLike", versions=(9, None), metadata_inputs=(0,))
def eye_like(node: NodeContext) -> Run:
    """Ones on diagonal k, else zeros. x: [M, N], of which only the shape matters (and the type, without `dtype`) -> [M, N]."""
    diagonal, number = node.attribute("k", 0), node.attribute("dtype", None)

    def run(x: Array) -> Array:
        rows, columns = x.shape
        return np.eye(rows, columns, diagonal, np.bool_).astype(x.dtype if number is None else dtype_from_onnx(number))

    return run
