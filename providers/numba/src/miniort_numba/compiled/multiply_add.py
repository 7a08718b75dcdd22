"""Products of one row with a matrix, in the order that vector registers, caches and memory like."""

from __future__ import annotations

import numpy as np
from numba import njit

from miniort.types import Array
from miniort_numba.options import LOOP, PLAIN


@njit(**LOOP)
def add_8_rows(y: Array, a: Array, b: Array, k: int) -> None:
    """y += a[k : k+8] · b[k : k+8]. y: [N], a: [K], b: [K, N]."""
    a0, a1, a2, a3, a4, a5, a6, a7 = a[k], a[k + 1], a[k + 2], a[k + 3], a[k + 4], a[k + 5], a[k + 6], a[k + 7]
    b0, b1, b2, b3, b4, b5, b6, b7 = b[k], b[k + 1], b[k + 2], b[k + 3], b[k + 4], b[k + 5], b[k + 6], b[k + 7]
    for j in range(y.size):
        y[j] += ((a0 * b0[j] + a1 * b1[j]) + (a2 * b2[j] + a3 * b3[j])) + ((a4 * b4[j] + a5 * b5[j]) + (a6 * b6[j] + a7 * b7[j]))


@njit(**LOOP)
def add_row(y: Array, factor: float, b: Array) -> None:
    """y += factor · b. y, b: [N]."""
    for j in range(y.size):
        y[j] += factor * b[j]


@njit(**PLAIN)
def add_rows(y: Array, a: Array, b: Array, begin: int, end: int) -> None:
    """y += a[begin:end] · b[begin:end]. y: [N], a: [K], b: [K, N]."""
    k = begin
    while k + 8 <= end:
        add_8_rows(y, a, b, k)
        k += 8
    while k < end:
        add_row(y, a[k], b[k])
        k += 1


@njit(**LOOP)
def dot_products(y: Array, a: Array, b: Array, begin: int, end: int) -> None:
    """y[begin:end] = b[begin:end] · a, one dot product per row. y: [N], a: [K], b: [N, K]."""
    inner = a.shape[0]
    j = begin
    while j + 4 <= end:
        b0, b1, b2, b3 = b[j], b[j + 1], b[j + 2], b[j + 3]
        s0 = s1 = s2 = s3 = np.float32(0)
        for k in range(inner):
            x = a[k]
            s0 += x * b0[k]
            s1 += x * b1[k]
            s2 += x * b2[k]
            s3 += x * b3[k]
        y[j], y[j + 1], y[j + 2], y[j + 3] = s0, s1, s2, s3
        j += 4
    while j < end:
        b0 = b[j]
        s0 = np.float32(0)
        for k in range(inner):
            s0 += a[k] * b0[k]
        y[j] = s0
        j += 1
