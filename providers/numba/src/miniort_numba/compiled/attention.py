"""softmax(scale · q · kᵀ, where the mask allows) · v, a block of queries at a time, whose scores stay in a core's cache."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import bytes_at, floats_at, words_at
from miniort_numba.compiled.exponential import exponential
from miniort_numba.compiled.multiply_add import add_rows, dot_products
from miniort_numba.compiled.tiles import add_product, add_strips
from miniort_numba.options import LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share

KEYS = 64
"""Keys that are transposed at a time, so that a block of scores is a product whose rows lie as vector registers want them."""

SCORES = 1 << 16
"""Scores that a block of queries may have: 256 KB, which a core's second cache holds."""

FEW_ROWS = 3
"""So few queries of one key head read the keys as they lie, one dot product each: they're as fast as memory is."""

ELEMENTS_PER_CHUNK = 1 << 15
"""Elements of keys and values that a chunk should have at least, where there are few queries."""

_WORDS = 25
_HIDDEN = np.float32(-np.inf)


@njit(**PLAIN, fastmath=True)
def largest(s: Array) -> np.float32:
    """The largest of s, -inf of none; which number it is where there's NaN among them isn't said. s: [T]."""
    peak = np.float32(-np.inf)
    for t in range(s.size):
        peak = s[t] if s[t] > peak else peak
    return peak


@njit(**LOOP)
def softmax(s: Array) -> np.float32:
    """s becomes exp(s - their maximum); gives the sum. What is -inf becomes 0. s: [T]."""
    peak = largest(s)
    if peak == _HIDDEN:
        s[:] = 0
        return np.float32(0)
    total = np.float32(0)
    for t in range(s.size):
        e = exponential(s[t] - peak)
        s[t] = e
        total += e
    return total


@njit(**PLAIN)
def hide(s: Array, mask: Array) -> None:
    """s becomes -inf where the mask is 0. s, mask: [T]."""
    for t in range(s.size):
        s[t] = s[t] if mask[t] else _HIDDEN


@cfunc(PART, cache=True, error_model="numpy")
def _attend(arguments: int, begin: int, end: int) -> None:
    """Units `begin` to `end`: a unit is a row of the batch, a head of keys, and a block of queries of all heads that share it."""
    words = carray(words_at(arguments), _WORDS)
    scale = carray(floats_at(words[4]), 1)[0]
    heads, kv_heads, queries, keys, size, width, block = words[5], words[6], words[7], words[8], words[9], words[10], words[11]
    q_row, q_head, q_step = words[12], words[13], words[14]  # strides in bytes
    k_row, k_head, v_row, v_head = words[15], words[16], words[17], words[18]
    mask_row, mask_head, mask_step = words[19], words[20], words[21]
    group = heads // kv_heads
    blocks = (queries + block - 1) // block
    most = group * block
    range_rows, range_heads = words[23], heads if mask_head else 1
    ranges = carray(words_at(words[22]), (range_rows, range_heads, queries, 3))
    row_size = (keys + KEYS - 1) // KEYS * KEYS  # of the scores, and so there's room for the last keys as many as are turned at a time
    scores_memory = np.empty(most * row_size + KEYS, np.float32)
    scores = carray(floats_at(scores_memory.ctypes.data), (most, row_size))
    q_block = np.empty((most, size), np.float32)
    sums = np.empty((most, width), np.float32)
    turned = np.empty((size, KEYS), np.float32)
    totals = np.empty(most, np.float32)
    for unit in range(begin, end):
        row, rest = unit // (kv_heads * blocks), unit % (kv_heads * blocks)
        kv_head, start = rest // blocks, rest % blocks * block
        count = min(block, queries - start)
        rows = group * count
        key = carray(floats_at(words[1] + row * k_row + kv_head * k_head), (keys, size))
        value = carray(floats_at(words[2] + row * v_row + kv_head * v_head), (keys, width))
        first, last = keys, 0
        for i in range(group):
            for n in range(count):
                head = kv_head * group + i
                source = carray(floats_at(words[0] + row * q_row + head * q_head + (start + n) * q_step), size)
                for d in range(size):
                    q_block[i * count + n, d] = source[d] * scale
                seen = ranges[row if range_rows > 1 else 0, head if range_heads > 1 else 0, start + n]
                first, last = min(first, seen[0]), max(last, seen[1])
        first = min(first, last)
        if rows <= FEW_ROWS:
            seen_keys = carray(floats_at(key.ctypes.data + 4 * first * size), (last - first, size))
            for r in range(rows):
                dot_products(scores[r], q_block[r], seen_keys, 0, last - first)
        else:
            for t in range(first, last, KEYS):
                stop = min(KEYS, last - t)
                for j in range(stop):
                    one = key[t + j]
                    for d in range(size):
                        turned[d, j] = one[d]
                part = scores_memory.ctypes.data + 4 * (t - first)
                for r in range(rows):
                    scores[r, t - first : t - first + KEYS] = 0
                add_strips(part, row_size, q_block.ctypes.data, size, turned.ctypes.data, KEYS, rows, size, KEYS)
        for i in range(group):
            head = kv_head * group + i
            for n in range(count):
                r = i * count + n
                seen = ranges[row if range_rows > 1 else 0, head if range_heads > 1 else 0, start + n]
                s = scores[r]
                begun, ended = seen[0] - first, seen[1] - first
                own = s[max(begun, 0) : max(begun, ended, 0)]
                if seen[2]:
                    mask = words[3] + row * mask_row + head * mask_head + (start + n) * mask_step + seen[0]
                    hide(own, carray(bytes_at(mask), own.size))
                totals[r] = softmax(own)
                s[: min(begun, last - first)] = 0
                s[max(ended, 0) : last - first] = 0
        values = carray(floats_at(value.ctypes.data + 4 * first * width), (last - first, width))
        sums[:rows] = 0
        if rows <= FEW_ROWS:
            for r in range(rows):
                add_rows(sums[r], scores[r], values, 0, last - first)
        else:
            add_product(sums, scores, values, rows, last - first, width)
        for i in range(group):
            head = kv_head * group + i
            for n in range(count):
                r = i * count + n
                target = carray(floats_at(words[24] + 4 * ((row * queries + start + n) * heads + head) * width), width)
                factor = np.float32(1) / totals[r] if totals[r] > 0 else np.float32(0)
                for d in range(width):
                    target[d] = sums[r, d] * factor


