"""Matrix products: MatMul, Gemm."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.tape import call
from miniort.types import Array
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import NARROW_FLOATS, as_dtype, widen
from miniort_cpu.threads import ALONE, Threads, threads_of

kernels = KernelTable("cpu")


BYTES_PER_RANGE = 256 * 1024
"""A product with one row is as fast as the matrix is read; a thread should have this much of it to read, which takes some 20 µs."""

STEPS_PER_RANGE = 1_000_000
"""Multiplications of a product of matrices that a thread should have at least, which take some 20 µs."""

FEW_ROWS = 3
"""So few rows are multiplied one by one: BLAS copies the matrix for a product of matrices, which takes longer than to read it for each."""

BLAS_TYPES = (np.dtype(np.float32), np.dtype(np.float64))
"""What BLAS multiplies; NumPy's own loops are for the others, which are split all the same."""


def matrix_product(allocate: Allocate, a: Array, b: Array, threads: Threads = ALONE) -> Array:
    """`a` · b over the last two axes, as numpy.matmul. a: [..., M, K] or [K]; b: [..., K, N] or [K] -> [..., M, N].

    Large ones are divided over threads.
    """
    if b.ndim == 2 and a.ndim >= 2 and a.size and b.size:
        inner, columns = b.shape
        out = allocate((*a.shape[:-1], columns), a.dtype)
        # One product of all rows, where matmul would make one per batch.
        product_into(threads, a.reshape(-1, inner), b, out.reshape(-1, columns))
        return out
    if a.ndim < 2 or b.ndim < 2:
        return np.matmul(a, b, out=...)  # type: ignore[no-any-return]
    return _batched_product(allocate, a, b, threads)


