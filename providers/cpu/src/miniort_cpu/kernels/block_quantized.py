"""Weights of a few bits, with a scale for each block of them: MatMulNBits, GatherBlockQuantized."""

from __future__ import annotations

from hashlib import sha256
from math import prod

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import normalize_axis
from miniort_cpu.floating_point import FLOAT32, as_dtype, widen
from miniort_cpu.kernels.contrib_activation import CONTRIB
from miniort_cpu.kernels.matrix import matrix_product

kernels = KernelTable("cpu")

KEPT = 1 << 24
"""Bytes of float32 up to which a weight matrix is dequantized once and kept.

A product with one row then takes a fifth of the time (0.4 ms instead of 3 for 2048 × 2048 values of 4 bits), and 8 times their memory.
Larger ones are dequantized in every run, BLOCK by BLOCK: they would not stay in the cache anyway, and their memory is what they were
quantized for.
"""

BLOCK = 1 << 19
"""Bytes of float32 that are dequantized at a time: they should still be in the cache when the product reads them."""


def _part(x: Array, part: int, bits: int) -> Array:
    """The numbers that stand at one place of each byte, `part` counted from its lowest bits. x: [...] uint8 -> same shape."""
    shifted = np.right_shift(x, bits * part) if part else x
    return shifted if part == 8 // bits - 1 else np.bitwise_and(shifted, (1 << bits) - 1)


def unpacked(x: Array, bits: int) -> Array:
    """Numbers of `bits` bits, the lowest bits of a byte first. x: [..., N] uint8 -> [..., N · 8 / bits] uint8."""
    if bits == 8:
        return x
    parts = 8 // bits
    out = np.empty((*x.shape, parts), np.uint8)
    for part in range(parts):
        out[..., part] = _part(x, part, bits)
    return out.reshape(*x.shape[:-1], x.shape[-1] * parts)


