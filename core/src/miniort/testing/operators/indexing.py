"""Builders of ops that read or write elements by their index."""

from __future__ import annotations

import numpy as np

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse
from miniort.types import STRING, Array, DType


def some_indices(d: Draws, operator: Operator, size: int, shape: tuple[int, ...], dtype: DType) -> Array:
    """Indices along an axis of that size, from version 11 on also from its end."""
    return d.array(dtype, shape, -size if operator.version >= 11 else 0, size - 1)


@builds("Gather")
def gather(d: Draws, operator: Operator) -> NodeCase:
    """Indices of any rank."""
    data = d.array(d.dtype(operator), d.shape(1, 3, min_size=1))
    axis = d.axis(data.ndim, operator)
    indices = some_indices(d, operator, data.shape[axis], d.shape(0, 2), d.dtype(operator, "Tind"))
    return NodeCase([data, indices], {"axis": axis} if axis or d.boolean() else {}, constants=d.constants(0, 1))


@builds("GatherElements")
def gather_elements(d: Draws, operator: Operator) -> NodeCase:
    """Indices of data's rank, no longer than data but along the axis."""
    data = d.array(d.dtype(operator), d.shape(1, 3, min_size=1))
    axis = d.axis(data.ndim)
    shape = [d.integer(1, size) for size in data.shape]
    shape[axis] = d.integer(0, 4)
    indices = some_indices(d, operator, data.shape[axis], tuple(shape), d.dtype(operator, "Tind"))
    return NodeCase([data, indices], {"axis": axis} if axis or d.boolean() else {}, constants=d.constants(1))


@builds("GatherND")
def gather_nd(d: Draws, operator: Operator) -> NodeCase:
    """data [batch..., rest...], indices [batch..., I..., k] -> [batch..., I..., rest[k:]...]."""
    shape = d.shape(1, 4, min_size=1)
    batch = d.integer(0, len(shape) - 1) if operator.has_attribute("batch_dims") else 0
    depth = d.integer(1, len(shape) - batch)
    places = (*shape[:batch], *d.shape(0, 2))
    columns = [d.array(np.dtype(np.int64), places, -shape[batch + axis], shape[batch + axis] - 1) for axis in range(depth)]
    attributes = {"batch_dims": batch} if batch else {}
    return NodeCase([d.array(d.dtype(operator), shape), np.stack(columns, axis=-1)], attributes, constants=d.constants(1))


def scatter_reduction(d: Draws, operator: Operator, dtype: DType) -> dict[str, str]:
    """A reduction that the version has and the type can do."""
    if not operator.has_attribute("reduction"):
        return {}
    reductions = ["none"]
    if dtype != STRING and dtype.kind != "b":
        reductions += ["add", "mul"] + (["max", "min"] if operator.version >= 18 and dtype.kind != "c" else [])
    return d.some(reduction=d.choice(reductions))


@builds("Scatter", "ScatterElements")
def scatter_elements(d: Draws, operator: Operator) -> NodeCase:
    """Each element is written at most once, for an order isn't specified; reductions may meet it often."""
    data = d.array(d.dtype(operator), d.shape(1, 3, min_size=1), special=False)
    axis = d.axis(data.ndim, operator)
    shape = tuple(d.integer(1, size) for size in data.shape)
    attributes = scatter_reduction(d, operator, data.dtype)
    dtype = d.dtype(operator, "Tind")
    if attributes.get("reduction", "none") == "none":
        size = data.shape[axis]
        order = np.argsort(d.rng().random([size if place == axis % data.ndim else each for place, each in enumerate(shape)]), axis=axis)
        indices = order.take(range(shape[axis]), axis=axis).astype(dtype)
        if operator.version >= 11:
            indices = np.where(d.array(np.dtype(bool), shape), indices - size, indices).astype(dtype)
    else:
        indices = some_indices(d, operator, data.shape[axis], shape, dtype)
    updates = d.array(data.dtype, shape, special=False)
    inputs = [data, indices, updates]
    return NodeCase(
        inputs,
        attributes | ({"axis": axis} if axis or d.boolean() else {}),
        constants=d.constants(0, 1),
        atol=0.1 if is_coarse(data.dtype) else None,
    )


