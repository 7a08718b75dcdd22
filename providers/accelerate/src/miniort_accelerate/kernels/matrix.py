"""Products of matrices by CBLAS."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miniort.errors import InputError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_accelerate.library import NO_TRANSPOSE, ROW_MAJOR, TRANSPOSE, Accelerate
from miniort_accelerate.operands import FLOATS, address, library_of, require_types

kernels = KernelTable("accelerate")


@dataclass(frozen=True)
class Layout:
    """How BLAS is to read a matrix [R, C] in row-major order: as it lies or transposed, and how many elements apart its rows lie."""

    transpose: int
    leading: int


def layout_of(matrix: Array) -> Layout | None:
    """The layout of the last two axes of an array, None if neither its rows nor its columns are contiguous."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = (divmod(stride, matrix.itemsize) for stride in matrix.strides[-2:])
    if not matrix.flags.aligned or row_stride[1] or column_stride[1]:
        return None
    row_step, column_step = row_stride[0], column_stride[0]
    if (column_step == 1 or columns == 1) and (row_step >= columns or rows == 1):
        return Layout(NO_TRANSPOSE, max(row_step, columns) if rows > 1 else columns)
    if (row_step == 1 or rows == 1) and (column_step >= rows or columns == 1):
        return Layout(TRANSPOSE, max(column_step, rows) if columns > 1 else rows)
    return None


def _readable(matrix: Array) -> tuple[Array, Layout]:
    """A stack of matrices that BLAS can read, with its layout: itself, or one copy of all of it."""
    layout = layout_of(matrix)
    if layout is None:
        matrix = np.array(matrix, order="C")
        layout = Layout(NO_TRANSPOSE, matrix.shape[-1])
    return matrix, layout


def multiply(library: Accelerate, a: Array, b: Array, out: Array, alpha: float, beta: float) -> None:
    """Compute out = alpha · a · b + beta · out for each matrix of a stack. a: [..., M, K], b: [..., K, N], out: [..., M, N].

    The leading axes of a and b broadcast to those of out, whose rows are contiguous. A product with one row is a matrix times a vector.
    InputError for a size that the library's BLAS can't be told.
    """
    batch, (m, n), k = out.shape[:-2], out.shape[-2:], a.shape[-1]
    if out.size == 0:
        return
    if k == 0:
        out[...] = beta * out if beta else 0
        return
    a, a_layout = _readable(a)
    b, b_layout = _readable(b)
    row_step = out.strides[-2] // out.itemsize if m > 1 else n
    if max(m, n, k, a_layout.leading, b_layout.leading, row_step) > library.largest_index:
        raise InputError(f"the product of [{m}, {k}] and [{k}, {n}] is larger than Accelerate's 32-bit BLAS takes; see index_width")
    single = out.dtype == np.float32
    gemm, gemv = (library.sgemm, library.sgemv) if single else (library.dgemm, library.dgemv)
    a_start, b_start, out_start = address(a), address(b), address(out)
    a_steps = np.broadcast_to(a, (*batch, m, k)).strides[:-2]
    b_steps = np.broadcast_to(b, (*batch, k, n)).strides[:-2]
    out_steps = out.strides[:-2]
    as_vector = m == 1 and a.strides[-1] == a.itemsize
    rows, columns = (k, n) if b_layout.transpose == NO_TRANSPOSE else (n, k)  # of b as it lies
    for index in np.ndindex(*batch):
        left, right = a_start + _offset(index, a_steps), b_start + _offset(index, b_steps)
        result = out_start + _offset(index, out_steps)
        if as_vector:  # y = bᵀ · a
            turn = TRANSPOSE if b_layout.transpose == NO_TRANSPOSE else NO_TRANSPOSE
            gemv(ROW_MAJOR, turn, rows, columns, alpha, right, b_layout.leading, left, 1, beta, result, 1)
            continue
        gemm(
            ROW_MAJOR, a_layout.transpose, b_layout.transpose, m, n, k,
            alpha, left, a_layout.leading, right, b_layout.leading, beta, result, row_step,
        )  # fmt: skip


def _offset(index: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """Bytes from the first matrix of a stack to that at `index`."""
    return sum(position * step for position, step in zip(index, steps, strict=True))


@kernels.register("MatMul", (1, None), types={"T": FLOATS})
def matmul(node: NodeContext) -> Run:
    """Product of a: [..., M, K] and b: [..., K, N] -> [..., M, N]; a vector's missing axis is left out of the result."""
    library, allocate = library_of(node), node.provider.allocate

    def run(a: Array, b: Array) -> Array:
        require_types(node, FLOATS, a, b)
        if a.ndim == 0 or b.ndim == 0:
            raise InputError("MatMul takes vectors, matrices and stacks of matrices, found a scalar")
        left = a[np.newaxis] if a.ndim == 1 else a
        right = b[:, np.newaxis] if b.ndim == 1 else b
        if left.shape[-1] != right.shape[-2]:
            raise InputError(f"MatMul: {list(a.shape)} has {left.shape[-1]} columns, but {list(b.shape)} has {right.shape[-2]} rows")
        if right.ndim == 2 and left.ndim > 2 and left.flags.c_contiguous:
            left = left.reshape(-1, left.shape[-1]) if left.size else left  # one tall matrix
        batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        out: Array = allocate((*batch, left.shape[-2], right.shape[-1]), a.dtype)
        multiply(library, left, right, out, 1.0, 0.0)
        return out.reshape(_product_shape(a.shape, b.shape))

    return run


def _product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    return batch + (a[-2:-1] if len(a) > 1 else ()) + (b[-1:] if len(b) > 1 else ())


@kernels.register("Gemm", (7, None), types={"T": FLOATS})
def gemm(node: NodeContext) -> Run:
    """General product alpha · a · b + beta · c. a: [M, K] or transposed, b: [K, N] or transposed, c: broadcasts to [M, N] -> [M, N]."""
    library, allocate = library_of(node), node.provider.allocate
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    as_left = _transposed if node.attribute("transA", 0) else _unchanged
    as_right = _transposed if node.attribute("transB", 0) else _unchanged

    def run(a: Array, b: Array, c: Array | None = None) -> Array:
        require_types(node, FLOATS, a, b)
        left, right = as_left(a), as_right(b)
        if left.shape[1] != right.shape[0]:
            raise InputError(f"Gemm: the inner sizes of {list(left.shape)} and {list(right.shape)} differ")
        out: Array = allocate((left.shape[0], right.shape[1]), a.dtype)
        if c is not None:
            out[...] = c
        multiply(library, left, right, out, alpha, 0.0 if c is None else beta)
        return out

    return run


def _unchanged(matrix: Array) -> Array:
    return matrix


def _transposed(matrix: Array) -> Array:
    return matrix.T