class BlockQuantized:
    """A matrix of few bits. packed: [N, blocks, bytes] uint8; scales: [N, blocks]; zero_points: [N, blocks]; group: [K] or None.

    `group` says for each column which scale is its own, where that isn't its block's.
    """

    def __init__(self, packed: Array, scales: Array, zero_points: Array | None, group: Array | None, columns: int, bits: int) -> None:
        rows, blocks = packed.shape[:2]
        self.packed, self.bits, self.group, self.columns = packed, bits, group, columns
        self.scales = widen(scales).reshape(rows, blocks)
        self.shift = self._shift(zero_points)

    def _shift(self, zero_points: Array | None) -> Array:
        rows, blocks = self.scales.shape
        if zero_points is None:
            return np.full((1, 1), 1 << (self.bits - 1), np.float32)
        if zero_points.dtype == np.uint8:
            zero_points = unpacked(zero_points.reshape(rows, -1), self.bits)[:, :blocks]
        return as_dtype(zero_points.reshape(rows, blocks), FLOAT32)

    def dequantized(self, first: int, last: int, out: Array) -> Array:
        """(number - zero point) · scale of some rows. out: [last - first, K] float32, K padded to whole blocks."""
        packed = self.packed[first:last]
        rows, blocks, size = packed.shape
        parts = 8 // self.bits
        by_byte = out.reshape(rows, blocks, size, parts)
        for part in range(parts):
            np.copyto(by_byte[..., part], _part(packed, part, self.bits))
        shift = self.shift if len(self.shift) == 1 else self.shift[first:last]
        scales = self.scales[first:last]
        if self.group is None:
            by_block = out.reshape(rows, blocks, size * parts)
            np.subtract(by_block, shift[:, :, None], out=by_block)
            np.multiply(by_block, scales[:, :, None], out=by_block)
        else:
            own = out[:, : self.columns]
            np.subtract(own, shift if shift.shape[1] == 1 else shift[:, self.group], out=own)
            np.multiply(own, scales[:, self.group], out=own)
        return out[:, : self.columns]

    def matrix(self) -> Array:
        """All rows. -> [N, K] float32."""
        return self.dequantized(0, len(self.packed), np.empty((len(self.packed), self._padded()), np.float32))

    def _padded(self) -> int:
        return prod(self.packed.shape[1:]) * 8 // self.bits

    def product(self, a: Array, y: Array) -> None:
        """`y` = a · matrixᵀ, a few rows of the matrix at a time. a: [M, K]; y: [M, N], written, both float32."""
        if len(a) == 1 and self.group is None:
            self._vector_product(a[0], y[0])
            return
        rows = max(BLOCK // (4 * self._padded()), 1)
        buffer = np.empty((rows, self._padded()), np.float32)
        for first in range(0, len(self.packed), rows):
            last = min(first + rows, len(self.packed))
            y[:, first:last] = np.dot(a, self.dequantized(first, last, buffer[: last - first]).T)

    def _vector_product(self, a: Array, y: Array) -> None:
        """`y` = matrix · a, as the sum over blocks of scale · (numbers · a - zero point · Σ a). a: [K]; y: [N], written.

        The numbers meet a as they are, so that there are fewer passes over them than it takes to dequantize them.
        """
        count, blocks, size = self.packed.shape
        parts = 8 // self.bits
        padded = np.zeros((blocks, size, parts), np.float32)
        padded.reshape(-1)[: self.columns] = a
        sums = np.add.reduce(padded, (1, 2))
        factors = np.ascontiguousarray(np.moveaxis(padded, 2, 0))
        rows = max(BLOCK // (4 * blocks * size), 1)
        buffer = np.empty((rows, blocks, size), np.float32)
        for first in range(0, count, rows):
            last = min(first + rows, count)
            numbers = buffer[: last - first]
            dots = -sums * (self.shift if len(self.shift) == 1 else self.shift[first:last])  # [1 or rows, blocks]
            for part in range(parts):
                np.copyto(numbers, _part(self.packed[first:last], part, self.bits))
                dots = dots + np.einsum("nkb,kb->nk", numbers, factors[part])
            np.vecdot(dots, self.scales[first:last], out=y[first:last])


def rounded_to_bytes(x: Array, block: int) -> Array:
    """`x` with each block of its last axis rounded to multiples of 1/127 of the block's largest magnitude. x: [..., K] -> same shape."""
    columns = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-columns // block) * block), FLOAT32)
    padded[..., :columns] = x
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    scale = np.maximum.reduce(np.absolute(blocks), -1, keepdims=True) / np.float32(127)
    np.multiply(blocks, np.reciprocal(scale, where=scale != 0, out=np.zeros_like(scale)), out=blocks)
    np.rint(blocks, out=blocks)
    np.multiply(blocks, scale, out=blocks)
    return padded[..., :columns]


@kernels.register("MatMulNBits", domain=CONTRIB)
def matmul_nbits(node: NodeContext) -> Run:
    """`a` · wᵀ + bias, w = (b - zero point) · scale with numbers of 2, 4 or 8 bits.

    a: [..., K]; b: [N, blocks, bytes of a block] uint8; scales: [N, blocks]; zero points: [N, blocks], or packed as b is,
    2^(bits - 1) if absent; group: [K]; bias: [N] -> [..., N]

    It's computed in float32. With `accuracy_level` 4, which allows to round a to 8 bits, that is done first: the results are then
    those of onnxruntime's kernels, and a model makes the decisions that it was tested with.
    """
    columns, rows, bits = node.attribute("K"), node.attribute("N"), node.attribute("bits", 4)
    block = node.attribute("block_size") if node.attribute("accuracy_level", 0) == 4 else None
    if bits not in (2, 4, 8):
        raise ValueError(f"the attribute bits must be 2, 4 or 8, found {bits}")
    allocate = node.provider.allocate
    fixed = [node.constant(index) for index in range(1, 5)]
    is_fixed = all(array is not None or not node.has_input(index) for index, array in enumerate(fixed, 1))
    quantized = kept = None
    if is_fixed and fixed[0] is not None and fixed[0].size:
        packed, scales, zero_points, group = fixed
        quantized = BlockQuantized(packed, scales, zero_points, group, columns, bits)  # type: ignore[arg-type]
        if rows * columns * 4 <= KEPT:
            digest = sha256(b"".join(array.tobytes() for array in (scales, zero_points, group) if array is not None)).hexdigest()
            made = quantized
            kept = node.prepare(1, f"cpu.dequantized:{bits}:{columns}:{digest}", lambda _: made.matrix())

    def run(
        a: Array,
        b: Array,
        scales: Array,
        zero_points: Array | None = None,
        group: Array | None = None,
        bias: Array | None = None,
    ) -> Array:
        wide = widen(a) if block is None else rounded_to_bytes(widen(a), block)
        if not b.size:
            y = allocate((*a.shape[:-1], rows), wide.dtype)
            y[...] = 0
        elif kept is not None:
            y = matrix_product(allocate, wide, kept.T)
        else:
            y = allocate((*a.shape[:-1], rows), wide.dtype)
            weights = quantized or BlockQuantized(b, scales, zero_points, group, columns, bits)
            weights.product(wide.reshape(-1, columns), y.reshape(-1, rows))
        if bias is not None:
            np.add(y, widen(bias), out=y)
        return as_dtype(y, a.dtype)

    return run


@kernels.register("GatherBlockQuantized", domain=CONTRIB)
def gather_block_quantized(node: NodeContext) -> Run:
    """Slices of quantized data by their index along an axis, dequantized. An index out of range gives zeros.

    data: [..., N, ..., K, ...], 4-bit or 8-bit integers, in a uint8 several along the last axis if `bits` says so, or narrow floats;
    indices: [I...]; scales, zero points: data's shape with one for each block of the axis `quantize_axis` -> [..., I..., ..., K, ...]
    """
    axis, quantized_axis = node.attribute("gather_axis", 0), node.attribute("quantize_axis", 1)
    bits, block_size = node.attribute("bits", 4), node.attribute("block_size", 128)
    allocate = node.provider.allocate

    def run(data: Array, indices: Array, scales: Array, zero_points: Array | None = None) -> Array:
        rank = data.ndim
        along, by_block = normalize_axis(axis, rank), normalize_axis(quantized_axis, rank)
        length = data.shape[along]
        inside = (indices >= -length) & (indices < length)
        places = np.where(inside, indices % max(length, 1), 0)
        per_byte = 8 // bits if data.dtype == np.uint8 else 1
        numbers = unpacked(data.take(places, along), bits) if per_byte > 1 else data.take(places, along)
        y = allocate(numbers.shape, FLOAT32)
        np.copyto(y, numbers, casting="unsafe")
        size = block_size or data.shape[by_block] * (per_byte if by_block == rank - 1 else 1)
        if zero_points is not None:
            points = unpacked(zero_points, bits)[..., : scales.shape[-1]] if per_byte > 1 else zero_points
            np.subtract(y, _of_blocks(points, places, along, by_block, size, y), out=y)
        elif data.dtype == np.uint8:
            np.subtract(y, np.float32(1 << (bits - 1)), out=y)
        np.multiply(y, _of_blocks(scales, places, along, by_block, size, y), out=y)
        if not inside.all():
            y[(slice(None),) * along + (~inside,)] = 0
        return as_dtype(y, scales.dtype)

    return run


def _of_blocks(parameter: Array, places: Array, along: int, by_block: int, size: int, y: Array) -> Array:
    """A scale or zero point for each element that was gathered. parameter: as scales -> broadcasts to y's shape, float32."""
    wide = as_dtype(parameter, FLOAT32)
    if along == by_block:
        return wide.take(places // size, along)
    taken = wide.take(places, along) if wide.shape[along] > 1 else np.expand_dims(wide, tuple(range(along, along + places.ndim - 1)))
    axis = by_block if by_block < along else by_block + places.ndim - 1
    if places.ndim == 0 and wide.shape[along] == 1:
        taken = wide.take(0, along)
    return taken.repeat(size, axis)[(slice(None),) * axis + (slice(y.shape[axis]),)]
