"""Builders of matrix products."""

from __future__ import annotations

import re

from miniort.testing.operators.cases import Draws, NodeCase, Operator, builds, is_coarse, is_float


@builds("MatMul")
def matmul(d: Draws, operator: Operator) -> NodeCase:
    """NumPy's matmul: vectors, matrices, and stacks of them that broadcast."""
    dtype = d.dtype(operator)
    rows, inner, columns = (d.choice([0, 1, 2, 3, 5]) for _ in range(3))
    batch = d.shape(max_rank=2)
    pair = [d.broadcasting(batch), batch] if d.boolean() else [batch, d.broadcasting(batch)]
    left = (inner,) if d.integer(0, 4) == 0 else (*pair[0], rows, inner)
    right = (inner,) if d.integer(0, 4) == 0 else (*pair[1], inner, columns)
    return NodeCase(
        [d.ordinary(dtype, left), d.ordinary(dtype, right)], constants=d.constants(0, 1), atol=0.5 if is_coarse(dtype) else 1e-4
    )


@builds("Gemm")
def gemm(d: Draws, operator: Operator) -> NodeCase:
    """alpha A B + beta C; factors of integers are whole, for others have no defined rounding."""
    dtype = d.dtype(operator)
    rows, inner, columns = (d.integer(1, 4) for _ in range(3))
    turned = [d.integer(0, 1), d.integer(0, 1)]
    a = d.ordinary(dtype, (inner, rows) if turned[0] else (rows, inner))
    b = d.ordinary(dtype, (columns, inner) if turned[1] else (inner, columns))
    c = d.ordinary(dtype, d.broadcasting((rows, columns)))
    factors = {name: d.number(0.25, 2) if is_float(dtype) else 2.0 for name in ("alpha", "beta")}
    attributes = {name: flag for name, flag in zip(("transA", "transB"), turned, strict=True) if flag or d.boolean()}
    inputs = [a, b, None if operator.version >= 11 and d.boolean() else c]
    return NodeCase(d.trimmed(inputs), attributes | d.some(**factors), constants=d.constants(1, 2), atol=0.5 if is_coarse(dtype) else 1e-4)


EQUATIONS = [
    "ij->ji", "ii->i", "ii", "ij->", "ij->i", "ij, jk -> ik", "ij,jk", "i,i", "i,j->ij", "bij,bjk->bik", "bij,bkj->bik",
    "ij,ij->ij", "...ij,...jk->...ik", "...ij->...", "...ii->...i", "i...,i...->...", "...,...", "aB,Bc", "ij,j,k->ik",
    "bhqd,bhkd->bhqk", ",i->i", "iij->j",
]  # fmt: skip


@builds("Einsum")
def einsum(d: Draws, operator: Operator) -> NodeCase:
    """Products, sums, diagonals, ellipses that broadcast, and the implicit output."""
    dtype = d.dtype(operator)
    equation = d.choice(EQUATIONS)
    sizes = {letter: d.integer(1, 3) for letter in sorted(set(re.findall(r"[A-Za-z]", equation)))}
    rest = d.shape(max_rank=2, min_size=1, max_size=3)
    inputs = []
    for term in equation.replace(" ", "").split("->")[0].split(","):
        before, dots, after = term.partition("...")
        shared = tuple(size if d.boolean() else 1 for size in rest) if dots else ()
        shape = (*(sizes[letter] for letter in before), *shared, *(sizes[letter] for letter in after))
        inputs.append(d.ordinary(dtype, shape, -3, 3))
    return NodeCase(inputs, {"equation": equation}, constants=d.constants(0), atol=0.5 if is_coarse(dtype) else 1e-4)


@builds("Det")
def det(d: Draws, operator: Operator) -> NodeCase:
    """Of one matrix or a stack."""
    dtype = d.dtype(operator)
    size = d.integer(1, 4)
    x = d.ordinary(dtype, (*d.shape(max_rank=2), size, size))
    return NodeCase([x], tolerance=2**-4 if is_coarse(dtype) else 1e-3, atol=1 if is_coarse(dtype) else 1e-3)
