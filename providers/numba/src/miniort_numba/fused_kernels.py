"""Kernels of the fused ops, which `fusion` makes of a decoder's small nodes; those of com.microsoft may also come with a model.

`miniort.SplitHeads`, `JoinedAttention` and `SwiGLU` are this provider's own: what they take and give is told at their kernels. What does
the product before as well is in `finished_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run, TypeKey
from miniort.tape import call
from miniort.types import Array, DType
from miniort_numba.kernels import FLOAT32, NO_VECTOR, attend_by_token, crew_of, refuse_attention, row_of

KERNELS = KernelTable("numba")

CONTRIB, OWN = "com.microsoft", "miniort"

_QUERY_KEY_VALUE: Mapping[TypeKey, frozenset[DType]] = dict.fromkeys(range(3), frozenset({FLOAT32}))
ALL_FLOAT32: Mapping[TypeKey, frozenset[DType]] = dict.fromkeys(range(5), frozenset({FLOAT32}))
"""All inputs are float32."""
_NO_ANGLES = np.empty((1, 0, 0), np.float32)


def _refuse_statistics(node: NodeView) -> str | None:
    return "it gives no mean and no deviation" if any(output is not None for output in node.outputs[1:3]) else None


def _normalized_sum(node: NodeContext, by_mean: bool) -> Run:
    """run(x, skip, scale, shift, bias). x, skip: [..., n], broadcast; the others: [n], bias and shift may be absent."""
    from miniort_numba.compiled.fused_rows import SUM_ROWS, normalize_sum

    board, helpers = crew_of(node)
    epsilon, allocate = node.attribute("epsilon", 1e-12), node.provider.allocate
    wants_sum = len(node.outputs) > 3 and node.outputs[3] is not None

    def run(x: Array, skip: Array, scale: Array, shift: Array | None, bias: Array | None) -> Array | tuple[Array | None, ...]:
        size = x.shape[-1]
        if skip.shape != x.shape:
            x, skip = np.broadcast_arrays(x, skip)
        y: Array = allocate(x.shape, FLOAT32)
        total: Array = allocate(x.shape, FLOAT32)
        if x.size:
            rows, others = (np.ascontiguousarray(each).reshape(-1, size) for each in (x, skip))
            added, shifted = (NO_VECTOR if each is None else row_of(each, size) for each in (bias, shift))
            flat_total, flat_y = total.reshape(-1, size), y.reshape(-1, size)
            vectors = added, row_of(scale, size), shifted
            call(normalize_sum, board, helpers, SUM_ROWS, rows, others, *vectors, by_mean, epsilon, flat_total, flat_y, writes=(total, y))
        return (y, None, None, total) if wants_sum else y

    return run


@KERNELS.register("SkipLayerNormalization", domain=CONTRIB, types=ALL_FLOAT32, refuse=_refuse_statistics)
def skip_layer_normalization(node: NodeContext) -> Run:
    """LayerNormalization of x + skip + bias. x, skip: [..., n], broadcast; gamma, beta, bias: [n] -> as their sum; None, None; the sum."""
    normalize = _normalized_sum(node, True)

    def run(x: Array, skip: Array, gamma: Array, beta: Array | None = None, bias: Array | None = None) -> Array | tuple[Array | None, ...]:
        return normalize(x, skip, gamma, beta, bias)  # type: ignore[no-any-return]

    return run


@KERNELS.register("SkipSimplifiedLayerNormalization", domain=CONTRIB, types=ALL_FLOAT32, refuse=_refuse_statistics)
def skip_simplified_layer_normalization(node: NodeContext) -> Run:
    """RMSNormalization of x + skip + bias. x, skip: [..., n], broadcast; gamma, bias: [n] -> as their sum; None, None; the sum."""
    normalize = _normalized_sum(node, False)

    def run(x: Array, skip: Array, gamma: Array, bias: Array | None = None) -> Array | tuple[Array | None, ...]:
        return normalize(x, skip, gamma, None, bias)  # type: ignore[no-any-return]

    return run


def _refuse_no_bias(node: NodeView) -> str | None:
    return None if node.has_input(1) else "it takes a bias only"


@KERNELS.register("FastGelu", domain=CONTRIB, types=ALL_FLOAT32, written_over=(0,), refuse=_refuse_no_bias)
def fast_gelu(node: NodeContext) -> Run:
    """Gelu of x + bias, the approximation by tanh. x: [..., n]; bias: [n] -> as x."""
    from miniort_numba.compiled.fused_rows import BIASED_GELU_ROWS, biased_gelu

    board, helpers = crew_of(node)
    allocate, over = node.provider.allocate, 0 in node.dying_inputs

    def run(x: Array, bias: Array) -> Array:
        size, contiguous = x.shape[-1], x.flags.c_contiguous
        y: Array = x if over and contiguous and x.flags.writeable else allocate(x.shape, FLOAT32)
        if x.size:
            rows = (x if contiguous else np.ascontiguousarray(x)).reshape(-1, size)
            call(biased_gelu, board, helpers, BIASED_GELU_ROWS, rows, row_of(bias, size), y.reshape(-1, size), writes=(y,))
        return y

    return run


@KERNELS.register("SwiGLU", domain=OWN, types=ALL_FLOAT32)
def swiglu(node: NodeContext) -> Run:
    """Swish(gate) · up, where gate is the first half of the last axis and up the second (Shazeer 2020, arXiv:2002.05202).

    x: [..., 2n] -> [..., n].
    """
    from miniort_numba.compiled.fused_rows import GATED_ROWS, gate_rows

    board, helpers = crew_of(node)
    allocate = node.provider.allocate

    def run(x: Array) -> Array:
        size = x.shape[-1] // 2
        y: Array = allocate((*x.shape[:-1], size), FLOAT32)
        if y.size:
            source = np.ascontiguousarray(x).reshape(-1, 2 * size)
            call(gate_rows, board, helpers, GATED_ROWS, source, y.reshape(-1, size), writes=(y,))
        return y

    return run


class SplitInto:
    """How a `SplitHeads`, or what does its product as well, splits what it's given. count: heads of all parts."""

    def __init__(self, node: NodeContext) -> None:
        counts = [int(each) for each in node.attribute("num_heads")]
        self.count = sum(counts)
        self._table = np.array([counts, node.attribute("turned")], np.int64).T.copy()
        self._table.flags.writeable = False
        self._side_by_side = bool(node.attribute("interleaved", 0))
        self._places = list(pairwise(accumulate(counts, initial=0)))

    def told(self, shape: tuple[int, ...], bias: Array | None, cosines: Array | None, sines: Array | None) -> tuple[Any, ...]:
        """The arguments of the compiled functions from the bias to `side_by_side`. ValueError for angles that don't fit."""
        batch, time, width = shape
        dim = width // self.count
        for each in (cosines, sines):
            if each is not None and (each.shape[0] not in (1, batch) or each.shape[1] != time or 2 * each.shape[2] > dim):
                raise ValueError(f"heads of {dim} in {batch} rows of {time} tokens can't be turned by angles {list(each.shape)}")
        angles = [_NO_ANGLES if each is None else np.ascontiguousarray(each) for each in (cosines, sines)]
        return NO_VECTOR if bias is None else row_of(bias, width), *angles, self._table, dim, self._side_by_side

    def split(self, y: Array, shape: tuple[int, ...]) -> tuple[Array, ...]:
        """Each part of what was written, [batch, heads, time, dim]."""
        batch, time, width = shape
        dim = width // self.count
        step = batch * time * dim
        return tuple(y[start * step : end * step].reshape(batch, end - start, time, dim) for start, end in self._places)