def product_into(threads: Threads, a: Array, b: Array, out: Array) -> None:
    """Write a · b into `out`. a: [M, K], b: [K, N], out: [M, N], of one type.

    The matrix of weights is read where it is, in whichever order it's stored, and never packed or copied: for one row it's read once from
    front to back, so both orders are as fast as memory is.
    """
    if threads.number == 1:
        _product_by_blas(a, b, out)
    elif not threads.divides_products():
        started = perf_counter()
        _product_by_blas(a, b, out)
        kind, work = ("row", len(a) * b.nbytes) if len(a) <= FEW_ROWS else ("matrix", a.size * b.shape[1])
        threads.blas_retreat.note(kind, work, perf_counter() - started)
    elif len(a) == 1:
        _row_product(threads, a[0], b, out[0])
    else:
        count, inner = a.shape
        smallest = max(16, STEPS_PER_RANGE // max(1, count * inner))
        # Columns, not rows: each thread packs its own part of b for BLAS, where all would pack the whole.
        threads.split(b.shape[1], smallest, lambda start, end: np.matmul(a, b[:, start:end], out[:, start:end]))


def _product_by_blas(a: Array, b: Array, out: Array) -> None:
    """Write a · b into `out`, as `product_into`."""
    if 1 < len(a) <= FEW_ROWS:
        for row, result in zip(a, out, strict=True):
            row.dot(b, result)
    else:
        a.dot(b, out)


def _row_product(threads: Threads, a: Array, b: Array, out: Array) -> None:
    """`a` · b for one row. a: [K], b: [K, N], out: [N]."""
    inner, columns = b.shape
    ranges = threads.ranges(b.size * b.itemsize, BYTES_PER_RANGE)
    if ranges == 1 or b.dtype not in BLAS_TYPES:
        a.dot(b, out)
    elif b.flags.c_contiguous:
        # Stored row by row: each range of rows gives an addend of all columns.
        addends = np.empty((ranges, columns), out.dtype)
        bounds = [inner * index // ranges for index in range(ranges + 1)]

        def add_up(first: int, last: int) -> None:
            for index in range(first, last):
                rows = slice(bounds[index], bounds[index + 1])
                a[rows].dot(b[rows], addends[index])

        threads.split(ranges, 1, add_up)
        np.add.reduce(addends, 0, out=out)
    else:
        by_column = b.T  # stored column by column: each range of columns is a range of the result
        threads.split(columns, -(-columns // ranges), lambda start, end: by_column[start:end].dot(a, out[start:end]))


def _batched_product(allocate: Allocate, a: Array, b: Array, threads: Threads) -> Array:
    """A product for each place of the leading axes, which broadcast. a: [..., M, K]; b: [..., K, N] -> [..., M, N]."""
    batch = a.shape[:-2] if a.shape[:-2] == b.shape[:-2] else np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    out = allocate((*batch, rows, columns), a.dtype)
    longest = max(batch, default=1)
    if longest < 2 or not threads.divides_products() or out.size * inner < 2 * STEPS_PER_RANGE:
        return np.matmul(a, b, out)
    a, b = np.broadcast_to(a, (*batch, rows, inner)), np.broadcast_to(b, (*batch, inner, columns))
    before = (slice(None),) * batch.index(longest)
    smallest = -(-STEPS_PER_RANGE * longest // (out.size * inner))

    def compute(start: int, end: int) -> None:
        part = (*before, slice(start, end))
        np.matmul(a[part], b[part], out[part])

    threads.split(longest, smallest, compute)
    return out


def widened_constant(node: NodeContext, index: int) -> Array | None:
    """The constant input `index` in the type to compute in, converted once for all sessions; None where it's no constant."""
    weight = node.constant(index)
    if weight is None or weight.dtype not in NARROW_FLOATS:
        return weight
    prepared: Array = node.prepare(index, "cpu.float32", widen)
    return prepared


@kernels.register("MatMul", versions=(1, None))
def matmul(node: NodeContext) -> Run:
    """`a` · b. a: [..., M, K] or [K]; b: [..., K, N] or [K] -> [..., M, N]; narrow floats are summed up in float32."""
    allocate, threads = node.provider.allocate, threads_of(node.provider)
    left, right = widened_constant(node, 0), widened_constant(node, 1)

    def run(a: Array, b: Array) -> Array:
        if a.dtype not in NARROW_FLOATS:
            if b.ndim != 2 or a.ndim < 2 or not a.size or not b.size:
                return matrix_product(allocate, a, b, threads)
            y: Array = allocate((*a.shape[:-1], b.shape[1]), a.dtype)
            call(product_into, threads, a.reshape(-1, len(b)), b, y.reshape(-1, b.shape[1]), writes=(y,))
            return y
        wide_a = widen(a) if left is None else left
        wide_b = widen(b) if right is None else right
        return matrix_product(allocate, wide_a, wide_b, threads).astype(a.dtype)

    return run


@kernels.register("Gemm", versions=(7, None))
def gemm(node: NodeContext) -> Run:
    """`alpha` · a · b + beta · c. a: [M, K], b: [K, N], each transposed if its attribute says so; c: broadcasts to [M, N] -> [M, N]."""
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    transpose_a, transpose_b = node.attribute("transA", 0), node.attribute("transB", 0)
    left, right = widened_constant(node, 0), widened_constant(node, 1)
    allocate, threads = node.provider.allocate, threads_of(node.provider)

    def run(a: Array, b: Array, c: Array | None = None) -> Array:
        dtype = a.dtype
        if dtype in NARROW_FLOATS:
            a = widen(a) if left is None else left
            b = widen(b) if right is None else right
        if transpose_a:
            a = a.T
        if transpose_b:
            b = b.T
        y = allocate((a.shape[0], b.shape[1]), a.dtype)
        product_into(threads, a, b, y)
        if alpha != 1.0:
            np.multiply(y, alpha, out=y, casting="unsafe")
        if c is not None:
            np.add(y, c if beta == 1.0 else as_dtype(widen(c) * beta, y.dtype), out=y)
        return as_dtype(y, dtype)

    return run
