"""Tensors that ggml quantised, put into the form of `MatMulNBits` without quantising them again.

ggml keeps a row as blocks of 32 or 256 numbers, each block with its scales beside it. What a block says is

    value = d · q                 Q4_0, Q5_0, Q8_0, Q6_K, whose q are signed
    value = d · q + m             Q4_1, Q5_1, Q4_K, Q5_K

and `MatMulNBits` says `value = (code - zero_point) · scale`. Five and six bits are kept as eight.

Layouts of the blocks: `ggml-common.h` of ggml. The axes in the comments are R rows, N blocks of a row, and bytes or numbers of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from miniort.types import Array
from miniort_models.weights.source import BlockQuantised


@dataclass(frozen=True)
class _Numbers:
    """What blocks say. q: [R, blocks, block_size] integers; d: [R, blocks] float32; m: the same, None where it's zero."""

    q: Array
    d: Array
    m: Array | None
    bits: int


def _half(blocks: Array, at: int) -> Array:
    """The float16 that stands at byte `at` of each block. blocks: [R, N, bytes] -> [R, N] float32"""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _halves_of_bytes(packed: Array) -> Array:
    """[..., n] bytes -> [..., 2n]: all the lower halves, then all the upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _single_bits(packed: Array) -> Array:
    """[..., n] bytes -> [..., 8n] of 0 or 1, the lowest bit of a byte first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _q4_0(blocks: Array) -> _Numbers:
    return _Numbers(_halves_of_bytes(blocks[..., 2:]).view(np.int8) - np.int8(8), _half(blocks, 0), None, 4)


def _q4_1(blocks: Array) -> _Numbers:
    return _Numbers(_halves_of_bytes(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), 4)


def _q5_0(blocks: Array) -> _Numbers:
    q = _halves_of_bytes(blocks[..., 6:]) | _single_bits(blocks[..., 2:6]) << 4
    return _Numbers(q.view(np.int8) - np.int8(16), _half(blocks, 0), None, 8)


def _q5_1(blocks: Array) -> _Numbers:
    q = _halves_of_bytes(blocks[..., 8:]) | _single_bits(blocks[..., 4:8]) << 4
    return _Numbers(q, _half(blocks, 0), _half(blocks, 2), 8)


def _q8_0(blocks: Array) -> _Numbers:
    return _Numbers(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0), None, 8)


def _scales_and_minima(blocks: Array) -> tuple[Array, Array]:
    """d and m of the eight parts of a block of 256. blocks: [R, N, bytes] -> [R, 8N] float32 twice

    Bytes 4 to 15 hold eight scales and eight minima of six bits: the first four of each in the lower six bits of the first eight bytes;
    of the others four bits in the last four bytes, and two in the upper bits of the first eight.
    """
    rows = len(blocks)
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]  # [R, N, 4]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    d = _half(blocks, 0)[..., None] * scales.astype(np.float32)
    m = -_half(blocks, 2)[..., None] * minima.astype(np.float32)
    return d.reshape(rows, -1), m.reshape(rows, -1)


def _quarters(packed: Array) -> Array:
    """The eight parts of 32 numbers whose lower four bits are in 128 bytes. packed: [R, N, 128] -> [R, 8N, 32]"""
    pairs = packed.reshape(*packed.shape[:-1], 4, 1, 32)  # 32 bytes are two parts: that of the lower halves, then that of the upper ones
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(len(packed), -1, 32)


def _q4_k(blocks: Array) -> _Numbers:
    return _Numbers(_quarters(blocks[..., 16:]), *_scales_and_minima(blocks), 4)


def _q5_k(blocks: Array) -> _Numbers:
    rows, count = blocks.shape[:2]
    places = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[..., None, 16:48] >> places & 1  # [R, N, 8, 32]: bit i of each byte is for part i
    q = _quarters(blocks[..., 48:]) | fifth.reshape(rows, count * 8, 32) << 4
    return _Numbers(q, *_scales_and_minima(blocks), 8)


def _q6_k(blocks: Array) -> _Numbers:
    """Sixteen parts of 16 numbers; 128 numbers share 64 bytes with their lower four bits and 32 with their upper two."""
    rows, count = blocks.shape[:2]
    low = blocks[..., :128].reshape(rows, count, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2)  # [R, N, 2, 2, 64]
    places = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(rows, count, 2, 1, 32) >> places & 3  # [R, N, 2, 4, 32]
    q = low.reshape(rows, -1, 16) | high.reshape(rows, -1, 16) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)  # [R, N, 16]
    d = _half(blocks, 208)[..., None] * scales
    return _Numbers(q.view(np.int8) - np.int8(32), d.reshape(rows, -1), None, 8)


_READERS: dict[int, Callable[[Array], _Numbers]] = {
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
}

KEPT_TYPES = frozenset(_READERS)
"""ggml's numbers of the types that can be kept as they are."""


def to_block_quantised(blocks: Array, kind: int) -> BlockQuantised:
    """What the blocks of a matrix say, as `MatMulNBits` wants it. blocks: [R, N, bytes] uint8; kind: one of `KEPT_TYPES`."""
    numbers = _READERS[kind](blocks)
    q, d, bits = numbers.q, numbers.d, numbers.bits
    zero_points = None
    if numbers.m is None:
        codes: Array = (q.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)  # the zero point that absent ones stand for
    else:
        # d·q + m = (q - z)·d with z = -m / d. Where d is 0 all values are m, which is (0 - z)·1 with z = -m.
        flat = d == 0
        codes = np.where(flat[..., None], np.uint8(0), q)
        d = np.where(flat, np.float32(1), d)
        zero_points = -numbers.m / d
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return BlockQuantised(np.ascontiguousarray(codes), d, zero_points, bits, q.shape[-1])
