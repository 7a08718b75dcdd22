"""Reductions that rest on a sum and add a function of their own: ReduceL1, ReduceLogSum, ReduceLogSumExp."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable
from miniort.types import Array
from miniort_cpu.floating_point import FLOAT64
from miniort_cpu.integers import is_integer
from miniort_cpu.kernels.reduction import Axes, Reduce, maximum, reduction, total

kernels = KernelTable("cpu")


def absolute_sum(x: Array, axes: Axes, keepdims: bool) -> Array:
    """Σ |x|."""
    return total(np.absolute(x, out=...), axes, keepdims)


def log_sum(x: Array, axes: Axes, keepdims: bool) -> Array:
    """log Σ x, of integers through float64."""
    y = total(x.astype(FLOAT64) if is_integer(x.dtype) else x, axes, keepdims)
    return np.log(y, out=y)


def log_sum_exp(x: Array, axes: Axes, keepdims: bool) -> Array:
    """log Σ exp(x) = m + log Σ exp(x - m) with the largest x for m, so that no exp overflows; of integers through float64."""
    wide = x.astype(FLOAT64) if is_integer(x.dtype) else x
    largest = maximum(wide, axes, True)
    np.copyto(largest, 0, where=np.logical_not(np.isfinite(largest)))
    y = total(np.exp(np.subtract(wide, largest, out=...), out=...), axes, keepdims)
    np.log(y, out=y)
    return np.add(y, largest.reshape(y.shape), out=y)


REDUCTIONS: dict[str, Reduce] = {"ReduceL1": absolute_sum, "ReduceLogSum": log_sum, "ReduceLogSumExp": log_sum_exp}
"""Op -> what it computes. Their axes became an input in version 18."""

for op, reduce in REDUCTIONS.items():
    kernels.register(op, versions=(1, None))(reduction(reduce, 18))
