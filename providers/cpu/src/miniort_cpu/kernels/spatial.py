"""Ops that move elements between channels and spatial axes: DepthToSpace, SpaceToDepth, Col2Im."""

from __future__ import annotations

from math import prod

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import as_ints
from miniort_cpu.floating_point import as_dtype, widen
from miniort_cpu.windows import positions, scatter_windows

kernels = KernelTable("cpu")


@kernels.register("DepthToSpace", versions=(1, None))
def depth_to_space(node: NodeContext) -> Run:
    """Channels laid out as blocks of space. x: [N, C · b², H, W] -> [N, C, H · b, W · b].

    The channels are counted block first (mode DCR) or C first (CRD).
    """
    block = node.attribute("blocksize")
    block_first = node.attribute("mode", "DCR") == "DCR"
    allocate = node.provider.allocate

    def run(x: Array) -> Array:
        batch, depth, height, width = x.shape
        channels = depth // block**2
        y: Array = allocate((batch, channels, height * block, width * block), x.dtype)
        target = y.reshape(batch, channels, height, block, width, block)  # n c h i w j
        if block_first:
            target[...] = x.reshape(batch, block, block, channels, height, width).transpose(0, 3, 4, 1, 5, 2)
        else:
            target[...] = x.reshape(batch, channels, block, block, height, width).transpose(0, 1, 4, 2, 5, 3)
        return y

    return run


@kernels.register("SpaceToDepth", versions=(1, None))
def space_to_depth(node: NodeContext) -> Run:
    """Blocks of space laid out as channels, DepthToSpace's inverse. x: [N, C, H · b, W · b] -> [N, C · b², H, W]."""
    block = node.attribute("blocksize")
    block_first = node.attribute("mode", "DCR") == "DCR"
    allocate = node.provider.allocate

    def run(x: Array) -> Array:
        batch, channels, height, width = x.shape
        y: Array = allocate((batch, channels * block**2, height // block, width // block), x.dtype)
        source = x.reshape(batch, channels, height // block, block, width // block, block)  # n c h i w j
        if block_first:
            y.reshape(batch, block, block, channels, *y.shape[2:])[...] = source.transpose(0, 3, 5, 1, 2, 4)
        else:
            y.reshape(batch, channels, block, block, *y.shape[2:])[...] = source.transpose(0, 1, 3, 5, 2, 4)
        return y

    return run


@kernels.register("Col2Im", versions=(18, None))
def col2im(node: NodeContext) -> Run:
    """An image from the blocks that slide over it; where blocks overlap they are added up.

    columns: [N, C · Π block, L]; image_shape, block_shape: [spatial rank] int64 -> [N, C, *image_shape]
    """
    strides, dilations, pads = (node.attribute(name, None) for name in ("strides", "dilations", "pads"))

    def run(columns: Array, image_shape: Array, block_shape: Array) -> Array:
        image, block = as_ints(image_shape) or (), as_ints(block_shape) or ()
        rank = len(image)
        steps, gaps = tuple(strides or (1,) * rank), tuple(dilations or (1,) * rank)
        begins, ends = tuple(pads or (0,) * (2 * rank))[:rank], tuple(pads or (0,) * (2 * rank))[rank:]
        counts = tuple((image[i] + begins[i] + ends[i] - gaps[i] * (block[i] - 1) - 1) // steps[i] + 1 for i in range(rank))
        batch, depth = columns.shape[:2]
        channels = depth // prod(block)
        wide = widen(columns).reshape(batch, channels, *block, *counts)
        out = np.zeros((batch, channels, *image), wide.dtype)
        return as_dtype(scatter_windows(wide, out, positions(block, steps, gaps, begins, image, counts)), columns.dtype)

    return run
