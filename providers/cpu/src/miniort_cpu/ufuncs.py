"""Running a NumPy ufunc, or something called like one, as a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from miniort.kernels import CompileKernel, NodeContext, Run
from miniort.pool import SMALLEST
from miniort.types import Array, DType

Ufunc: TypeAlias = Callable[..., Any]
"""f(x, out=array) or f(a, b, out=array), which returns `out`, and a new array of any rank for `out=...`."""


def unary(ufunc: Ufunc, dtype: DType | None = None) -> CompileKernel:
    """A kernel for y = ufunc(x). x: [...] -> same shape, of `dtype` or x's own type."""

    def compile_unary(node: NodeContext) -> Run:
        allocate = node.provider.allocate

        def run(x: Array) -> Array:
            if x.nbytes < SMALLEST:
                return ufunc(x, out=...)  # type: ignore[no-any-return]
            return ufunc(x, out=allocate(x.shape, dtype or x.dtype))  # type: ignore[no-any-return]

        return run

    return compile_unary


def binary(ufunc: Ufunc, dtype: DType | None = None) -> CompileKernel:
    """A kernel for y = ufunc(a, b). a, b: any two shapes that broadcast -> their common shape, of `dtype` or a's own type."""

    def compile_binary(node: NodeContext) -> Run:
        allocate = node.provider.allocate

        def run(a: Array, b: Array) -> Array:
            if a.nbytes < SMALLEST and b.nbytes < SMALLEST:
                return ufunc(a, b, out=...)  # type: ignore[no-any-return]
            shape = a.shape if a.shape == b.shape else np.broadcast(a, b).shape
            return ufunc(a, b, out=allocate(shape, dtype or a.dtype))  # type: ignore[no-any-return]

        return run

    return compile_binary


def variadic(ufunc: Ufunc) -> CompileKernel:
    """A kernel for y = ufunc(... ufunc(x0, x1) ..., xn). Any shapes that broadcast -> their common shape; one input is the result."""

    def compile_variadic(node: NodeContext) -> Run:
        allocate = node.provider.allocate

        def run(*xs: Array) -> Array:
            if len(xs) == 1:
                return xs[0]
            shape = np.broadcast_shapes(*(x.shape for x in xs))
            out = ufunc(xs[0], xs[1], out=allocate(shape, xs[0].dtype))
            for x in xs[2:]:
                ufunc(out, x, out=out)
            return out  # type: ignore[no-any-return]

        return run

    return compile_variadic


def by_kind(integer: CompileKernel, floating: CompileKernel) -> CompileKernel:
    """One of two kernels, by whether input 0 holds integers; chosen when the session is built where that is known by then."""

    def compile_by_kind(node: NodeContext) -> Run:
        dtype = node.dtype(0)
        if dtype is not None:
            return (integer if dtype.kind in "iu" else floating)(node)
        run_integer, run_floating = integer(node), floating(node)

        def run(x: Array, *others: Array) -> Any:
            return (run_integer if x.dtype.kind in "iu" else run_floating)(x, *others)

        return run

    return compile_by_kind
