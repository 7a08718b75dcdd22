"""Reductions along axes, and the running sum along one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.types import Array, DType
from miniort_cpu.axes import as_ints, normalize_axis
from miniort_cpu.floating_point import FLOAT64, NARROW_FLOATS, as_dtype, widen
from miniort_cpu.integers import is_integer, truncated_quotient

kernels = KernelTable("cpu")

Axes: TypeAlias = tuple[int, ...] | int | None
"""The axes to reduce, as NumPy takes them: None for all, () for none."""

Reduce: TypeAlias = Callable[[Array, Axes, bool], Array]
"""f(x, axes, keepdims) -> x reduced, of any type; given no narrow floats."""


def _reduce(ufunc: Any, x: Array, axes: Axes, dtype: DType | None, keepdims: bool, **initial: Any) -> Array:
    """`ufunc.reduce` to an array, of rank 0 too."""
    y: Array = ufunc.reduce(x, axes, dtype, keepdims=keepdims, out=..., **initial)
    return y


def total(x: Array, axes: Axes, keepdims: bool) -> Array:
    """Σ x."""
    return _reduce(np.add, x, axes, x.dtype, keepdims)


def product(x: Array, axes: Axes, keepdims: bool) -> Array:
    """Π x."""
    return _reduce(np.multiply, x, axes, x.dtype, keepdims)


def mean(x: Array, axes: Axes, keepdims: bool) -> Array:
    """Σ x / n, of integers rounded toward zero."""
    y = total(x, axes, keepdims)
    count = np.array(x.size // y.size if y.size else 1, x.dtype)
    return truncated_quotient(y, count, out=...) if is_integer(x.dtype) else np.divide(y, count, out=y)


def square_sum(x: Array, axes: Axes, keepdims: bool) -> Array:
    """Σ x²."""
    return total(np.multiply(x, x, out=...), axes, keepdims)


def euclidean_norm(x: Array, axes: Axes, keepdims: bool) -> Array:
    """√(Σ x²), of integers through float64."""
    y = square_sum(x.astype(FLOAT64) if is_integer(x.dtype) else x, axes, keepdims)
    return np.sqrt(y, out=y)


def maximum(x: Array, axes: Axes, keepdims: bool) -> Array:
    """The largest x; the type's lowest value where there is none."""
    return _reduce(np.maximum, x, axes, None, keepdims, **({} if x.size else {"initial": _lowest(x.dtype)}))


def minimum(x: Array, axes: Axes, keepdims: bool) -> Array:
    """The smallest x; the type's highest value where there is none."""
    return _reduce(np.minimum, x, axes, None, keepdims, **({} if x.size else {"initial": _highest(x.dtype)}))


def _lowest(dtype: DType) -> Any:
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if is_integer(dtype) else -np.inf


def _highest(dtype: DType) -> Any:
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if is_integer(dtype) else np.inf


def reduction(reduce: Reduce, axes_input_since: int) -> CompileKernel:
    """A kernel for a reduction. x: [...] -> x's shape with the axes reduced to size 1, or left out without `keepdims`; x's dtype.

    The axes are an attribute before version `axes_input_since`, and then an optional input. Without any, all are reduced, or with
    `noop_with_empty_axes` none.
    """

    def compile_reduction(node: NodeContext) -> Run:
        keepdims, noop = bool(node.attribute("keepdims", 1)), bool(node.attribute("noop_with_empty_axes", 0))
        in_attribute = node.version < axes_input_since

        def chosen(axes: tuple[int, ...] | None) -> Axes:
            if not axes:
                return () if noop else None
            return axes[0] if len(axes) == 1 else axes

        fixed = in_attribute or not node.has_input(1) or node.constant(1) is not None
        known = chosen(node.attribute("axes", None) if in_attribute else as_ints(node.constant(1)))

        def run(x: Array, axes: Array | None = None) -> Array:
            places = known if fixed else chosen(as_ints(axes))
            if x.dtype in NARROW_FLOATS:
                return reduce(widen(x), places, keepdims).astype(x.dtype)
            return as_dtype(reduce(x, places, keepdims), x.dtype)

        return run

    return compile_reduction


REDUCTIONS: dict[str, tuple[int, Reduce]] = {
    "ReduceSum": (13, total),
    "ReduceProd": (18, product),
    "ReduceMean": (18, mean),
    "ReduceSumSquare": (18, square_sum),
    "ReduceL2": (18, euclidean_norm),
    "ReduceMax": (18, maximum),
    "ReduceMin": (18, minimum),
}
"""Op -> the version in which its axes became an input, and what it computes."""

for op, (since, reduce) in REDUCTIONS.items():
    kernels.register(op, versions=(1, None))(reduction(reduce, since))


@kernels.register("CumSum", versions=(11, None))
def cumulative_sum(node: NodeContext) -> Run:
    """y[i] = x[0] + … + x[i] along an axis; `exclusive` leaves x[i] out, `reverse` counts from the end.

    x: [...]; axis: [] -> same shape
    """
    exclusive, backward = bool(node.attribute("exclusive", 0)), bool(node.attribute("reverse", 0))

    def run(x: Array, axis: Array) -> Array:
        place = normalize_axis(int(axis.item()), x.ndim)
        before = (slice(None),) * place
        direction = (*before, slice(None, None, -1 if backward else 1))
        wide = widen(x)[direction]
        y = np.zeros(x.shape, wide.dtype)
        if exclusive:
            first, rest = (*before, slice(None, -1)), (*before, slice(1, None))
            np.add.accumulate(wide[first], place, wide.dtype, y[rest])
        else:
            np.add.accumulate(wide, place, wide.dtype, y)
        return as_dtype(y[direction], x.dtype)

    return run
