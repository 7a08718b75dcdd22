"""Softmax and its logarithm."""

from __future__ import annotations

import numpy as np

from miniort.kernels import CompileKernel, KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.axes import normalize_axis
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import as_dtype, widen

kernels = KernelTable("cpu")


def softmax(allocate: Allocate, x: Array, axes: tuple[int, ...] | int) -> Array:
    """exp(x) / Σ exp(x), over one axis or over several taken as one. x: [...] float32 or float64 -> same shape, dtype."""
    y = allocate(x.shape, x.dtype)
    np.subtract(x, np.maximum.reduce(x, axes, keepdims=True), out=y)  # so that exp can't overflow
    np.exp(y, out=y)
    return np.divide(y, np.add.reduce(y, axes, keepdims=True), out=y)


def log_softmax(allocate: Allocate, x: Array, axes: tuple[int, ...] | int) -> Array:
    """`x` - log Σ exp(x), over one axis or over several taken as one. x: [...] float32 or float64 -> same shape, dtype."""
    y = allocate(x.shape, x.dtype)
    np.subtract(x, np.maximum.reduce(x, axes, keepdims=True), out=y)
    total = np.add.reduce(np.exp(y, out=...), axes, keepdims=True)
    return np.subtract(y, np.log(total, out=...), out=y)


FUNCTIONS = {"Softmax": softmax, "LogSoftmax": log_softmax}


def _along_axis(op: str) -> CompileKernel:
    """Version 13 and later: along one axis, the last by default."""
    function = FUNCTIONS[op]

    def compile_along_axis(node: NodeContext) -> Run:
        axis = node.attribute("axis", -1)
        allocate = node.provider.allocate

        def run(x: Array) -> Array:
            return as_dtype(function(allocate, widen(x), axis), x.dtype) if x.size else x.copy()

        return run

    return compile_along_axis


def _of_matrix(op: str) -> CompileKernel:
    """Until version 12: x is taken as a matrix [axes before `axis`, axes from there on], and each row of it is normalized."""
    function = FUNCTIONS[op]

    def compile_of_matrix(node: NodeContext) -> Run:
        axis = node.attribute("axis", 1)
        allocate = node.provider.allocate

        def run(x: Array) -> Array:
            row = tuple(range(normalize_axis(axis, x.ndim), x.ndim))
            return as_dtype(function(allocate, widen(x), row), x.dtype) if x.size else x.copy()

        return run

    return compile_of_matrix


for op in FUNCTIONS:
    kernels.register(op, versions=(13, None))(_along_axis(op))
    kernels.register(op, versions=(1, 12))(_of_matrix(op))