ATTEND = address_of(_attend)


@njit(**PLAIN)
def find_ranges(mask: Array, offset: int, keys: int, ranges: Array) -> None:
    """What each query sees: the first key, the last and one, and whether some between them are hidden.

    mask: [B, H, N, T] or of no size, where there's none; offset: how many keys come before the first query's own, or -1 where queries
    see keys after their own, too; ranges: [B, H, N, 3], written.
    """
    batch, heads, queries, _ = ranges.shape
    for row in range(batch):
        for head in range(heads):
            for n in range(queries):
                first, last = 0, keys if offset < 0 else min(keys, offset + n + 1)
                holes = 0
                if mask.size:
                    m = mask[row, head, n if mask.shape[2] > 1 else 0]
                    while last > 0 and not m[last - 1]:
                        last -= 1
                    while first < last and not m[first]:
                        first += 1
                    shown = 0
                    for t in range(first, last):
                        shown += m[t]
                    holes = 1 if shown < last - first else 0
                ranges[row, head, n, 0], ranges[row, head, n, 1], ranges[row, head, n, 2] = first, last, holes


@njit(**PLAIN)
def attend(board: int, helpers: int, part: int, q: Array, k: Array, v: Array, mask: Array, offset: int, scale: float, y: Array) -> None:
    """Write attention into y. part: ATTEND.

    q: [B, H, N, D], k: [B, Hkv, T, D], v: [B, Hkv, T, E], rows of D and E without gaps, and those of k and v right after each other;
    mask: [B or 1, H or 1, N or 1, T] of 0 and 1, its rows without gaps, or of no size; offset: as for `find_ranges`; y: [B, N, H, E].
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    block = max(1, min(queries, min(64, max(4, SCORES // max(1, keys))) // group))
    shared = mask.shape[2] == 1 and queries > 1
    mask_rows, mask_heads = (mask.shape[0], mask.shape[1]) if mask.size else (1, 1)
    ranges = np.empty((mask_rows, mask_heads, queries, 3), np.int64)
    find_ranges(mask, offset, keys, ranges)
    words, factor = np.empty(_WORDS, np.int64), np.empty(1, np.float32)
    factor[0] = scale
    words[0], words[1], words[2], words[3], words[4] = q.ctypes.data, k.ctypes.data, v.ctypes.data, mask.ctypes.data, factor.ctypes.data
    words[5], words[6], words[7], words[8], words[9], words[10], words[11] = heads, kv_heads, queries, keys, size, width, block
    words[12], words[13], words[14] = q.strides[0], q.strides[1], q.strides[2]
    words[15], words[16], words[17], words[18] = k.strides[0], k.strides[1], v.strides[0], v.strides[1]
    words[19] = mask.strides[0] if mask.shape[0] > 1 else 0
    words[20] = mask.strides[1] if mask.shape[1] > 1 else 0
    words[21] = 0 if shared else mask.strides[2]
    words[22], words[23], words[24] = ranges.ctypes.data, mask_rows, y.ctypes.data
    units = batch * kv_heads * ((queries + block - 1) // block)
    work = max(1, keys * (size + width) * max(1, group * block // 4))
    share(board, helpers, part, words.ctypes.data, units, max(1, ELEMENTS_PER_CHUNK // work))
    keep(words)
    keep(factor)
    keep(ranges)
