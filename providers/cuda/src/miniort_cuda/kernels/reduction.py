"""Sums, means and extremes over axes, and sums along one. float16 is summed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array, DType
from miniort_cuda.element_types import ALL, FLOATS, INTEGERS, NUMBERS, compute_dtype
from miniort_cuda.namespace import array_namespace

kernels = KernelTable("cuda")

Axes = tuple[int, ...] | None
Reduction = Callable[[Any, Any, Axes, bool], Any]


def _accumulator(x: Any) -> Any:
    """The type to sum in. Integers stay what they are, and wrap around."""
    return compute_dtype(x.dtype) if x.dtype.kind == "f" else x.dtype


def _sum(xp: Any, x: Any, axes: Axes, keep: bool) -> Any:
    return x.sum(axis=axes, dtype=_accumulator(x), keepdims=keep).astype(x.dtype, copy=False)


def _mean(xp: Any, x: Any, axes: Axes, keep: bool) -> Any:
    if x.dtype.kind == "f":
        return x.mean(axis=axes, dtype=_accumulator(x), keepdims=keep).astype(x.dtype, copy=False)
    count = int(np.prod([x.shape[axis] for axis in (range(x.ndim) if axes is None else axes)]))
    total = x.sum(axis=axes, dtype=np.int64 if x.dtype.kind == "i" else np.uint64, keepdims=keep)
    mean = total // max(count, 1)
    if x.dtype.kind == "i":  # cut off toward zero, where // goes down
        mean = mean + xp.logical_and(total < 0, xp.not_equal(mean * count, total))
    return mean.astype(x.dtype)


def _square_sum(xp: Any, x: Any, axes: Axes, keep: bool) -> Any:
    wide = x.astype(_accumulator(x), copy=False)
    return (wide * wide).sum(axis=axes, dtype=wide.dtype, keepdims=keep).astype(x.dtype, copy=False)


def _euclidean(xp: Any, x: Any, axes: Axes, keep: bool) -> Any:
    wide = x.astype(compute_dtype(x.dtype), copy=False)
    return xp.sqrt((wide * wide).sum(axis=axes, keepdims=keep)).astype(x.dtype, copy=False)


def _absolute_sum(xp: Any, x: Any, axes: Axes, keep: bool) -> Any:
    return xp.abs(x).sum(axis=axes, dtype=_accumulator(x), keepdims=keep).astype(x.dtype, copy=False)


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMax": lambda xp, x, axes, keep: x.max(axis=axes, keepdims=keep),
    "ReduceMin": lambda xp, x, axes, keep: x.min(axis=axes, keepdims=keep),
    "ReduceProd": lambda xp, x, axes, keep: x.prod(axis=axes, dtype=x.dtype, keepdims=keep),
    "ReduceSumSquare": _square_sum,
    "ReduceL1": _absolute_sum,
    "ReduceL2": _euclidean,
}

_NEUTRAL: dict[str, Callable[[DType], float]] = {
    "ReduceMax": lambda dtype: -np.inf if dtype.kind == "f" else int(np.iinfo(dtype).min),
    "ReduceMin": lambda dtype: np.inf if dtype.kind == "f" else int(np.iinfo(dtype).max),
}
"""What the largest and the smallest of nothing are."""


def _reduction(op: str) -> Callable[[NodeContext], Run]:
    function = _REDUCTIONS[op]

    def compile_reduction(node: NodeContext) -> Run:
        """Reduce over `axes`, over all if none are named (or none at all, if `noop_with_empty_axes`). x: any shape."""
        xp = array_namespace(node)
        fixed = node.attribute("axes", None)
        keep = bool(node.attribute("keepdims", 1))
        empty_is_noop = bool(node.attribute("noop_with_empty_axes", 0))

        def run(x: Any, axes: Array | None = None) -> Any:
            chosen = fixed if axes is None else tuple(axes.tolist())
            if not chosen:
                if empty_is_noop and op not in ("ReduceSumSquare", "ReduceL1", "ReduceL2"):
                    return x
                chosen = () if empty_is_noop else tuple(range(x.ndim))
            if op in _NEUTRAL and x.size == 0:
                reduced = {axis % x.ndim for axis in chosen}
                shape = [1 if axis in reduced else size for axis, size in enumerate(x.shape) if keep or axis not in reduced]
                return xp.full(tuple(shape), _NEUTRAL[op](x.dtype), x.dtype)
            return function(xp, x, tuple(chosen), keep)

        return run

    return compile_reduction


_NEWER = {"ReduceSum": 13}
"""The version since which axes are an input, where it isn't 18."""

for _op in _REDUCTIONS:
    _since = _NEWER.get(_op, 18)
    kernels.register(_op, (1, _since - 1), types={"T": NUMBERS})(_reduction(_op))
    kernels.register(_op, (_since, None), types={"T": NUMBERS}, host_inputs=(1,), view_of=0)(_reduction(_op))


def _refuse_last_index(node: NodeView) -> str | None:
    return "its kernel has no select_last_index" if node.attribute("select_last_index", 0) else None


@kernels.register("ArgMax", (1, None), types={"T": NUMBERS}, refuse=_refuse_last_index)
@kernels.register("ArgMin", (1, None), types={"T": NUMBERS}, refuse=_refuse_last_index)
def argmax(node: NodeContext) -> Run:
    """The index of the largest (smallest) element along `axis`, the first one's of several. x: [..., N, ...] -> [..., 1, ...] int64."""
    xp = array_namespace(node)
    axis, keep = node.attribute("axis", 0), bool(node.attribute("keepdims", 1))
    find = xp.argmax if node.op == "ArgMax" else xp.argmin

    def run(x: Any) -> Any:
        found = find(x, axis=axis).astype(np.int64, copy=False)
        return xp.expand_dims(found, axis) if keep else found

    return run


@kernels.register("CumSum", (11, None), types={"T": FLOATS | INTEGERS}, host_inputs=(1,))
def cumulative_sum(node: NodeContext) -> Run:
    """Sums of all elements up to each along an axis: without it if `exclusive`, from the end if `reverse`. x: any shape -> same."""
    xp = array_namespace(node)
    exclusive, backwards = bool(node.attribute("exclusive", 0)), bool(node.attribute("reverse", 0))

    def run(x: Any, axis: Array) -> Any:
        place = int(axis.reshape(-1)[0]) % max(x.ndim, 1)
        turned: tuple[Any, ...] = (*(slice(None),) * place, slice(None, None, -1 if backwards else 1))
        source = x[turned]
        sums = xp.cumsum(source, axis=place, dtype=x.dtype)
        if exclusive:
            sums = sums - source
        return sums[turned].copy() if backwards else sums

    return run


@kernels.register("Trilu", (14, None), types={"T": ALL}, host_inputs=(1,))
@kernels.register("Trilu", domain="com.microsoft", types={0: ALL}, host_inputs=(1,))
def trilu(node: NodeContext) -> Run:
    """`x` with zeros below (`upper`) or above its k-th diagonal. x: [..., N, M]; k: [] int64, 0 if absent -> same shape."""
    xp, upper = array_namespace(node), node.attribute("upper", 1)

    def run(x: Any, k: Array | None = None) -> Any:
        offset = 0 if k is None else int(k.reshape(-1)[0])
        row, column = xp.arange(x.shape[-2]).reshape(-1, 1), xp.arange(x.shape[-1])
        kept = column - row >= offset if upper else column - row <= offset
        return xp.where(kept, x, xp.zeros((), x.dtype))

    return run
