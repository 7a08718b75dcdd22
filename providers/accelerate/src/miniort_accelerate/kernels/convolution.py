"""Convolution of pictures: what the windows see is laid out as columns, and BLAS multiplies them by the weights."""

from __future__ import annotations

import numpy as np

from miniort.errors import InputError
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_accelerate.kernels.matrix import multiply
from miniort_accelerate.operands import FLOAT32, contiguous, library_of, require_types

kernels = KernelTable("accelerate")


def refuse_conv(node: NodeView) -> str | None:
    """Two spatial axes, and padding that is given as numbers."""
    info = node.inputs[1]
    rank = None if info is None or info.shape is None else len(info.shape)
    if rank != 4:
        return f"its kernel takes pictures with two spatial axes, the weights' rank is {'?' if rank is None else rank}"
    auto_pad = node.attribute("auto_pad", "NOTSET")
    return None if auto_pad in ("NOTSET", "VALID") else f"its kernel takes pads as numbers, the node has auto_pad {auto_pad!r}"


@kernels.register("Conv", (1, None), types={"T": FLOAT32}, refuse=refuse_conv)
def conv(node: NodeContext) -> Run:
    """Sum over a window of x times weights, plus a bias. x: [N, C, H, W]; w: [M, C / group, R, S]; bias: [M] -> [N, M, rows, columns].

    A kernel of 1 × 1 with steps of 1 reads the picture where it is.
    """
    library, allocate, groups = library_of(node), node.provider.allocate, node.attribute("group", 1)
    strides, dilations = node.attribute("strides", None) or (1, 1), node.attribute("dilations", None) or (1, 1)
    top, left, bottom, right = (0,) * 4 if node.attribute("auto_pad", "NOTSET") == "VALID" else node.attribute("pads", None) or (0,) * 4

    def run(x: Array, w: Array, bias: Array | None = None) -> Array:
        require_types(node, FLOAT32, x, w)
        batch, channels, height, width = x.shape
        features, depth, kernel_rows, kernel_columns = w.shape
        if channels != depth * groups or features % groups:
            raise InputError(f"Conv: {channels} channels in {groups} groups don't fit weights of shape {list(w.shape)}")
        rows = (height + top + bottom - (kernel_rows - 1) * dilations[0] - 1) // strides[0] + 1
        columns = (width + left + right - (kernel_columns - 1) * dilations[1] - 1) // strides[1] + 1
        if min(rows, columns) < 1:
            raise InputError(f"Conv: a window of {[kernel_rows, kernel_columns]} doesn't fit on {[height, width]} with its padding")
        out: Array = allocate((batch, features, rows, columns), x.dtype)
        if not out.size:
            return out
        if kernel_rows == kernel_columns == 1 and tuple(strides) == (1, 1) and not (top or left or bottom or right):
            seen = contiguous(x).reshape(batch, groups, depth, height * width)
        else:
            padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right))) if top or left or bottom or right else x
            windows = np.lib.stride_tricks.sliding_window_view(
                padded, ((kernel_rows - 1) * dilations[0] + 1, (kernel_columns - 1) * dilations[1] + 1), (2, 3)
            )[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
            columned: Array = allocate((batch, channels, kernel_rows, kernel_columns, rows, columns), x.dtype)
            columned[...] = windows.transpose(0, 1, 4, 5, 2, 3)
            seen = columned.reshape(batch, groups, depth * kernel_rows * kernel_columns, rows * columns)
        weights = contiguous(w).reshape(groups, features // groups, -1)
        if bias is not None:
            out[...] = bias.reshape(-1, 1, 1)
        multiply(library, weights, seen, out.reshape(batch, groups, features // groups, -1), 1.0, 0.0 if bias is None else 1.0)
        return out

    return run
