"""Attention of one query for each head: a step of generation. Keys and values are read once, from front to back.

A unit of work is a part of one head's keys, so that few heads keep all threads busy, too. Each unit takes the softmax of its own part; the
parts are put together at the end (Dao et al. 2023, Flash-Decoding).
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import bytes_at, floats_at, words_at
from miniort_numba.compiled.attention import find_ranges, hide, largest, softmax
from miniort_numba.compiled.row_products import add_values, multiply_keys
from miniort_numba.compiled.tiles import LANES
from miniort_numba.options import LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share

UNITS_PER_THREAD = 4
"""Units for each thread, so that one that's slower than the others takes fewer of them."""

KEYS = 128
"""Keys that a part should have at least."""

ELEMENTS_TOGETHER = 8192
"""Elements of keys, or of values, that all queries of a key head are multiplied with in turn, while they're in the first cache."""

_WORDS = 22
_HIDDEN = np.float32(-np.inf)


@njit(**LOOP)
def add_scaled(y: Array, factor: float, x: Array) -> None:
    """y += factor · x. x, y: [n]."""
    for i in range(y.size):
        y[i] += factor * x[i]


@cfunc(PART, cache=True, error_model="numpy")
def _attend_parts(arguments: int, begin: int, end: int) -> None:
    """Units `begin` to `end`: a part of the keys of a head in a row of the batch. Gives each query's peak, total and weighted sum."""
    words = carray(words_at(arguments), _WORDS)
    scale = carray(floats_at(words[4]), 1)[0]
    heads, kv_heads, keys, size, width, parts = words[5], words[6], words[7], words[8], words[9], words[10]
    group = heads // kv_heads
    range_rows, range_heads = words[20], words[21]
    ranges = carray(words_at(words[19]), (range_rows, range_heads, 1, 3))
    length = -(-keys // parts)
    block = max(LANES, ELEMENTS_TOGETHER // max(1, size, width) // LANES * LANES)
    q, scores, places = np.empty((group, size), np.float32), np.empty((group, length), np.float32), np.empty((group, 2), np.int64)
    for unit in range(begin, end):
        row, rest = unit // (kv_heads * parts), unit % (kv_heads * parts)
        kv_head, part = rest // parts, rest % parts
        base = part * length
        keys_at = words[1] + row * words[13] + kv_head * words[14]
        values_at = words[2] + row * words[15] + kv_head * words[16]
        results = carray(floats_at(words[18] + 4 * unit * group * (2 + width)), (group, 2 + width))
        low, high = base + length, base
        for i in range(group):
            head = kv_head * group + i
            seen = ranges[row if range_rows > 1 else 0, head if range_heads > 1 else 0, 0]
            first, last = max(seen[0], base), min(seen[1], base + length)
            places[i, 0], places[i, 1] = first, max(first, last)
            if first < last:
                low, high = min(low, first), max(high, last)
            source = carray(floats_at(words[0] + row * words[11] + head * words[12]), size)
            for d in range(size):
                q[i, d] = source[d] * scale
        for start in range(low, high, block):
            for i in range(group):
                first, last = max(places[i, 0], start), min(places[i, 1], start + block)
                if first < last:
                    key = carray(floats_at(keys_at + 4 * first * size), (last - first, size))
                    multiply_keys(scores[i, first - base : last - base], q[i], key)
        for i in range(group):
            head, first, last = kv_head * group + i, places[i, 0], places[i, 1]
            own, result = scores[i, first - base : last - base], results[i]
            if ranges[row if range_rows > 1 else 0, head if range_heads > 1 else 0, 0, 2]:
                mask = words[3] + row * (words[17] & 0xFFFFFFFF) + head * (words[17] >> 32) + first
                hide(own, carray(bytes_at(mask), last - first))
            result[0] = largest(own)
            result[1] = softmax(own)
            result[2:] = 0
        for start in range(low, high, block):
            for i in range(group):
                first, last = max(places[i, 0], start), min(places[i, 1], start + block)
                if first < last:
                    value = carray(floats_at(values_at + 4 * first * width), (last - first, width))
                    add_values(results[i, 2:], scores[i, first - base : last - base], value)


ATTEND_PARTS = address_of(_attend_parts)


@njit(**PLAIN)
def attend_one_query(board: int, helpers: int, part: int, q: Array, k: Array, v: Array, mask: Array, scale: float, y: Array) -> None:
    """Write attention into y. part: ATTEND_PARTS.

    q: [B, H, 1, D], k: [B, Hkv, T, D], v: [B, Hkv, T, E], rows of D and E without gaps, and those of k and v right after each other;
    mask: [B or 1, H or 1, 1, T] of 0 and 1, its rows without gaps, or of no size; y: [B, 1, H, E].
    """
    batch, heads, _, size = q.shape
    kv_heads, width = k.shape[1], v.shape[3]
    group = heads // kv_heads
    mask_rows, mask_heads = (mask.shape[0], mask.shape[1]) if mask.size else (1, 1)
    ranges = np.empty((mask_rows, mask_heads, 1, 3), np.int64)
    find_ranges(mask, -1, k.shape[2], ranges)
    keys = ranges[:, :, :, 1].max()  # all behind them is hidden: a recorded step has room for tokens that are yet to come
    parts = max(1, min(keys // KEYS, -(-UNITS_PER_THREAD * (helpers + 1) // (batch * kv_heads))))
    units = batch * kv_heads * parts
    results = np.empty((batch, kv_heads, parts, group, 2 + width), np.float32)
    words, factor = np.empty(_WORDS, np.int64), np.empty(1, np.float32)
    factor[0] = scale
    words[0], words[1], words[2], words[3], words[4] = q.ctypes.data, k.ctypes.data, v.ctypes.data, mask.ctypes.data, factor.ctypes.data
    words[5], words[6], words[7], words[8], words[9], words[10] = heads, kv_heads, keys, size, width, parts
    words[11], words[12], words[13], words[14], words[15], words[16] = (
        q.strides[0],
        q.strides[1],
        k.strides[0],
        k.strides[1],
        v.strides[0],
        v.strides[1],
    )
    words[17] = (mask.strides[0] if mask.shape[0] > 1 else 0) | (mask.strides[1] if mask.shape[1] > 1 else 0) << 32
    words[18], words[19], words[20], words[21] = results.ctypes.data, ranges.ctypes.data, mask_rows, mask_heads
    share(board, helpers, part, words.ctypes.data, units, 1)
    keep(words)
    keep(factor)
    keep(ranges)
    for row in range(batch):
        for head in range(heads):
            own = results[row, head // group, :, head % group]
            peak = _HIDDEN
            for p in range(parts):
                peak = max(peak, own[p, 0])
            target = y[row, 0, head]
            target[:] = 0
            total = np.float32(0)
            for p in range(parts):
                if own[p, 1] != 0:
                    weight = np.float32(np.exp(own[p, 0] - peak))
                    total += weight * own[p, 1]
                    add_scaled(target, weight, own[p, 2:])
            if total != 0:
                for d in range(width):
                    target[d] /= total
