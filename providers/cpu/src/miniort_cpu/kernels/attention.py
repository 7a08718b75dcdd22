"""Scaled dot-product attention: Attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from ml_dtypes import finfo

from miniort.generation.cache import BlockedView, View
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType, dtype_from_onnx
from miniort_cpu.buffers import Allocate, copied
from miniort_cpu.floating_point import FLOAT64, as_dtype, compute_dtype, widen
from miniort_cpu.threads import Threads, threads_of

kernels = KernelTable("cpu")

QUERIES = 128
"""Queries of a head that are taken at a time, so that their scores stay in a core's cache from the product to the weighted sum."""

BYTES_PER_RANGE = 512 * 1024
"""Bytes of keys and values that a thread should have to read, where there are few queries: some 30 µs."""

FEW_ROWS = 4
"""So few queries of a key head are multiplied one by one: BLAS copies the keys for a product of matrices, which takes longer than to read
them from a core's cache again."""

HIDDEN = -1e30
"""What a float mask adds at most where it's meant to hide: the exponential of such a score is 0 beside any other."""

RAW, CAPPED, MASKED, NORMALIZED = range(4)
"""What `qk_matmul_output_mode` asks for: the scores as they are, after the soft cap, with the mask too, or after the softmax."""


@kernels.register("Attention", versions=(23, None), block_inputs=(1, 2))
def attention(node: NodeContext) -> Run:
    """softmax(scale · q · kᵀ + mask) · v (Vaswani et al. 2017, arXiv:1706.03762); a query that may see no key gives zeros.

    q: [batch, heads, N, dim] or [batch, N, heads · dim]; k, v: [batch, kv heads, M, dim] or [batch, M, kv heads · dim], heads a multiple
    of kv heads; mask: broadcasts to [batch, heads, N, T], bool (True: may see) or float (added), its last axis may be shorter;
    past key, value: [batch, kv heads, P, dim], put before k and v; valid: [batch] int64, how many keys of each row are no padding
    -> y: as q, with v's dim; present key, value: [batch, kv heads, T, dim], T = P + M; scores: [batch, heads, N, T]

    k and v may be views in blocks, whose arrays are then read where they are.
    """
    causal, mode = bool(node.attribute("is_causal", 0)), node.attribute("qk_matmul_output_mode", 0)
    softcap, scale = node.attribute("softcap", 0.0), node.attribute("scale", None)
    q_heads, kv_heads = node.attribute("q_num_heads", 0), node.attribute("kv_num_heads", 0)
    window = node.attribute("left_window_size", -1), node.attribute("right_window_size", -1)
    precision = node.attribute("softmax_precision", None)
    in_double = precision is not None and dtype_from_onnx(precision) == FLOAT64
    allocate, threads = node.provider.allocate, threads_of(node.provider)
    wants_present = any(output is not None for output in node.outputs[1:3])
    wants_scores = len(node.outputs) > 3 and node.outputs[3] is not None

    def run(
        q: Array,
        k: Array | BlockedView,
        v: Array | BlockedView,
        mask: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        valid: Array | None = None,
    ) -> Array | tuple[Array | BlockedView | None, ...]:
        packed = q.ndim == 3
        if packed:
            q, k, v = (_split_heads(np.asarray(x), count) for x, count in ((q, q_heads), (k, kv_heads), (v, kv_heads)))
        offset: int | Array = 0
        if past_key is not None and past_value is not None:
            offset = past_key.shape[2]
            k, v = _joined(allocate, past_key, np.asarray(k)), _joined(allocate, past_value, np.asarray(v))
        elif wants_present:
            k, v = copied(allocate, np.asarray(k)), copied(allocate, np.asarray(v))
        if past_key is None and valid is not None:
            offset = valid.reshape(-1, 1, 1, 1) - q.shape[2]
        factor = sqrt(1 / q.shape[3]) if scale is None else scale
        if mask is not None and q.shape[2] == 1 and mask.dtype == np.bool_ and mask.shape[-1] == k.shape[2] and not wants_scores:
            k, v, mask = _without_hidden_end(k, v, mask)
        # Beside the work of many queries, it costs little to gather keys and values that are in blocks.
        in_blocks = isinstance(k, BlockedView) or isinstance(v, BlockedView)
        plain = not (wants_scores or in_double or (in_blocks and q.shape[2] <= QUERIES))
        if plain and _is_large(threads, q, k, v):
            k, v = np.asarray(k), np.asarray(v)
            sight = _Sight(mask, causal, window, offset, valid, q.shape[2], k.shape[2])
            y = _attend(allocate, threads, q, k, v, factor, softcap, sight, packed)
            return (y, k, v) if wants_present else y

        kept: Array | None = None  # the scores that were asked for
        scores = _scores(allocate, q, k, factor)
        if wants_scores and mode == RAW:
            kept = scores.astype(q.dtype)
        if softcap:
            np.divide(scores, softcap, out=scores)
            np.tanh(scores, out=scores)
            np.multiply(scores, softcap, out=scores)
        if wants_scores and mode == CAPPED:
            kept = scores.astype(q.dtype)
        _apply_masks(scores, mask, causal, window, offset, valid)
        if wants_scores and mode == MASKED:
            kept = scores.astype(q.dtype)
        if in_double:
            scores = scores.astype(FLOAT64)

        may_hide = mask is not None or valid is not None or causal or max(window) >= 0
        weights, total = _exponentials(scores, may_hide)
        if wants_scores and mode == NORMALIZED:
            kept = np.divide(weights, total, out=...).astype(q.dtype)
        y = _weighted_sum(allocate, weights, total, v, q.dtype, packed)
        return (y, k, v, kept) if wants_present or wants_scores else y

    return run


