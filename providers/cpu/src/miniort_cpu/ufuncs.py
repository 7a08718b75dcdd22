"""Running a NumPy ufunc, or something called like one, as a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from miniort.kernels import CompileKernel, NodeContext, Run
from miniort.pool import SMALLEST
from miniort.tape import apply
from miniort.types import Array, DType
from miniort_cpu.threads import Threads, threads_of

Ufunc: TypeAlias = Callable[..., Any]
"""f(x, out=array) or f(a, b, out=array), which returns `out`, and a new array of any rank for `out=...`."""


SMALLEST_RANGE = 2 << 20
"""Elements that are worth waking a thread for, for operations that cost little more than reading and writing them."""


def shared(threads: Threads, ufunc: Ufunc, out: Array, *inputs: Array) -> Array:
    """ufunc(*inputs, out=out), divided over threads along the first axis of more than one element. inputs broadcast to out's shape."""
    axis = next((axis for axis, size in enumerate(out.shape) if size > 1), None)
    if threads.number == 1 or axis is None or out.size < 2 * SMALLEST_RANGE:
        return ufunc(*inputs, out=out)  # type: ignore[no-any-return]
    after = out.ndim - axis - 1

    def of(x: Array, chosen: slice) -> Array:
        there = x.ndim - 1 - after  # where x has this axis, if it does
        return x if there < 0 or x.shape[there] == 1 else x[(*(slice(None),) * there, chosen)]

    def compute(start: int, end: int) -> None:
        chosen = slice(start, end)
        ufunc(*[of(x, chosen) for x in inputs], out=of(out, chosen))

    threads.split(out.shape[axis], max(SMALLEST_RANGE * out.shape[axis] // out.size, 1), compute)
    return out


def unary(ufunc: Ufunc, dtype: DType | None = None) -> CompileKernel:
    """A kernel for y = ufunc(x). x: [...] -> same shape, of `dtype` or x's own type."""

    def compile_unary(node: NodeContext) -> Run:
        allocate, threads = node.provider.allocate, threads_of(node.provider)

        def run(x: Array) -> Array:
            if x.nbytes < SMALLEST:
                return apply(ufunc, x)
            return shared(threads, ufunc, allocate(x.shape, dtype or x.dtype), x)

        return run

    return compile_unary


def _is_fit(x: Array, shape: tuple[int, ...], dtype: DType) -> bool:
    """Whether a result of that shape and type can be written over an input that dies."""
    return x.shape == shape and x.dtype == dtype and x.flags.c_contiguous and x.flags.writeable


def binary(ufunc: Ufunc, dtype: DType | None = None) -> CompileKernel:
    """A kernel for y = ufunc(a, b). a, b: any two shapes that broadcast -> their common shape, of `dtype` or a's own type."""

    def compile_binary(node: NodeContext) -> Run:
        allocate, threads = node.provider.allocate, threads_of(node.provider)
        over_a, over_b = 0 in node.dying_inputs, 1 in node.dying_inputs

        def run(a: Array, b: Array) -> Array:
            if a.nbytes < SMALLEST and b.nbytes < SMALLEST:
                return apply(ufunc, a, b)
            shape = a.shape if a.shape == b.shape else np.broadcast(a, b).shape
            wanted = dtype or a.dtype
            over = a if over_a and _is_fit(a, shape, wanted) else b if over_b and _is_fit(b, shape, wanted) else None
            return shared(threads, ufunc, allocate(shape, wanted) if over is None else over, a, b)

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
