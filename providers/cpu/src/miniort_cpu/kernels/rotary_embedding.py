"""Rotary position embedding: RotaryEmbedding."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.tape import call
from miniort.types import Array
from miniort_cpu.floating_point import as_dtype, compute_dtype, widen

kernels = KernelTable("cpu")


@kernels.register("RotaryEmbedding", versions=(23, None))
def rotary_embedding(node: NodeContext) -> Run:
    """Pairs of elements of each head turned by an angle that grows with the position (Su et al. 2021, arXiv:2104.09864).

    The first R elements of a head, all of them where `rotary_embedding_dim` is 0, are turned; element i is paired with i + R/2, or if
    `interleaved` 2i with 2i + 1. x: [batch, heads, time, head dim] or [batch, time, heads · head dim];
    cosines, sines: [batch, time, R/2], or [positions, R/2] with position_ids [batch, time] -> x's shape, dtype.
    """
    rotated, heads = node.attribute("rotary_embedding_dim", 0), node.attribute("num_heads", 0)
    interleaved = bool(node.attribute("interleaved", 0))
    allocate = node.provider.allocate

    def turn(x: Array, cosines: Array, sines: Array, position_ids: Array | None, y: Array) -> None:
        wide = widen(x)
        if x.ndim == 4:
            source, target = wide.transpose(0, 2, 1, 3), y.transpose(0, 2, 1, 3)
        else:
            by_head = (*x.shape[:2], heads, x.shape[2] // heads)
            source, target = wide.reshape(by_head), y.reshape(by_head)  # [batch, time, heads, head dim]
        if position_ids is not None:
            cosines, sines = cosines[position_ids], sines[position_ids]
        cos, sin = widen(cosines)[:, :, None, :], widen(sines)[:, :, None, :]
        size = rotated or source.shape[3]
        if interleaved:
            first, second = slice(0, size, 2), slice(1, size, 2)
        else:
            first, second = slice(0, size // 2), slice(size // 2, size)
        a, b = source[..., first], source[..., second]
        np.subtract(a * cos, b * sin, out=target[..., first])
        np.add(a * sin, b * cos, out=target[..., second])
        if size < source.shape[3]:
            target[..., size:] = source[..., size:]

    def run(x: Array, cosines: Array, sines: Array, position_ids: Array | None = None) -> Array:
        y: Array = allocate(x.shape, compute_dtype(x.dtype))
        call(turn, x, cosines, sines, position_ids, y, writes=(y,))
        return as_dtype(y, x.dtype)

    return run
