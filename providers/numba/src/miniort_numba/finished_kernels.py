"""Kernels of products that do what follows them as well, for one row and for many; `compiled.finished_products` says how.

With a few rows, or a matrix that isn't stored for it, it's a product and then what follows.
"""

from __future__ import annotations

from math import lcm

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.tape import call
from miniort.types import Array
from miniort_numba.fused_kernels import ALL_FLOAT32, CONTRIB, OWN, SplitInto
from miniort_numba.kernels import FLOAT32, crew_of, multiply_into, refuse_product, row_of

KERNELS = KernelTable("numba")


def _ends_at_once(rows: int, b: Array) -> bool:
    """Whether a product of so many rows with `b` is one that can end with a `finish`."""
    from miniort_numba.compiled.few_rows import MOST_ROWS

    return b.flags.c_contiguous if rows == 1 else rows > MOST_ROWS and (b.flags.c_contiguous or b.flags.f_contiguous)


def _refuse_no_bias(node: NodeView) -> str | None:
    return refuse_product(node) if node.has_input(2) else "it takes a bias only"


@KERNELS.register("GemmFastGelu", domain=CONTRIB, types=ALL_FLOAT32, refuse=_refuse_no_bias)
def gemm_fast_gelu(node: NodeContext) -> Run:
    """Gelu of a · b + bias, the approximation by tanh. a: [..., K]; b: [K, N]; bias: [N] -> [..., N]."""
    from miniort_numba.compiled.finished_products import GELU, multiply_and_gelu
    from miniort_numba.compiled.fused_rows import BIASED_GELU_ROWS, biased_gelu
    from miniort_numba.compiled.products import BY_ROWS, BY_STRIPS

    board, helpers = crew_of(node)
    multiply, allocate = multiply_into(node), node.provider.allocate

    def run(a: Array, b: Array, bias: Array) -> Array:
        inner, columns = b.shape
        y: Array = allocate((*a.shape[:-1], columns), FLOAT32)
        if y.size:
            rows, flat_y, added = a.reshape(-1, inner), y.reshape(-1, columns), row_of(bias, columns)
            if _ends_at_once(len(rows), b):
                source = np.ascontiguousarray(rows)
                call(multiply_and_gelu, board, helpers, BY_ROWS, BY_STRIPS, GELU, source, b, added, flat_y, writes=(y,))
            else:
                multiply(rows, b, flat_y)
                call(biased_gelu, board, helpers, BIASED_GELU_ROWS, flat_y, added, flat_y, writes=(y,))
        return y

    return run


@KERNELS.register("MatMulSwiGLU", domain=OWN, types=ALL_FLOAT32, refuse=refuse_product)
def matmul_swiglu(node: NodeContext) -> Run:
    """`SwiGLU` of a · b. a: [..., K]; b: [K, 2n] -> [..., n]."""
    from miniort_numba.compiled.finished_products import GATE, multiply_and_gate
    from miniort_numba.compiled.fused_rows import GATED_ROWS, gate_rows
    from miniort_numba.compiled.products import BY_ROWS, BY_STRIPS
    from miniort_numba.compiled.tiles import STRIP

    board, helpers = crew_of(node)
    multiply, allocate = multiply_into(node), node.provider.allocate

    def run(a: Array, b: Array) -> Array:
        inner, size = b.shape[0], b.shape[1] // 2
        y: Array = allocate((*a.shape[:-1], size), FLOAT32)
        if y.size:
            rows, flat_y = a.reshape(-1, inner), y.reshape(-1, size)
            both: Array = allocate((len(rows), 2 * size), FLOAT32)
            if size % STRIP == 0 and _ends_at_once(len(rows), b):
                source = np.ascontiguousarray(rows)
                call(multiply_and_gate, board, helpers, BY_ROWS, BY_STRIPS, GATE, source, b, both, flat_y, writes=(both, y))
            else:
                multiply(rows, b, both)
                call(gate_rows, board, helpers, GATED_ROWS, both, flat_y, writes=(y,))
        return y

    return run


@KERNELS.register("MatMulSplitHeads", domain=OWN, types=ALL_FLOAT32, refuse=refuse_product)
def matmul_split_heads(node: NodeContext) -> Run:
    """As `SplitHeads`, with its attributes, of a · b. a: [batch, time, K]; b: [K, (all heads) · dim]; bias, cosines, sines: as there."""
    from miniort_numba.compiled import fused_rows
    from miniort_numba.compiled.finished_products import HEADS, multiply_and_split_heads
    from miniort_numba.compiled.products import BY_ROWS, BY_STRIPS
    from miniort_numba.compiled.tiles import STRIP

    board, helpers = crew_of(node)
    allocate, split, part = node.provider.allocate, fused_rows.split_heads, fused_rows.SPLIT_ROWS
    multiply, heads = multiply_into(node), SplitInto(node)

    def run(a: Array, b: Array, bias: Array | None = None, cosines: Array | None = None, sines: Array | None = None) -> tuple[Array, ...]:
        inner, width = b.shape
        shape = (*a.shape[:2], width)
        x: Array = allocate(shape, FLOAT32)
        y: Array = allocate((x.size,), FLOAT32)
        told = heads.told(shape, bias, cosines, sines)
        if x.size:
            rows, unit = a.reshape(-1, inner), lcm(width // heads.count, STRIP) // STRIP
            if _ends_at_once(len(rows), b):
                source = np.ascontiguousarray(rows)
                call(multiply_and_split_heads, board, helpers, BY_ROWS, BY_STRIPS, HEADS, source, b, unit, x, *told, y, writes=(x, y))
            else:
                multiply(rows, b, x.reshape(-1, width))
                call(split, board, helpers, part, x, *told, y, writes=(y,))
        return heads.split(y, shape)

    return run
