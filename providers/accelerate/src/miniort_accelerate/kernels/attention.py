"""Attention by BLAS and vForce: a product for the scores, one exponential over all of them, a product with the values."""

from __future__ import annotations

from math import sqrt

import numpy as np

from miniort.generation.cache import BlockedView
from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array
from miniort_accelerate.kernels.matrix import multiply
from miniort_accelerate.kernels.normalization import softmax_in_place
from miniort_accelerate.library import Accelerate
from miniort_accelerate.operands import FLOAT32, contiguous, library_of, require_types

kernels = KernelTable("accelerate")


def refuse_attention(node: NodeView) -> str | None:
    """What isn't the plain formula goes to the next provider."""
    for name, usual in (("softcap", 0.0), ("left_window_size", -1), ("right_window_size", -1), ("softmax_precision", None)):
        if node.attribute(name, usual) != usual:
            return f"its kernel has no {name}"
    if any(output is not None for output in node.outputs[1:]) or node.has_input(4) or node.has_input(6):
        return "its kernel takes no past and no count of valid keys, and gives neither present nor scores"
    return None


@kernels.register("Attention", (23, None), types={"T1": FLOAT32, "T2": FLOAT32}, block_inputs=(1, 2), refuse=refuse_attention)
def attention(node: NodeContext) -> Run:
    """softmax(scale · q · kᵀ + mask) · v (Vaswani et al. 2017, arXiv:1706.03762); a query that may see no key gives zeros.

    q: [batch, heads, N, dim] or [batch, N, heads · dim]; k, v: [batch, kv heads, T, dim] or [batch, T, kv heads · dim], or in blocks;
    mask: broadcasts to [batch, heads, N, T], bool (True: may see) or float (added), its last axis may be shorter -> as q, with v's dim
    """
    library, allocate = library_of(node), node.provider.allocate
    scale, causal = node.attribute("scale", 0.0), bool(node.attribute("is_causal", 0))
    q_heads, kv_heads = node.attribute("q_num_heads", 0), node.attribute("kv_num_heads", 0)

    def run(q: Array, k: Array | BlockedView, v: Array | BlockedView, mask: Array | None = None) -> Array:
        require_types(node, FLOAT32, q)
        packed = q.ndim == 3
        if packed:
            q, k, v = (_split_heads(np.asarray(x), count) for x, count in ((q, q_heads), (k, kv_heads), (v, kv_heads)))
        batch, heads, count, dim = q.shape
        groups, length, size = k.shape[1], k.shape[2], v.shape[3]
        # the queries of all heads that share a key head are the rows of one product
        rows = contiguous(q).reshape(batch, groups, heads // groups * count, dim)
        scores: Array = allocate((batch, groups, rows.shape[2], length), q.dtype)
        for place, start, keys in _blocks(k):
            multiply(
                library, rows[place], keys.swapaxes(2, 3), scores[place, :, :, start : start + keys.shape[2]], scale or 1 / sqrt(dim), 0.0
            )
        by_head = scores.reshape(batch, heads, count, length)
        _hide(by_head, mask, causal)
        softmax_in_place(library, scores.reshape(-1, length) if length else scores.reshape(0, 1))
        y = _weighted(library, scores, v, np.zeros((batch, groups, rows.shape[2], size), q.dtype)).reshape(batch, heads, count, size)
        return y.transpose(0, 2, 1, 3).reshape(batch, count, heads * size) if packed else y

    return run


def _split_heads(x: Array, heads: int) -> Array:
    """[batch, time, heads · dim] -> [batch, heads, time, dim], a view."""
    batch, time, width = x.shape
    return x.reshape(batch, time, heads, width // heads).transpose(0, 2, 1, 3)


def _blocks(view: Array | BlockedView) -> list[tuple[slice, int, Array]]:
    """Keys or values as blocks: rows, the first token, [rows, kv heads, count, dim]."""
    if isinstance(view, BlockedView):
        return [(rows, start, tokens) for rows, start, tokens in view.blocks]
    return [(slice(None), 0, view)]


def _weighted(library: Accelerate, weights: Array, v: Array | BlockedView, out: Array) -> Array:
    """out + weights · v, block by block. weights: [B, G, N, T]; v: [B, G, T, D]; out: [B, G, N, D], written -> out."""
    for rows, start, values in _blocks(v):
        multiply(library, weights[rows, :, :, start : start + values.shape[2]], values, out[rows], 1.0, 1.0)
    return out


def _hide(scores: Array, mask: Array | None, causal: bool) -> None:
    """Add a float mask, and set what a query may not see to -inf, in place. scores: [B, H, N, T]."""
    count, length = scores.shape[2:]
    if mask is not None:
        covered = length if mask.shape[-1] == 1 else mask.shape[-1]
        if mask.dtype == np.bool_:
            np.copyto(scores[..., :covered], -np.inf, where=~mask)
        else:
            np.add(scores[..., :covered], mask, out=scores[..., :covered])
        scores[..., covered:] = -np.inf
    if causal:
        np.copyto(scores, -np.inf, where=np.arange(length) > np.arange(count)[:, None])