@KERNELS.register("SplitHeads", domain=OWN, types=ALL_FLOAT32)
def split_heads(node: NodeContext) -> Run:
    """What a projection gives for queries, keys and values, split into heads; a bias is added before, some parts' heads are turned after.

    x: [batch, time, (all heads) · dim]; bias: as its last axis, or absent; cosines, sines: [batch or 1, time, angles], as
    RotaryEmbedding takes them, absent where nothing's turned -> for each number in the attribute `num_heads` [batch, heads, time, dim].
    Attributes: `turned`, for each part 1 where its heads are turned; `interleaved`, as RotaryEmbedding's.
    """
    from miniort_numba.compiled import fused_rows

    board, helpers = crew_of(node)
    allocate, split, part = node.provider.allocate, fused_rows.split_heads, fused_rows.SPLIT_ROWS
    heads = SplitInto(node)

    def run(x: Array, bias: Array | None = None, cosines: Array | None = None, sines: Array | None = None) -> tuple[Array, ...]:
        y: Array = allocate((x.size,), FLOAT32)
        told = heads.told(x.shape, bias, cosines, sines)
        if x.size:
            call(split, board, helpers, part, np.ascontiguousarray(x), *told, y, writes=(y,))
        return heads.split(y, x.shape)

    return run


@KERNELS.register("JoinedAttention", domain=OWN, types=_QUERY_KEY_VALUE, refuse=refuse_attention)
def joined_attention(node: NodeContext) -> Run:
    """As `Attention`, with its attributes, but each token's heads lie side by side in the result: [batch, N, heads · dim]."""
    attend = attend_by_token(node)

    def run(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        y = attend(q, k, v, mask)
        batch, queries, heads, dim = y.shape
        return y.reshape(batch, queries, heads * dim)  # type: ignore[no-any-return]

    return run
