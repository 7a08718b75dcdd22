"""Tensors made from attributes and small numbers alone: Constant, ConstantOfShape, Range."""

from __future__ import annotations

from math import ceil

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import STRING, Array, dtype_from_onnx
from miniort_cpu.floating_point import FLOAT64, NARROW_FLOATS, as_dtype

kernels = KernelTable("cpu")


@kernels.register("Constant", versions=(1, None))
def constant(node: NodeContext) -> Run:
    """The tensor in the node's one attribute, the same array in every run. A `sparse_value` is given here as a dense array."""
    value = _constant_value(node)

    def run() -> Array:
        return value

    return run


def _constant_value(node: NodeContext) -> Array:
    given = node.attributes
    for name in ("value", "sparse_value"):
        if name in given:
            tensor: Array = given[name]
            return tensor
    for name, dtype in (("value_int", np.dtype(np.int64)), ("value_float", np.dtype(np.float32)), ("value_string", STRING)):
        for spelling in (name, name + "s"):
            if spelling in given:
                return np.array(given[spelling], dtype)
    raise KernelError(
        f"node {node.name!r} (Constant) has no value: found attributes {sorted(given)}, wanted one whose name starts with 'value'"
    )


@kernels.register("ConstantOfShape", versions=(9, None))
def constant_of_shape(node: NodeContext) -> Run:
    """A tensor full of one value. shape: [rank] int64 -> [*shape], of the type of `value` (float32 zeros without it)."""
    value: Array = node.attribute("value", np.zeros(1, np.float32)).reshape(())
    allocate = node.provider.allocate

    def run(shape: Array) -> Array:
        out: Array = allocate(tuple(shape.tolist()), value.dtype)
        out[...] = value
        return out

    return run


@kernels.register("Range", versions=(11, None))
def range_(node: NodeContext) -> Run:
    """`start` + i · delta, for i from 0 while it's before limit. start, limit, delta: [] -> [max(ceil((limit - start) / delta), 0)]."""
    stash = dtype_from_onnx(node.attribute("stash_type", 1))

    def run(start: Array, limit: Array, delta: Array) -> Array:
        first, last, step = start.item(), limit.item(), delta.item()
        dtype = start.dtype
        if dtype.kind in "iu":
            return np.arange(first, last, step, dtype)  # type: ignore[call-overload, no-any-return]
        count = max(ceil((last - first) / step), 0)
        steps = np.arange(count, dtype=stash if dtype in NARROW_FLOATS else FLOAT64)
        return as_dtype(first + steps * step, dtype)

    return run