def _without_hidden_end(k: View, v: View, mask: Array) -> tuple[View, View, Array | None]:
    """Keys, values and mask up to the last key that somebody sees; no mask where nothing is hidden, as in most steps of generation.

    A step that's recorded for all lengths has room for tokens that are yet to come.
    """
    keys = mask.shape[-1]
    if keys:
        rows = mask.reshape(-1, keys)
        seen: Array = rows[0] if len(rows) == 1 else np.logical_or.reduce(rows, 0)
        last = keys - int(seen[::-1].argmax())
    else:
        last = 0
    if last < keys and not (isinstance(k, BlockedView) or isinstance(v, BlockedView)):
        k, v, mask = k[:, :, :last], v[:, :, :last], mask[..., :last]
    return k, v, None if mask.all() else mask


def _is_large(threads: Threads, q: Array, k: Array | BlockedView, v: Array | BlockedView) -> bool:
    """Whether there's enough to do to take it in parts.

    One query isn't, while BLAS has its threads: they wait in a loop for the next product, on the cores that ours would run on.
    """
    if q.shape[2] == 1 and not threads.divides_products():
        return False
    return q.shape[2] > QUERIES or threads.ranges(_bytes_read(q, k, v), BYTES_PER_RANGE) > 1


def _bytes_read(q: Array, k: Array | BlockedView, v: Array | BlockedView) -> int:
    """Bytes of keys, values and scores."""
    batch, heads, count, _ = q.shape
    return int(k.nbytes + v.nbytes + 4 * batch * heads * count * k.shape[2])


