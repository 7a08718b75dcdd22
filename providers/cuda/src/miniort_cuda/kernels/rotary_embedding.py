"""Rotary position embedding: RotaryEmbedding, and com.microsoft's, whose inputs come in another order."""

from __future__ import annotations

from typing import Any

from miniort.kernels import KernelTable, NodeContext, Run
from miniort_cuda.element_types import FLOATS, compute_dtype
from miniort_cuda.fused import fused_kernels
from miniort_cuda.namespace import CONTRIB, array_namespace

kernels = KernelTable("cuda")


def rotated(xp: Any, x: Any, cosines: Any, sines: Any, interleaved: bool) -> Any:
    """Pairs of elements turned by angles (Su et al. 2021, arXiv:2104.09864).

    Element i is paired with i + R/2, or if `interleaved` 2i with 2i + 1; what is behind the first R elements stays.
    x: [batch, time, heads, size]; cosines, sines: [batch, time, R/2] -> x's shape, dtype
    """
    wide = compute_dtype(x.dtype)
    cos, sin = (xp.expand_dims(each.astype(wide, copy=False), 2) for each in (cosines, sines))
    turned = 2 * cosines.shape[-1]
    head = x[..., :turned].astype(wide, copy=False)
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., : turned // 2], head[..., turned // 2 :])
    first, second = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        pairs = xp.concatenate((xp.expand_dims(first, -1), xp.expand_dims(second, -1)), axis=-1)
        y = pairs.reshape(head.shape).astype(x.dtype, copy=False)
        return y if turned == x.shape[-1] else xp.concatenate((y, x[..., turned:]), axis=-1)
    parts = [first.astype(x.dtype, copy=False), second.astype(x.dtype, copy=False)]
    return xp.concatenate(parts if turned == x.shape[-1] else [*parts, x[..., turned:]], axis=-1)


def _rotate_any(xp: Any, x: Any, cosines: Any, sines: Any, heads: int, interleaved: bool) -> Any:
    """`x` of either form: [batch, heads, time, size], or [batch, time, heads · size] -> same shape."""
    if x.ndim == 4:
        return rotated(xp, x.transpose(0, 2, 1, 3), cosines, sines, interleaved).transpose(0, 2, 1, 3)
    by_head = x.reshape((*x.shape[:2], heads, x.shape[2] // heads))
    return rotated(xp, by_head, cosines, sines, interleaved).reshape(x.shape)


@kernels.register("RotaryEmbedding", (23, None), types={"T": FLOATS})
def rotary_embedding(node: NodeContext) -> Run:
    """Pairs of each head's first elements turned by an angle that grows with the position.

    x: [batch, heads, time, size] or [batch, time, heads · size]; cosines, sines: [batch, time, R/2], or [positions, R/2] with
    position_ids [batch, time] -> x's shape
    """
    xp, heads, fused = array_namespace(node), node.attribute("num_heads", 0), fused_kernels(node)
    interleaved, size = bool(node.attribute("interleaved", 0)), node.attribute("rotary_embedding_dim", 0)

    def run(x: Any, cosines: Any, sines: Any, position_ids: Any = None) -> Any:
        if position_ids is not None:
            cosines, sines = xp.take(cosines, position_ids, axis=0), xp.take(sines, position_ids, axis=0)
        if size and size // 2 < cosines.shape[-1]:
            cosines, sines = cosines[..., : size // 2], sines[..., : size // 2]
        if fused is not None and x.ndim == 3:
            y = fused.rotated(x.reshape((*x.shape[:2], heads, x.shape[2] // heads)), cosines, sines, interleaved)
            if y is not None:
                return y.reshape(x.shape)
        if fused is not None and x.ndim == 4 and x.shape[2] == 1:  # of one token, the axes of time and heads may change places
            y = fused.rotated(x.reshape((x.shape[0], 1, x.shape[1], x.shape[3])), cosines, sines, interleaved)
            if y is not None:
                return y.reshape(x.shape)
        return _rotate_any(xp, x, cosines, sines, heads, interleaved)

    return run


@kernels.register("RotaryEmbedding", domain=CONTRIB, types={0: FLOATS})
def contrib_rotary_embedding(node: NodeContext) -> Run:
    """The same with its inputs in another order.

    x: [batch, heads, time, size] or [batch, time, heads · size]; position_ids: [batch, time], or [1], the first position of every row;
    cosines, sines: [positions, R/2] -> x's shape
    """
    xp, heads = array_namespace(node), node.attribute("num_heads", 0)
    interleaved, size = bool(node.attribute("interleaved", 0)), node.attribute("rotary_embedding_dim", 0)

    def run(x: Any, position_ids: Any, cosines: Any, sines: Any) -> Any:
        count = heads or x.shape[-1] // (2 * cosines.shape[1])
        if position_ids.ndim == 1:
            steps = xp.arange(x.shape[-2]).astype(position_ids.dtype)
            position_ids = xp.broadcast_to(position_ids + steps, (x.shape[0], x.shape[-2]))
        turned = cosines.shape[1] if not size else size // 2
        cos, sin = (xp.take(each, position_ids, axis=0)[..., :turned] for each in (cosines, sines))
        return _rotate_any(xp, x, cos, sin, count, interleaved)

    return run
