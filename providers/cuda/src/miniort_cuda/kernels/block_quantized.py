"""Weights of a few bits, with a scale for each block of them: MatMulNBits, GatherBlockQuantized."""

from __future__ import annotations

from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort_cuda.element_types import FLOAT32, FLOATS
from miniort_cuda.fused import fused_kernels
from miniort_cuda.namespace import CONTRIB, array_namespace

kernels = KernelTable("cuda")

UINT8 = np.dtype(np.uint8)


def unpacked(xp: Any, x: Any, bits: int) -> Any:
    """Numbers of `bits` bits, the lowest bits of a byte first. x: [..., N] uint8 -> [..., N · 8 / bits] uint8."""
    if bits == 8:
        return x
    parts = [xp.expand_dims((x >> (bits * part)) & ((1 << bits) - 1), -1) for part in range(8 // bits)]
    return xp.concatenate(parts, axis=-1).reshape((*x.shape[:-1], x.shape[-1] * (8 // bits)))


def _points(xp: Any, zero_points: Any, rows: int, blocks: int, bits: int) -> Any:
    """Zero points as numbers: [rows, blocks] float32, or one for all. zero_points: packed as the weights are, as floats, or None."""
    if zero_points is None:
        return float(1 << (bits - 1))
    if zero_points.dtype == UINT8:
        return unpacked(xp, zero_points.reshape((rows, -1)), bits)[:, :blocks].astype(FLOAT32)
    return zero_points.reshape((rows, blocks)).astype(FLOAT32)


def dequantized(xp: Any, packed: Any, scales: Any, zero_points: Any, columns: int, bits: int) -> Any:
    """(number - zero point) · scale. packed: [N, blocks, bytes] uint8; scales: [N, blocks] -> [N, columns] float32."""
    rows, blocks, size = packed.shape
    numbers = unpacked(xp, packed, bits).astype(FLOAT32)  # [N, blocks, block size]
    points = _points(xp, zero_points, rows, blocks, bits)
    shift = points if isinstance(points, float) else xp.expand_dims(points, -1)
    factor = scales.astype(FLOAT32, copy=False).reshape((rows, blocks, 1))
    return ((numbers - shift) * factor).reshape((rows, blocks * size * 8 // bits))[:, :columns]


def rounded_to_bytes(xp: Any, x: Any, block: int) -> Any:
    """`x` with each block of its last axis rounded to multiples of 1/127 of the block's largest magnitude. x: [..., K] -> same shape."""
    columns = x.shape[-1]
    missing = -columns % block
    whole = x if not missing else xp.concatenate((x, xp.zeros((*x.shape[:-1], missing), FLOAT32)), axis=-1)
    blocks = whole.reshape((*x.shape[:-1], (columns + missing) // block, block))
    scale = xp.abs(blocks).max(axis=-1, keepdims=True) * np.float32(1) / np.float32(127)
    inverse = xp.where(scale == 0, xp.zeros_like(scale), 1 / xp.where(scale == 0, xp.ones_like(scale), scale))
    return (xp.rint(blocks * inverse) * scale).reshape(whole.shape)[..., :columns]


def _refuse_matmul(node: NodeView) -> str | None:
    bits = node.attribute("bits", 4)
    if bits not in (2, 4, 8):
        return f"its kernel has numbers of 2, 4 and 8 bits, the node has {bits}"
    return "its kernel has no g_idx" if node.has_input(4) else None


@kernels.register("MatMulNBits", domain=CONTRIB, types={0: FLOATS}, refuse=_refuse_matmul)
def matmul_nbits(node: NodeContext) -> Run:
    """`a` · wᵀ + bias, w = (b - zero point) · scale with numbers of 2, 4 or 8 bits.

    a: [..., K]; b: [N, blocks, bytes of a block] uint8; scales: [N, blocks]; zero points: [N, blocks], or packed as b is, 2^(bits - 1)
    if absent; bias: [N] -> [..., N]. Computed in float32, with a rounded to 8 bits before where `accuracy_level` is 4.
    """
    xp, fused = array_namespace(node), fused_kernels(node)
    columns, rows, bits = node.attribute("K"), node.attribute("N"), node.attribute("bits", 4)
    block = node.attribute("block_size") if node.attribute("accuracy_level", 0) == 4 else None

    def run(a: Any, b: Any, scales: Any, zero_points: Any = None, group: Any = None, bias: Any = None) -> Any:
        wide = a.astype(FLOAT32, copy=False)
        if block is not None:
            wide = rounded_to_bytes(xp, wide, block)
        blocks = b.size // rows // (node.attribute("block_size") * bits // 8)
        packed, left = b.reshape((rows, blocks, -1)), wide.reshape((-1, columns))
        y = None
        if fused is not None:
            y = fused.block_quantized_product(left, packed, scales.reshape((rows, blocks)), zero_points, columns, bits)
        if y is None:
            y = xp.matmul(left, dequantized(xp, packed, scales, zero_points, columns, bits).T)
        if bias is not None:
            y = y + bias
        return y.reshape((*a.shape[:-1], rows)).astype(a.dtype, copy=False)

    return run


def _refuse_gather(node: NodeView) -> str | None:
    info = node.inputs[0]
    rank = None if info is None or info.shape is None else len(info.shape)
    axis, quantized = node.attribute("gather_axis", 0), node.attribute("quantize_axis", 1)
    if axis != 0 or rank is None or rank < 2 or quantized % rank != rank - 1 or node.dtype(0) != UINT8:
        return "its kernel gathers rows of uint8 data that is quantized along its last axis"
    return None


@kernels.register("GatherBlockQuantized", domain=CONTRIB, refuse=_refuse_gather)
def gather_block_quantized(node: NodeContext) -> Run:
    """Rows of quantized data, dequantized. data: [N, ..., bytes] uint8; indices: [I...]; scales, zero points: [N, ..., blocks]

    -> [I..., ..., elements]
    """
    xp, bits, block = array_namespace(node), node.attribute("bits", 4), node.attribute("block_size", 128)

    def run(data: Any, indices: Any, scales: Any, zero_points: Any = None) -> Any:
        numbers = unpacked(xp, xp.take(data, indices, axis=0), bits).astype(FLOAT32)
        factor = xp.take(scales, indices, axis=0).astype(FLOAT32, copy=False)
        if zero_points is None:
            shift: Any = float(1 << (bits - 1))
        else:
            points = unpacked(xp, xp.take(zero_points, indices, axis=0), bits)[..., : factor.shape[-1]].astype(FLOAT32)
            shift = xp.repeat(points, block, axis=-1)[..., : numbers.shape[-1]]
        return ((numbers - shift) * xp.repeat(factor, block, axis=-1)[..., : numbers.shape[-1]]).astype(scales.dtype, copy=False)

    return run
