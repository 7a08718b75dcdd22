"""Convolutions as products of matrices: what the windows see is laid out as columns, and multiplied by the weights."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from miniort.errors import InputError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort_cuda.element_types import FLOATS
from miniort_cuda.namespace import array_namespace
from miniort_cuda.windows import Window, padded, window_of, windows

kernels = KernelTable("cuda")


@kernels.register("Conv", (1, None), types={"T": FLOATS})
def conv(node: NodeContext) -> Run:
    """Sum over a window of x times weights, plus a bias.

    x: [N, C, *sizes]; w: [M, C / group, *kernel]; bias: [M] -> [N, M, *counts]
    """
    xp, groups = array_namespace(node), node.attribute("group", 1)

    def run(x: Any, w: Any, bias: Any = None) -> Any:
        batch, channels = x.shape[:2]
        features = w.shape[0]
        if channels != w.shape[1] * groups or features % groups:
            raise InputError(f"Conv: {channels} channels in {groups} groups don't fit weights of shape {list(w.shape)}")
        window = window_of(node, w.shape[2:])
        placed = window.place(x.shape[2:])
        matrix = w.reshape((groups, features // groups, prod(w.shape[1:])))
        columns = _columns(xp, x, window, placed.counts, placed.begins, groups)  # [N, groups, C / group · kernel, counts]
        y = xp.matmul(matrix, columns).reshape((batch, features, *placed.counts))
        return y if bias is None else y + bias.reshape((-1,) + (1,) * len(placed.counts))

    return run


def _columns(xp: Any, x: Any, window: Window, counts: tuple[int, ...], begins: tuple[int, ...], groups: int) -> Any:
    """What the windows see, a column for each. x: [N, C, *sizes] -> [N, groups, C / groups · kernel, counts], x itself for kernels of 1."""
    batch, channels = x.shape[:2]
    rank = len(counts)
    target = (batch, groups, channels // groups * prod(window.kernel), prod(counts))
    totals = tuple(
        max((count - 1) * stride + (kernel - 1) * dilation + 1, 0)
        for count, stride, kernel, dilation in zip(counts, window.strides, window.kernel, window.dilations, strict=True)
    )
    if prod(window.kernel) == 1 and all(stride == 1 for stride in window.strides) and x.shape[2:] == totals:
        return x.reshape(target)
    reach = tuple(max(total, size + begin) for total, size, begin in zip(totals, x.shape[2:], begins, strict=True))
    seen = windows(xp, padded(xp, x, begins, reach, 0), window, counts)
    order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    return seen.transpose(order).reshape(target)


@kernels.register("ConvTranspose", (1, None), types={"T": FLOATS})
def conv_transpose(node: NodeContext) -> Run:
    """Each element of x spreads over a window of the output; what falls on one element is added up.

    x: [N, C, *sizes]; w: [C, M / group, *kernel]; bias: [M] -> [N, M, *sizes of the output]
    """
    xp, groups = array_namespace(node), node.attribute("group", 1)

    def run(x: Any, w: Any, bias: Any = None) -> Any:
        batch, channels, *sizes = x.shape
        kernel, features = w.shape[2:], w.shape[1] * groups
        window = window_of(node, kernel)
        rank = len(kernel)
        extents = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, window.dilations, strict=True)]
        spread = [(size - 1) * stride + extent for size, stride, extent in zip(sizes, window.strides, extents, strict=True)]
        begins, totals = _output(node, window, sizes, spread)
        flat = x.reshape((batch, groups, channels // groups, prod(sizes)))
        matrix = w.reshape((groups, channels // groups, features // groups * prod(kernel))).swapaxes(1, 2)
        columns = xp.matmul(matrix, flat).reshape((batch, features, *kernel, *sizes))
        room = [max(size, begin + total) for size, begin, total in zip(spread, begins, totals, strict=True)]
        y = xp.zeros((batch, features, *room), x.dtype)
        for place in np.ndindex(*kernel):
            target = tuple(
                slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
                for at, dilation, size, stride in zip(place, window.dilations, sizes, window.strides, strict=True)
            )
            y[(slice(None), slice(None), *target)] += columns[(slice(None), slice(None), *place)]
        y = y[(slice(None), slice(None), *(slice(begin, begin + total) for begin, total in zip(begins, totals, strict=True)))]
        return y.copy() if bias is None else y + bias.reshape((-1,) + (1,) * rank)

    return run


def _output(node: NodeContext, window: Window, sizes: list[int], spread: list[int]) -> tuple[list[int], list[int]]:
    """Where the output begins in what the windows cover, and its sizes; by the equations of the op."""
    rank = len(sizes)
    more = node.attribute("output_padding", None) or (0,) * rank
    wanted = node.attribute("output_shape", None)
    if wanted is None and window.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [size * stride for size, stride in zip(sizes, window.strides, strict=True)]
    if wanted is None:
        begins, ends = ((0,) * rank, (0,) * rank) if window.auto_pad == "VALID" else (window.begins, window.ends)
        totals = [size + extra - begin - end for size, extra, begin, end in zip(spread, more, begins, ends, strict=True)]
        return list(begins), totals
    cut = [size + extra - total for size, extra, total in zip(spread, more, wanted[-rank:], strict=True)]
    first = [each // 2 if window.auto_pad == "SAME_UPPER" else each - each // 2 for each in cut]
    return [max(each, 0) for each in first], list(wanted[-rank:])