@builds("ScatterND")
def scatter_nd(d: Draws, operator: Operator) -> NodeCase:
    """Slices of data [k..., rest...] by indices [I..., k], each written at most once unless they're reduced."""
    data = d.array(d.dtype(operator), d.shape(1, 3, min_size=1), special=False)
    depth = d.integer(1, data.ndim)
    attributes = scatter_reduction(d, operator, data.dtype)
    sizes = data.shape[:depth]
    count = d.integer(0, 4)
    rng = d.rng()
    if attributes.get("reduction", "none") == "none":
        flat = rng.permutation(int(np.prod(sizes)))[:count]
    else:
        flat = rng.integers(0, int(np.prod(sizes)), count)
    indices = np.stack(np.unravel_index(flat, sizes), axis=-1).astype(np.int64)
    if d.boolean():
        indices = np.where(rng.integers(0, 2, indices.shape) == 1, indices - np.array(sizes), indices)
    updates = d.array(data.dtype, (len(indices), *data.shape[depth:]), special=False)
    if d.boolean():
        indices, updates = indices[None], updates[None]
    return NodeCase([data, indices, updates], attributes, constants=d.constants(0, 1), atol=0.1 if is_coarse(data.dtype) else None)


@builds("Compress")
def compress(d: Draws, operator: Operator) -> NodeCase:
    """The condition may be shorter than the axis."""
    x = d.array(d.dtype(operator), d.shape(1))
    axis = d.axis(x.ndim, operator) if d.boolean() else None
    length = x.size if axis is None else x.shape[axis]
    condition = d.array(np.dtype(bool), (d.integer(0, length),))
    return NodeCase([x, condition], {} if axis is None else {"axis": axis}, constants=d.constants(1))


@builds("NonZero")
def non_zero(d: Draws, operator: Operator) -> NodeCase:
    """Numbers and truth values; what a text that is zero would be isn't specified."""
    return NodeCase([d.array(d.dtype(operator, without=[STRING]), d.shape(), low=0, high=1.5, special=False)])


@builds("OneHot")
def one_hot(d: Draws, operator: Operator) -> NodeCase:
    """Indices that may lie outside; depth a scalar or of one element."""
    depth = d.integer(1, 5)
    indices = np.trunc(d.array(np.dtype(np.float32), d.shape(max_rank=3), -depth - 2 if operator.version >= 11 else 0, depth + 2))
    index_type, depth_type = d.dtype(operator, "T1"), d.dtype(operator, "T2")
    if "uint" in index_type.name:
        indices = np.abs(indices)
    inputs = [
        indices.astype(index_type),
        np.full(d.choice([(), (1,)]), depth, depth_type),
        d.array(d.dtype(operator, "T3"), (2,), special=False),
    ]
    axis = d.integer(-indices.ndim - 1 if operator.version >= 11 else -1, indices.ndim)
    return NodeCase(inputs, d.some(axis=axis), constants=d.constants(1, 2))


@builds("TensorScatter")
def tensor_scatter(d: Draws, operator: Operator) -> NodeCase:
    """New entries of a cache, from an index per row of the batch on; a circular one wraps around."""
    shape = list(d.shape(2, 4, min_size=1))
    axis = d.integer(1, len(shape) - 1)
    capacity, mode = shape[axis], d.choice(["linear", "circular"])
    new = d.integer(1, capacity)
    past = d.array(d.dtype(operator), shape)
    shape[axis] = new
    last = capacity - new if mode == "linear" else capacity - 1
    indices = d.array(np.dtype(np.int64), (shape[0],), 0, last) if d.boolean() else None
    attributes = ({"mode": mode} if mode != "linear" or d.boolean() else {}) | {"axis": axis - len(shape) if d.boolean() else axis}
    return NodeCase(d.trimmed([past, d.array(past.dtype, shape), indices]), attributes)
