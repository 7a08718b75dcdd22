"""Weights as small integers, a block of columns at a time, in the form of onnxruntime's `MatMulNBits`."""

from __future__ import annotations

import numpy as np

from miniort.types import Array
from miniort_models.weights.source import BlockQuantised

BLOCK_SIZE = 32


PIECE = 1 << 22
"""How many weights are rounded at a time: a few temporary arrays of that size take less memory than a whole large matrix does."""


def quantise(weight: Array, bits: int, block_size: int = BLOCK_SIZE) -> BlockQuantised:
    """`weight` rounded to 8 or 4 bits. weight: [rows, columns] float; columns are filled up with zeros to whole blocks.

    8 bits: from -127 to 127 times a scale, which is the block's largest magnitude / 127. 4 bits leave too few steps to waste any on a side
    where a block has no values: a block has a zero point too, so that its 16 steps go from its smallest value to its largest. For weights
    from a normal distribution, the mean error is then 9 % less than with steps that are symmetric about 0.
    """
    step = max(PIECE // max(weight.shape[1], 1), 1)
    pieces = [_quantise_rows(weight[first : first + step], bits, block_size) for first in range(0, len(weight), step)]
    codes, scales = np.concatenate([piece.codes for piece in pieces]), np.concatenate([piece.scales for piece in pieces])
    zero_points = [piece.zero_points for piece in pieces if piece.zero_points is not None]
    return BlockQuantised(codes, scales, np.concatenate(zero_points) if zero_points else None, bits, block_size)


def _quantise_rows(weight: Array, bits: int, block_size: int) -> BlockQuantised:
    rows, columns = weight.shape
    blocks = -(-columns // block_size)
    padded = np.zeros((rows, blocks * block_size), np.float32)
    padded[:, :columns] = weight
    values = padded.reshape(rows, blocks, block_size)
    if bits == 8:
        scales = np.abs(values).max(axis=2) / np.float32(127)
        codes = np.rint(values * _reciprocal(scales)[:, :, None]) + 128
        return BlockQuantised(codes.astype(np.uint8), scales, None, bits, block_size)
    scales, zero_points = _fit(values, levels=2**bits)
    codes = _codes(values, scales, zero_points, levels=2**bits).astype(np.uint8)
    return BlockQuantised(pack(codes, bits), scales, zero_points, bits, block_size)


SHRINKS = np.linspace(1, 0.8, 9, dtype=np.float32)
"""What part of a block's range its 16 steps may cover: two values at the ends cut off can make all others finer."""


def _fit(values: Array, levels: int) -> tuple[Array, Array]:
    """The scales and zero points, of those tried, with the least squared error: [rows, blocks, block size] -> 2 x [rows, blocks]."""
    low, high = np.minimum(values.min(axis=2), 0), np.maximum(values.max(axis=2), 0)
    best = np.full(low.shape, np.inf, np.float32)
    scales, zero_points = np.zeros_like(low), np.zeros_like(low)
    for shrink in SHRINKS:
        scale = (high - low) * shrink / (levels - 1)
        zero_point = np.clip(np.rint(-low * shrink * _reciprocal(scale)), 0, levels - 1)
        restored = (_codes(values, scale, zero_point, levels) - zero_point[:, :, None]) * scale[:, :, None]
        error = np.square(restored - values).sum(axis=2)
        better = error < best
        best[better], scales[better], zero_points[better] = error[better], scale[better], zero_point[better]
    return scales, zero_points


def _codes(values: Array, scales: Array, zero_points: Array, levels: int) -> Array:
    """[rows, blocks, block size] float32 -> whole numbers from 0 to `levels` - 1, as float32."""
    steps: Array = np.rint(values * _reciprocal(scales)[:, :, None]) + zero_points[:, :, None]
    return np.clip(steps, 0, levels - 1, out=steps)


def _reciprocal(x: Array) -> Array:
    """1 / x, and 0 where x is 0."""
    inverse: Array = np.divide(1, x, out=np.zeros_like(x), where=x != 0)
    return inverse


def pack(codes: Array, bits: int) -> Array:
    """Several codes in each byte, the first in its lowest bits. codes: [..., N] uint8 -> [..., ceil(N · bits / 8)] uint8"""
    parts = 8 // bits
    missing = -codes.shape[-1] % parts
    filled = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    by_byte = filled.reshape(*codes.shape[:-1], -1, parts)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: Array = np.bitwise_or.reduce(by_byte << shifts, axis=-1, dtype=np.uint8)
    return packed


def unpack(packed: Array, bits: int) -> Array:
    """The inverse of `pack`. packed: [..., N] uint8 -> [..., N · 8 / bits] uint8"""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed[..., None] >> shifts) & np.uint8(2**bits - 1)).reshape(*packed.shape[:-1], -1)


def dequantise(blocks: BlockQuantised, columns: int) -> Array:
    """(code - zero point) · scale. -> [rows, columns] float32"""
    codes = unpack(blocks.codes, blocks.bits).astype(np.float32)  # [rows, blocks, block size]
    zero_points = np.float32(2 ** (blocks.bits - 1)) if blocks.zero_points is None else blocks.zero_points[:, :, None]
    restored = (codes - zero_points) * blocks.scales[:, :, None]
    return restored.reshape(len(restored), -1)[:, :columns]
