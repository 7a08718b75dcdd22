"""softmax(scale · q · kᵀ, where the mask allows) · v for many queries: strips of queries and blocks of keys, in a core's first cache.

Scores are kept turned, with a row for each key and a column for each query. So keys and values are read as they lie, only the queries have
to be turned, and the softmax goes down the columns. From one block of keys to the next, what has been summed up is scaled to the new
maximum (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import add_to_word, bytes_at, floats_at, words_at
from miniort_numba.compiled.attention import find_ranges
from miniort_numba.compiled.columns import exponentials_of_columns, raise_to_maxima
from miniort_numba.compiled.exponential import exponential
from miniort_numba.compiled.tiles import STRIP, add_turned_strip, set_strip
from miniort_numba.options import PLAIN
from miniort_numba.team import PART, address_of, keep, share

KEYS = 256
"""Keys of a block: their scores with a strip of queries take 32 KB."""

_WORDS = 29
_HIDDEN = np.float32(-np.inf)


@njit(**PLAIN)
def turn_query(source: Array, scale: np.float32, turned: Array, column: int) -> None:
    """turned[:, column] = scale · source. source: [D], turned: [D, STRIP]."""
    for d in range(source.size):
        turned[d, column] = scale * source[d]


@njit(**PLAIN)
def hide_outside(s: Array, column: int, begun: int, ended: int) -> None:
    """s[:, column] becomes -inf before the key `begun` and from `ended` on. s: [keys, STRIP]."""
    keys = s.shape[0]
    for t in range(min(max(begun, 0), keys)):
        s[t, column] = _HIDDEN
    for t in range(min(max(ended, 0), keys), keys):
        s[t, column] = _HIDDEN


@njit(**PLAIN)
def hide_holes(s: Array, column: int, mask: Array) -> None:
    """s[:, column] becomes -inf where the mask is 0. s: [keys, STRIP], mask: [keys]."""
    for t in range(mask.size):
        if mask[t] == 0:
            s[t, column] = _HIDDEN


@njit(**PLAIN)
def scale_to_new_maxima(totals: Array, sums: Array, shifts: Array, peaks: Array) -> None:
    """Sums with exp(s - old shift) become sums with exp(s - new shift). totals, shifts, peaks: [STRIP]; sums: [STRIP, E].

    A shift is the maximum, one of `peaks`, or 0 as long as all scores are hidden.
    """
    for r in range(totals.size):
        shift = peaks[r] if peaks[r] != _HIDDEN else np.float32(0)
        if shift != shifts[r]:
            factor = exponential(shifts[r] - shift) if totals[r] != 0 else np.float32(0)
            totals[r] *= factor
            row = sums[r]
            for d in range(row.size):
                row[d] *= factor
            shifts[r] = shift


@cfunc(PART, cache=True, error_model="numpy")
def _attend_by_strips(arguments: int, begin: int, end: int) -> None:
    """What one worker does: it takes units as long as there are any, the last ones first, as they see the most keys where they're causal.

    A unit is a row of the batch, a head of keys, and a strip of the queries of all heads that share it, one head's behind the other's.
    """
    words = carray(words_at(arguments), _WORDS)
    scale = carray(floats_at(words[4]), 1)[0]
    heads, kv_heads, queries, size, width = words[5], words[6], words[7], words[8], words[9]
    q_row, q_head, q_step = words[10], words[11], words[12]  # strides in bytes
    k_row, k_head, k_step = words[13], words[14], words[15]
    v_row, v_head, v_step = words[16], words[17], words[18]
    mask_row, mask_head, mask_step = words[19], words[20], words[21]
    range_rows, range_heads, keys_in_all, units = words[23], words[24], words[25], words[27]
    ranges = carray(words_at(words[22]), (range_rows, range_heads, queries, 3))
    group = heads // kv_heads
    strips = (group * queries + STRIP - 1) // STRIP
    whole, padded = width // STRIP * STRIP, (width + STRIP - 1) // STRIP * STRIP
    turned = np.zeros((size, STRIP), np.float32)
    scores = np.empty((KEYS, STRIP), np.float32)
    sums = np.empty((STRIP, padded), np.float32)
    rest = np.zeros((KEYS if whole < width else 0, STRIP), np.float32)  # the last columns of v, where they don't fill a strip
    peaks, totals, shifts = np.empty(STRIP, np.float32), np.empty(STRIP, np.float32), np.empty(STRIP, np.float32)
    seen = np.empty((STRIP, 3), np.int64)
    while True:
        unit = units - 1 - add_to_word(words[28], 1)
        if unit < 0:
            break
        row, kv_head, start = unit // (kv_heads * strips), unit // strips % kv_heads, unit % strips * STRIP
        count = min(STRIP, group * queries - start)
        key, value = words[1] + row * k_row + kv_head * k_head, words[2] + row * v_row + kv_head * v_head
        first, last = keys_in_all, 0
        for r in range(count):
            head, n = kv_head * group + (start + r) // queries, (start + r) % queries
            turn_query(carray(floats_at(words[0] + row * q_row + head * q_head + n * q_step), size), scale, turned, r)
            seen[r] = ranges[row if range_rows > 1 else 0, head if range_heads > 1 else 0, n]
            first, last = min(first, seen[r, 0]), max(last, seen[r, 1])
        peaks[:] = _HIDDEN
        totals[:] = 0
        shifts[:] = 0
        sums[:] = 0
        rows = min(STRIP, (count + 3) // 4 * 4)  # tiles of one row are slow, and there's room for more
        for t in range(first, last, KEYS):
            keys = min(KEYS, last - t)
            s = scores[:keys]
            set_strip(s.ctypes.data, STRIP, key + t * k_step, k_step // 4, turned.ctypes.data, STRIP, keys, size)
            for r in range(count):
                begun, ended, holes = seen[r]
                if begun > t or ended < t + keys:
                    hide_outside(s, r, begun - t, ended - t)
                if holes:
                    head, n = kv_head * group + (start + r) // queries, (start + r) % queries
                    hide_holes(s, r, carray(bytes_at(words[3] + row * mask_row + head * mask_head + n * mask_step + t), keys))
            raise_to_maxima(peaks.ctypes.data, s.ctypes.data, STRIP, keys)
            scale_to_new_maxima(totals, sums, shifts, peaks)
            exponentials_of_columns(totals.ctypes.data, s.ctypes.data, STRIP, keys, shifts.ctypes.data)
            for d in range(0, whole, STRIP):
                target, source = sums.ctypes.data + 4 * d, value + t * v_step + 4 * d
                add_turned_strip(target, padded, s.ctypes.data, STRIP, source, v_step // 4, rows, keys)
            if whole < width:
                for j in range(keys):
                    rest[j, : width - whole] = carray(floats_at(value + (t + j) * v_step + 4 * whole), width - whole)
                add_turned_strip(sums.ctypes.data + 4 * whole, padded, s.ctypes.data, STRIP, rest.ctypes.data, STRIP, rows, keys)
        for r in range(count):
            head, n = kv_head * group + (start + r) // queries, (start + r) % queries
            result = carray(floats_at(words[26] + 4 * ((row * queries + n) * heads + head) * width), width)
            factor = np.float32(1) / totals[r] if totals[r] > 0 else np.float32(0)
            for d in range(width):
                result[d] = sums[r, d] * factor
    keep(turned)
    keep(scores)
    keep(sums)
    keep(rest)
    keep(peaks)
    keep(totals)
    keep(shifts)


BY_STRIPS = address_of(_attend_by_strips)


@njit(**PLAIN)
def attend_by_strips(
    board: int, helpers: int, by_strips: int, q: Array, k: Array, v: Array, mask: Array, offset: int, scale: float, y: Array
) -> None:
    """Write attention into y. by_strips: BY_STRIPS.

    q: [B, H, N, D], k: [B, Hkv, T, D], v: [B, Hkv, T, E], rows of D and E without gaps; mask: [B or 1, H or 1, N or 1, T] of 0 and 1, its
    rows without gaps, or of no size; offset: as for `find_ranges`; y: [B, N, H, E].
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    mask_rows, mask_heads = (mask.shape[0], mask.shape[1]) if mask.size else (1, 1)
    ranges = np.empty((mask_rows, mask_heads, queries, 3), np.int64)
    find_ranges(mask, offset, keys, ranges)
    words, factor, taken = np.empty(_WORDS, np.int64), np.empty(1, np.float32), np.zeros(1, np.int64)
    factor[0] = scale
    words[0], words[1], words[2], words[3], words[4] = q.ctypes.data, k.ctypes.data, v.ctypes.data, mask.ctypes.data, factor.ctypes.data
    words[5], words[6], words[7], words[8], words[9] = heads, kv_heads, queries, size, width
    words[10], words[11], words[12] = q.strides[0], q.strides[1], q.strides[2]
    words[13], words[14], words[15] = k.strides[0], k.strides[1], k.strides[2]
    words[16], words[17], words[18] = v.strides[0], v.strides[1], v.strides[2]
    words[19] = mask.strides[0] if mask_rows > 1 else 0
    words[20] = mask.strides[1] if mask_heads > 1 else 0
    words[21] = mask.strides[2] if mask.shape[2] > 1 else 0
    words[22], words[23], words[24], words[25], words[26] = ranges.ctypes.data, mask_rows, mask_heads, keys, y.ctypes.data
    units = batch * kv_heads * ((heads // kv_heads * queries + STRIP - 1) // STRIP)
    words[27], words[28] = units, taken.ctypes.data
    share(board, helpers, by_strips, words.ctypes.data, min(helpers + 1, units), 1)
    keep(words)
    keep(factor)
    keep(taken)
    keep(ranges)
