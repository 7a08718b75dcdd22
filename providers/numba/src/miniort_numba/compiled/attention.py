"""softmax(scale · q · kᵀ, where the mask allows) · v for the few queries of a step: keys and values are read once, as fast as memory is."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import bytes_at, floats_at, words_at
from miniort_numba.compiled.exponential import exponential
from miniort_numba.compiled.multiply_add import add_rows, dot_products
from miniort_numba.options import LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share

FEW_ROWS = 3
"""So many queries of one key head, those of all its heads together, are few."""

ELEMENTS_PER_CHUNK = 1 << 15
"""Elements of keys and values that a chunk should have at least."""

_WORDS = 24
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
    """Units `begin` to `end`: a unit is a row of the batch and a head of keys, with the queries of all heads that share it."""
    words = carray(words_at(arguments), _WORDS)
    scale = carray(floats_at(words[4]), 1)[0]
    heads, kv_heads, queries, keys, size, width = words[5], words[6], words[7], words[8], words[9], words[10]
    q_row, q_head, q_step = words[11], words[12], words[13]  # strides in bytes
    k_row, k_head, v_row, v_head = words[14], words[15], words[16], words[17]
    mask_row, mask_head, mask_step = words[18], words[19], words[20]
    range_rows, range_heads = words[22], heads if mask_head else 1
    ranges = carray(words_at(words[21]), (range_rows, range_heads, queries, 3))
    group = heads // kv_heads
    scores = np.empty(keys, np.float32)
    scaled = np.empty(size, np.float32)
    sums = np.empty(width, np.float32)
    for unit in range(begin, end):
        row, kv_head = unit // kv_heads, unit % kv_heads
        key, value = words[1] + row * k_row + kv_head * k_head, words[2] + row * v_row + kv_head * v_head
        for r in range(group * queries):
            head, n = kv_head * group + r // queries, r % queries
            source = carray(floats_at(words[0] + row * q_row + head * q_head + n * q_step), size)
            for d in range(size):
                scaled[d] = source[d] * scale
            first, last, holes = ranges[row if range_rows > 1 else 0, head if range_heads > 1 else 0, n]
            s = scores[: last - first]
            dot_products(s, scaled, carray(floats_at(key + 4 * first * size), (last - first, size)), 0, last - first)
            if holes:
                hide(s, carray(bytes_at(words[3] + row * mask_row + head * mask_head + n * mask_step + first), s.size))
            total = softmax(s)
            sums[:] = 0
            add_rows(sums, s, carray(floats_at(value + 4 * first * width), (last - first, width)), 0, last - first)
            factor = np.float32(1) / total if total > 0 else np.float32(0)
            target = carray(floats_at(words[23] + 4 * ((row * queries + n) * heads + head) * width), width)
            for d in range(width):
                target[d] = sums[d] * factor


ATTEND = address_of(_attend)


@njit(**PLAIN)
def count_shown(mask: Array) -> int:
    """How many of a row's keys are shown. mask: [T] of 0 and 1."""
    shown = 0
    for t in range(mask.size):
        shown += mask[t]
    return shown


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
                    m = mask[row, head, n if mask.shape[2] > 1 else 0][:last]
                    while first < last and not m[first]:
                        first += 1
                    shown = count_shown(m)
                    if count_shown(m[first : first + shown]) == shown:  # one after the other, as in most masks
                        last = first + shown
                    else:
                        holes = 1
                        while not m[last - 1]:
                            last -= 1
                ranges[row, head, n, 0], ranges[row, head, n, 1], ranges[row, head, n, 2] = first, last, holes


@njit(**PLAIN)
def attend(board: int, helpers: int, part: int, q: Array, k: Array, v: Array, mask: Array, offset: int, scale: float, y: Array) -> None:
    """Write the attention of few queries into y. part: ATTEND.

    q: [B, H, N, D], k: [B, Hkv, T, D], v: [B, Hkv, T, E], rows of D and E without gaps, and those of k and v right after each other;
    mask: [B or 1, H or 1, N or 1, T] of 0 and 1, its rows without gaps, or of no size; offset: as for `find_ranges`; y: [B, N, H, E].
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    shared = mask.shape[2] == 1 and queries > 1
    mask_rows, mask_heads = (mask.shape[0], mask.shape[1]) if mask.size else (1, 1)
    ranges = np.empty((mask_rows, mask_heads, queries, 3), np.int64)
    find_ranges(mask, offset, keys, ranges)
    words, factor = np.empty(_WORDS, np.int64), np.empty(1, np.float32)
    factor[0] = scale
    words[0], words[1], words[2], words[3], words[4] = q.ctypes.data, k.ctypes.data, v.ctypes.data, mask.ctypes.data, factor.ctypes.data
    words[5], words[6], words[7], words[8], words[9], words[10] = heads, kv_heads, queries, keys, size, width
    words[11], words[12], words[13] = q.strides[0], q.strides[1], q.strides[2]
    words[14], words[15], words[16], words[17] = k.strides[0], k.strides[1], v.strides[0], v.strides[1]
    words[18] = mask.strides[0] if mask.shape[0] > 1 else 0
    words[19] = mask.strides[1] if mask.shape[1] > 1 else 0
    words[20] = 0 if shared else mask.strides[2]
    words[21], words[22], words[23] = ranges.ctypes.data, mask_rows, y.ctypes.data
    share(board, helpers, part, words.ctypes.data, batch * kv_heads, max(1, ELEMENTS_PER_CHUNK // max(1, keys * (size + width))))
    keep(words)
    keep(factor)
    keep(ranges)
