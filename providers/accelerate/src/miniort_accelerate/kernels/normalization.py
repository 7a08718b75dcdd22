"""Softmax, means and normalization of rows. Sums of a few rows are vDSP's, of many NumPy's: a call for each costs more than it brings."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_accelerate.kernels.elementwise import apply_unary
from miniort_accelerate.library import Accelerate, Reduction
from miniort_accelerate.operands import FLOAT32, address, contiguous, library_of, require_types

kernels = KernelTable("accelerate")

FEW_ROWS = 8


def reduced(function: Reduction, many: Callable[[Array], Array], x: Array) -> Array:
    """One number for each row. x: [rows, N] C-contiguous float32, N not 0 -> [rows, 1]. `many` does the same for many rows."""
    if len(x) > FEW_ROWS:
        return many(x)
    out = np.empty((len(x), 1), np.float32)
    start, target, step = address(x), address(out), x.shape[1] * 4
    for row in range(len(x)):
        function(start + row * step, 1, target + 4 * row, x.shape[1])
    return out


def row_sums(library: Accelerate, x: Array) -> Array:
    """Sums of rows. x: [rows, N] C-contiguous float32 -> [rows, 1]."""
    return reduced(library.sve, lambda rows: rows.sum(axis=1, keepdims=True), x)


def softmax_in_place(library: Accelerate, x: Array) -> None:
    """Softmax of each row, in place; a row of -inf alone becomes zeros. x: [rows, N] C-contiguous float32."""
    if not x.size:
        return
    peak = reduced(library.maxv, lambda rows: rows.max(axis=1, keepdims=True), x)
    np.copyto(peak, 0, where=np.isneginf(peak))
    np.subtract(x, peak, out=x)
    apply_unary(library.vexpf, x, x)
    total = row_sums(library, x)
    np.copyto(total, 1, where=total == 0)
    np.divide(x, total, out=x)


def refuse_other_axes(node: NodeView) -> str | None:
    """Rows are what is contiguous."""
    info = node.inputs[0]
    rank = None if info is None or info.shape is None else len(info.shape)
    axis = node.attribute("axis", -1)
    if axis == -1 or (rank is not None and axis == rank - 1):
        return None
    return f"its kernel takes the last axis, the node has axis {axis} of {'?' if rank is None else rank}"


@kernels.register("Softmax", (13, None), types={"T": FLOAT32}, refuse=refuse_other_axes)
def softmax(node: NodeContext) -> Run:
    """e^(x - max x) / Σ e^(x - max x) along the last axis. x: [..., N] -> same shape."""
    library, allocate = library_of(node), node.provider.allocate

    def run(x: Array) -> Array:
        require_types(node, FLOAT32, x)
        out: Array = allocate(x.shape, x.dtype)
        out[...] = x
        if out.size:
            softmax_in_place(library, out.reshape(-1, x.shape[-1] if x.ndim else 1))
        return out

    return run


@kernels.register("Softmax", (1, 12), types={"T": FLOAT32})
def softmax_of_rows(node: NodeContext) -> Run:
    """Softmax over all axes from `axis` on together, as it was before version 13. x: any shape -> same shape."""
    library, allocate, axis = library_of(node), node.provider.allocate, node.attribute("axis", 1)

    def run(x: Array) -> Array:
        require_types(node, FLOAT32, x)
        out: Array = allocate(x.shape, x.dtype)
        out[...] = x
        if out.size:
            first = axis % x.ndim if axis < 0 else axis
            softmax_in_place(library, out.reshape(prod(x.shape[:first]), -1))
        return out

    return run


def refuse_layer_normalization(node: NodeView) -> str | None:
    """Rows, and the result alone."""
    more = any(output is not None for output in node.outputs[1:])
    return refuse_other_axes(node) or ("its kernel gives neither mean nor deviation" if more else None)


@kernels.register("LayerNormalization", (17, None), types={"T": FLOAT32}, refuse=refuse_layer_normalization)
def layer_normalization(node: NodeContext) -> Run:
    """(x - mean) / √(variance + epsilon) · scale + bias, over the last axis. x: [..., N]; scale, bias: [N] -> x's shape."""
    library, allocate, epsilon = library_of(node), node.provider.allocate, node.attribute("epsilon", 1e-5)

    def run(x: Array, scale: Array, bias: Array | None = None) -> Array:
        require_types(node, FLOAT32, x, scale)
        out: Array = allocate(x.shape, x.dtype)
        if not x.size:
            return out
        rows = out.reshape(-1, x.shape[-1])
        source = contiguous(x).reshape(rows.shape)
        np.subtract(source, row_sums(library, source) / rows.shape[1], out=rows)
        squares = _square_sums(library, rows)
        np.multiply(rows, 1 / np.sqrt(squares / rows.shape[1] + np.float32(epsilon)), out=rows)
        _scaled(library, rows, scale, bias)
        return out

    return run