@dataclass(frozen=True)
class _Sight:
    """Which keys each query may see. `offset`: how many keys come before the first query's own, one number or [batch, 1, 1, 1]."""

    mask: Array | None
    causal: bool
    window: tuple[int, int]
    offset: int | Array
    valid: Array | None
    queries: int
    keys: int

    @property
    def is_common(self) -> bool:
        """Whether it's the same for all rows of the batch and all heads."""
        one = self.mask is None or self.mask.ndim < 3 or all(size == 1 for size in self.mask.shape[:-2])
        return one and self.valid is None and isinstance(self.offset, int)

    def part(self, row: int, heads: slice, start: int, end: int) -> _Part:
        """What the queries from `start` to before `end` see, in one row of the batch and some heads."""
        offset = self.offset if isinstance(self.offset, int) else int(self.offset[row, 0, 0, 0])
        first, last = 0, self.keys
        if self.valid is not None:
            last = min(last, int(self.valid.ravel()[row]))
        left, right = self.window
        ahead = min([limit for limit, given in ((0, self.causal), (right, right >= 0)) if given], default=None)
        if ahead is not None:
            last = min(last, offset + end + ahead)
        if left >= 0:
            first = max(first, offset + start - left)
        mask = self._mask(row, heads, start, end)
        if mask is not None:
            last = min(last, mask.shape[-1])
        first, last = min(first, max(last, 0)), max(last, 0)
        hidden: Array | None = None
        added: Array | None = None
        if mask is not None:
            mask = mask[..., first:last]
            if mask.dtype == np.bool_ and mask.all():
                mask = None
        if mask is not None and last > first:
            visible = mask if mask.dtype == np.bool_ else mask > max(HIDDEN, float(finfo(mask.dtype).min))  # type: ignore[no-untyped-call]
            # A query whose keys are all hidden by a float mask still weighs them, by what it adds: none of them can be left out then.
            if mask.dtype == np.bool_ or (ahead is None and left < 0 and visible.any(axis=-1).all()):
                seen = np.flatnonzero(visible.any(axis=tuple(range(visible.ndim - 1))))
                begin, stop = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
                mask, first, last = mask[..., begin:stop], first + begin, first + stop
            if mask.dtype != np.bool_:
                added = mask
            elif not mask.all():
                hidden = ~mask
        key = np.arange(first, last)
        position = offset + np.arange(start, end)[:, None]
        if ahead is not None and last > offset + start + ahead + 1:
            beyond = key > position + ahead
            hidden = beyond if hidden is None else hidden | beyond
        if left >= 0 and first < offset + end - 1 - left:
            behind = key < position - left
            hidden = behind if hidden is None else hidden | behind
        return _Part(first, last, hidden, added)

    def _mask(self, row: int, heads: slice, start: int, end: int) -> Array | None:
        """The mask of these queries, [heads or 1, end - start or 1, keys or fewer]."""
        mask = self.mask
        if mask is None:
            return None
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = mask[row if mask.shape[0] > 1 else 0]
        mask = mask[heads] if mask.shape[0] > 1 else mask
        part: Array = mask[:, start:end] if mask.shape[1] > 1 else mask
        return part


@dataclass(frozen=True)
class _Part:
    """What some queries see: keys from `first` to before `last`, but those `hidden`, with `added` to the scores; both broadcast to them."""

    first: int
    last: int
    hidden: Array | None
    added: Array | None


