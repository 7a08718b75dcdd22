"""Softmax, means and normalization. float16 is summed in float32, as the ops' `stash_type` asks."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType
from miniort_cuda.element_types import FLOATS
from miniort_cuda.namespace import array_namespace

kernels = KernelTable("cuda")


def _wide(dtype: DType) -> DType:
    """The type to sum in: float32, or float64 for that."""
    return np.promote_types(dtype, np.float32)


def _softmax(xp: Any, x: Any, axis: int) -> Any:
    """e^(x - max x) / Σ e^(x - max x) along `axis`. x: any shape -> same shape, dtype."""
    if x.size == 0:
        return xp.empty_like(x)
    wide = x.astype(_wide(x.dtype), copy=False)
    e = xp.exp(wide - wide.max(axis=axis, keepdims=True))
    e /= e.sum(axis=axis, keepdims=True)
    return e.astype(x.dtype, copy=False)


@kernels.register("Softmax", (13, None), types={"T": FLOATS})
def softmax(node: NodeContext) -> Run:
    """Softmax along one axis. x: any shape -> same shape, dtype."""
    xp, axis = array_namespace(node), node.attribute("axis", -1)
    return lambda x: _softmax(xp, x, axis)


@kernels.register("Softmax", (1, 12), types={"T": FLOATS})
def softmax_of_rows(node: NodeContext) -> Run:
    """Softmax over all axes from `axis` on together, as it was before version 13. x: any shape -> same shape, dtype."""
    xp, axis = array_namespace(node), node.attribute("axis", 1)

    def run(x: Any) -> Any:
        first = axis + x.ndim if axis < 0 else axis
        rows = x.reshape((prod(x.shape[:first]), prod(x.shape[first:])))
        return _softmax(xp, rows, 1).reshape(x.shape)

    return run


@kernels.register("LayerNormalization", (17, None), types={"T": FLOATS, "U": FLOATS})
def layer_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias, over the axes from `axis` on.

    x: [..., N], scale and bias broadcast to it -> y: as x; mean and inverse deviation: [..., 1] float32 where they are asked for.
    """
    xp = array_namespace(node)
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)
    outputs = len(node.outputs)

    def run(x: Any, scale: Any, bias: Any = None) -> Any:
        axes = tuple(range(axis % x.ndim, x.ndim))
        wide = x.astype(_wide(x.dtype), copy=False)
        mean = wide.mean(axis=axes, keepdims=True)
        centred = wide - mean
        inverse = 1 / xp.sqrt((centred * centred).mean(axis=axes, keepdims=True) + epsilon)
        y = (centred * inverse).astype(x.dtype, copy=False) * scale
        if bias is not None:
            y = y + bias
        if outputs == 1:
            return y
        return (y, mean.astype(np.float32, copy=False), inverse.astype(np.float32, copy=False))[:outputs]

    return run


@kernels.register("RMSNormalization", (23, None), types={"T": FLOATS, "V": FLOATS})
def rms_normalization(node: NodeContext) -> Run:
    """Scaled x / √(mean(x²) + epsilon), over the axes from `axis` on.

    x: [..., N], scale broadcasts to it -> shape of x, dtype of scale.
    """
    xp = array_namespace(node)
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)

    def run(x: Any, scale: Any) -> Any:
        axes = tuple(range(axis % x.ndim, x.ndim))
        wide = x.astype(_wide(x.dtype), copy=False)
        normal = wide / xp.sqrt((wide * wide).mean(axis=axes, keepdims=True) + epsilon)
        return normal.astype(scale.dtype, copy=False) * scale

    return run


@kernels.register("ReduceMean", (1, 17), types={"T": FLOATS})
@kernels.register("ReduceMean", (18, None), types={"T": FLOATS}, host_inputs=(1,), view_of=0)
def reduce_mean(node: NodeContext) -> Run:
    """The mean over `axes`, over all axes if none are named (or none at all, if `noop_with_empty_axes`)."""
    fixed = node.attribute("axes", None)
    keep = bool(node.attribute("keepdims", 1))
    empty_is_noop = bool(node.attribute("noop_with_empty_axes", 0))

    def run(x: Any, axes: Array | None = None) -> Any:
        chosen = fixed if axes is None else tuple(axes.tolist())
        if not chosen and empty_is_noop:
            return x
        return x.mean(axis=chosen or None, dtype=_wide(x.dtype), keepdims=keep).astype(x.dtype, copy=False)

    return run