def _square_sums(library: Accelerate, x: Array) -> Array:
    """Sums of squares of rows. x: [rows, N] C-contiguous float32 -> [rows, 1]."""
    return reduced(library.svesq, lambda rows: np.vecdot(rows, rows)[:, None], x)


def _scaled(library: Accelerate, rows: Array, scale: Array, bias: Array | None) -> None:
    """rows · scale + bias, in place: one multiply-add for each of a few rows. rows: [rows, N]; scale, bias: [N]."""
    size = rows.shape[1]
    if bias is None or len(rows) > FEW_ROWS or scale.shape != (size,) or bias.shape != (size,):
        np.multiply(rows, scale, out=rows)
        if bias is not None:
            np.add(rows, bias, out=rows)
        return
    scale, bias = contiguous(scale), contiguous(bias)
    for row in rows:
        place = address(row)
        library.vma(place, 1, address(scale), 1, address(bias), 1, place, 1, size)


@kernels.register("RMSNormalization", (23, None), types={"T": FLOAT32, "V": FLOAT32}, refuse=refuse_other_axes)
def rms_normalization(node: NodeContext) -> Run:
    """`x` / √(mean(x²) + epsilon) · scale, over the last axis. x: [..., N]; scale: [N] -> x's shape."""
    library, allocate, epsilon = library_of(node), node.provider.allocate, node.attribute("epsilon", 1e-5)

    def run(x: Array, scale: Array) -> Array:
        require_types(node, FLOAT32, x, scale)
        out: Array = allocate(x.shape, x.dtype)
        if not x.size:
            return out
        rows = out.reshape(-1, x.shape[-1])
        source = contiguous(x).reshape(rows.shape)
        squares = _square_sums(library, source)
        np.multiply(source, 1 / np.sqrt(squares / rows.shape[1] + np.float32(epsilon)), out=rows)
        np.multiply(rows, scale, out=rows)
        return out

    return run


def refuse_reduction(node: NodeView) -> str | None:
    """The last axis alone, known before anything runs."""
    axes = node.constant(1) if node.has_input(1) else node.attribute("axes", None)
    info = node.inputs[0]
    rank = None if info is None or info.shape is None else len(info.shape)
    chosen = None if axes is None else tuple(int(axis) for axis in np.asarray(axes).reshape(-1))
    if chosen == (-1,) or (rank is not None and chosen == (rank - 1,)):
        return None
    return "its kernel takes the mean over the last axis, which has to be a constant"


@kernels.register("ReduceMean", (1, 17), types={"T": FLOAT32}, refuse=refuse_reduction)
@kernels.register("ReduceMean", (18, None), types={"T": FLOAT32}, refuse=refuse_reduction)
def reduce_mean(node: NodeContext) -> Run:
    """The mean over the last axis. x: [..., N] -> [..., 1], without that axis if `keepdims` is 0."""
    library, keep = library_of(node), node.attribute("keepdims", 1)

    def run(x: Array, axes: Array | None = None) -> Array:
        require_types(node, FLOAT32, x)
        shape = (*x.shape[:-1], 1) if keep else x.shape[:-1]
        if not x.size:
            return np.full(shape, np.nan, np.float32)
        rows = contiguous(x).reshape(-1, x.shape[-1])
        return (row_sums(library, rows) / np.float32(rows.shape[1])).reshape(shape)

    return run