def _attend(
    allocate: Allocate, threads: Threads, q: Array, k: Array, v: Array, scale: float, softcap: float, sight: _Sight, packed: bool
) -> Array:
    """Attention without its by-products. q: [B, H, N, D]; k, v: [B, Hkv, T, D] -> [B, H, N, D], packed [B, N, H · D].

    Each head's queries are taken some at a time, with those keys alone that one of them sees; threads share heads and queries.
    """
    batch, heads, count, _ = q.shape
    kv_heads, size = k.shape[1], v.shape[3]
    group = heads // kv_heads
    wide = compute_dtype(q.dtype)
    y = allocate((batch, count, heads, size) if packed else (batch, heads, count, size), wide)
    target = y.transpose(0, 2, 1, 3) if packed else y
    rows = [slice(start, min(start + QUERIES, count)) for start in range(0, count, QUERIES)]
    common = [sight.part(0, slice(None), part.start, part.stop) for part in rows] if sight.is_common else None

    def compute(row: int, heads_of_keys: slice, index: int) -> None:
        """Some key heads of one row of the batch, and the queries of block `index`."""
        part, of_queries = rows[index], slice(heads_of_keys.start * group, heads_of_keys.stop * group)
        seen = sight.part(row, of_queries, part.start, part.stop) if common is None else common[index]
        out = target[row, of_queries, part]
        if seen.last == seen.first:
            out.fill(0)
            return
        keys, values = (x[row, heads_of_keys, seen.first : seen.last] for x in (k, v))
        queries = np.multiply(widen(q[row, of_queries, part]), scale, order="C", dtype=wide, casting="unsafe")
        # The queries of all heads that share a key head are the rows of one product, so that keys are never repeated.
        grouped = queries.reshape(len(keys), -1, queries.shape[2])
        scores = _dot_products(grouped, widen(keys), np.empty((*grouped.shape[:2], keys.shape[1]), wide))
        by_head = scores.reshape(*queries.shape[:2], -1)
        if softcap:
            np.divide(scores, softcap, out=scores)
            np.tanh(scores, out=scores)
            np.multiply(scores, softcap, out=scores)
        if seen.added is not None:
            np.add(by_head, seen.added, out=by_head)
        if seen.hidden is not None:
            np.copyto(by_head, -np.inf, where=seen.hidden)
        weights, total = _exponentials(scores, seen.added is not None or seen.hidden is not None)
        sums = np.matmul(weights, as_dtype(values, wide))
        np.divide(sums.reshape(*queries.shape[:2], size), total.reshape(*queries.shape[:2], 1), out=out)

    if len(rows) == 1:  # few queries: as many heads at once as a range has
        smallest = max(1, batch * kv_heads * BYTES_PER_RANGE // _bytes_read(q, k, v))
        for row in range(batch):
            threads.split(kv_heads, smallest, lambda first, last, row=row: compute(row, slice(first, last), 0))  # type: ignore[misc]
    else:
        places = [(row, slice(head, head + 1), index) for row in range(batch) for head in range(kv_heads) for index in range(len(rows))]

        def compute_some(start: int, end: int) -> None:
            for place in places[start:end]:
                compute(*place)

        threads.split(len(places), 1, compute_some)
    return as_dtype(y.reshape(batch, count, heads * size) if packed else y, q.dtype)


def _split_heads(x: Array, heads: int) -> Array:
    """[batch, time, heads · dim] -> [batch, heads, time, dim], a view."""
    batch, time, width = x.shape
    return x.reshape(batch, time, heads, width // heads).transpose(0, 2, 1, 3)


def _joined(allocate: Allocate, past: Array, new: Array) -> Array:
    """[batch, heads, P, dim] and [batch, heads, M, dim] -> [batch, heads, P + M, dim]."""
    batch, heads, length, size = past.shape
    return np.concatenate((past, new), 2, allocate((batch, heads, length + new.shape[2], size), past.dtype))


def _scores(allocate: Allocate, q: Array, k: Array | BlockedView, scale: float) -> Array:
    """`scale` · q · kᵀ. q: [B, H, N, D]; k: [B, Hkv, T, D] -> [B, H, N, T].

    The queries of all heads that share a key head are the rows of one product, so that keys are never repeated. Keys in blocks fill the
    scores block by block: they're so much smaller than the keys that one softmax over all of them is cheaper than a running one.
    """
    batch, heads, count, size = q.shape
    kv_heads, length = k.shape[1:3]
    dtype = compute_dtype(q.dtype)
    scaled = np.multiply(widen(q), scale, out=allocate(q.shape, dtype))
    grouped = scaled.reshape(batch, kv_heads, heads // kv_heads * count, size)
    scores = allocate((*grouped.shape[:3], length), dtype)
    if isinstance(k, BlockedView):
        for rows, start, keys in k.blocks:
            _dot_products(grouped[rows], widen(keys), scores[rows, ..., start : start + keys.shape[2]])
    else:
        _dot_products(grouped, widen(k), scores)
    return scores.reshape(batch, heads, count, length)


def _dot_products(queries: Array, keys: Array, out: Array) -> Array:
    """queries · keysᵀ, written into `out` and given back. queries: [..., R, D]; keys: [..., T, D] -> [..., R, T]."""
    if 1 < queries.shape[-2] <= FEW_ROWS:
        for row in range(queries.shape[-2]):
            one = (..., slice(row, row + 1), slice(None))
            np.matmul(queries[one], keys.swapaxes(-1, -2), out[one])
    else:
        np.matmul(queries, keys.swapaxes(-1, -2), out)
    return out


def _apply_masks(
    scores: Array, mask: Array | None, causal: bool, window: tuple[int, int], offset: int | Array, valid: Array | None
) -> None:
    """Add a float mask to the scores, and set those to -inf that a query may not see. scores: [B, H, N, T], written in place.

    offset: how many keys come before the first query's own, one number or [B, 1, 1, 1].
    """
    count, length = scores.shape[2:]
    allowed: list[Array] = []
    if mask is not None:
        covered = mask.shape[-1]
        if mask.dtype == np.bool_:
            np.copyto(scores[..., :covered], -np.inf, where=~mask)
        else:
            np.add(scores[..., :covered], mask, out=scores[..., :covered])
        scores[..., covered:] = -np.inf
    key = np.arange(length)
    left, right = window
    if (causal and not (count == 1 and isinstance(offset, int) and offset == length - 1)) or left >= 0 or right >= 0:
        position = offset + np.arange(count)[:, None]  # of each query, counted like the keys: [N, 1] or [B, 1, N, 1]
        if causal:
            allowed.append(key <= position)
        if left >= 0:
            allowed.append(key >= position - left)
        if right >= 0:
            allowed.append(key <= position + right)
    if valid is not None:
        allowed.append(key < valid.reshape(-1, 1, 1, 1))
    for seen in allowed:
        np.copyto(scores, -np.inf, where=~seen)


def _exponentials(scores: Array, may_hide: bool = True) -> tuple[Array, Array]:
    """exp(scores - their maximum), in place, and its sum: [..., T] -> [..., T], [..., 1]. Where all are -inf: zeros, and a sum of 1.

    may_hide: whether there may be such rows; there are where there are no keys at all.
    """
    may_hide = may_hide or scores.shape[-1] == 0
    peak = np.maximum.reduce(scores, -1, keepdims=True, initial=-np.inf)
    if may_hide:
        np.copyto(peak, 0, where=np.isneginf(peak))
    np.subtract(scores, peak, out=scores)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, -1, keepdims=True)
    if may_hide:
        np.copyto(total, 1, where=total == 0)
    return scores, total


def _weighted_sum(allocate: Allocate, weights: Array, total: Array, v: Array | BlockedView, dtype: DType, packed: bool) -> Array:
    """`weights` · v / total. weights: [B, H, N, T]; total: [B, H, N, 1]; v: [B, Hkv, T, D] -> [B, H, N, D], packed [B, N, H · D].

    Dividing after the product costs D divisions per query instead of T, and puts the heads where they belong on the way.
    """
    batch, heads, count, length = weights.shape
    kv_heads, size = v.shape[1], v.shape[3]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads * count, length)
    sums = allocate((*grouped.shape[:3], size), weights.dtype)
    if isinstance(v, BlockedView):
        sums.fill(0)
        for rows, start, values in v.blocks:
            sums[rows] += np.matmul(grouped[rows, ..., start : start + values.shape[2]], as_dtype(values, weights.dtype))
    else:
        np.matmul(grouped, as_dtype(v, weights.dtype), sums)
    sums = sums.reshape(batch, heads, count, size)
    if not packed:
        return as_dtype(np.divide(sums, total, out=sums), dtype)
    y = allocate((batch, count, heads, size), weights.dtype)
    np.divide(sums, total, out=y.transpose(0, 2, 1, 3))
    return as_dtype(y.reshape(batch, count, heads * size), dtype)
