"""Chains of elementwise ops in one launch: arrays that broadcast to each other are read once, with whatever strides they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np

from miniort.errors import KernelError
from miniort.graph.elementwise_body import FIRST_VERSIONS, OUTPUT, Attribute, Body, Step
from miniort.kernels import NodeContext, Run
from miniort.types import DType
from miniort_cuda.bfloat16 import BFloat16Array
from miniort_cuda.element_types import BFLOAT16
from miniort_cuda.elementwise_source import chain_source, kernel_name, refusal
from miniort_cuda.fused import THREADS, fused_kernels
from miniort_cuda.namespace import array_namespace

LAYOUTS_KEPT = 64
"""How many combinations of shapes a node remembers: those of a prompt and of steps; a mask grows with each token."""

NARROW = 2**31 - THREADS
"""Elements up to which an int counts them, the threads behind the last one too: 64-bit divisions are slow on a GPU."""

Key = tuple[tuple[DType, tuple[int, ...], tuple[int, ...]], ...]
"""Element type, shape, and strides in bytes of each array."""


@dataclass(frozen=True)
class Axes:
    """How a kernel goes over its arrays. sizes: of each axis, at least one; steps: of each array along each axis, in elements."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


def common_axes(arrays: Key) -> Axes:
    """The shape that arrays broadcast to, and as few axes as it takes to go over all of them. ValueError if they don't broadcast.

    Axes of one element are left out. Two are made one where in every array a step along the outer one is as long as all of the inner one.
    """
    shape = np.broadcast_shapes(*(own for _, own, _ in arrays))
    merged: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        steps = [_step(dtype, own, strides, axis - len(shape)) for dtype, own, strides in arrays]
        if merged and merged[-1][1] == [step * size for step in steps]:
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    if not merged:
        merged = [(1, [0] * len(arrays))]
    return Axes(shape, tuple(size for size, _ in merged), tuple(zip(*(steps for _, steps in merged), strict=True)))


def _step(dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], axis: int) -> int:
    """Elements between neighbours along an axis, counted from the end; 0 where there's one that is repeated."""
    return 0 if -axis > len(shape) or shape[axis] == 1 else strides[axis] // dtype.itemsize


@dataclass(frozen=True)
class Launch:
    """All that a launch needs but its arrays: the result's shape and type, the kernel (None for no elements), its grid and numbers."""

    shape: tuple[int, ...]
    dtype: DType
    kernel: Any
    grid: tuple[int]
    numbers: tuple[np.int32 | np.int64, ...]


def in_one_launch(node: NodeContext, body: Body, otherwise: Run | None = None) -> Run:
    """What computes a chain of arrays in one launch.

    otherwise: computes the same for types that generated kernels don't have, and where there's no compiler for them. Without it such types
    are a KernelError.
    """
    fused = fused_kernels(node)
    if fused is None:
        assert otherwise is not None, "without a compiler there is something else to do"
        return otherwise
    xp, name = array_namespace(node), kernel_name(body)

    @cache
    def kernel_for(dtypes: tuple[DType, ...], axes: int, index: str) -> Any:
        return fused.generated(chain_source(body, dtypes, axes, index), name)

    @lru_cache(maxsize=LAYOUTS_KEPT)
    def launch_for(arrays: Key) -> Launch | None:
        dtypes = tuple(dtype for dtype, _, _ in arrays)
        if (reason := refusal(body, dtypes)) is not None:
            if otherwise is None:
                raise KernelError(f"node {node.name!r} ({node.op}): {reason}")
            return None
        result = body.dtypes(dtypes)[body.steps[-1].output]
        assert result is not None
        axes = common_axes(arrays)
        count = prod(axes.shape)
        reach = max(sum((size - 1) * abs(step) for size, step in zip(axes.sizes, steps, strict=True)) for steps in axes.steps)
        index, number = ("int", np.int32) if max(count, reach) < NARROW else ("long long", np.int64)
        kernel = kernel_for(dtypes, len(axes.sizes), index) if count else None
        numbers = (count, *axes.sizes[1:], *(step for steps in axes.steps for step in steps))
        return Launch(axes.shape, result, kernel, (-(-count // THREADS),), tuple(number(each) for each in numbers))

    def run(*arrays: Any) -> Any:
        plain = [each.bits if type(each) is BFloat16Array else each for each in arrays]
        launch = launch_for(tuple([(each.dtype, own.shape, own.strides) for each, own in zip(arrays, plain, strict=True)]))
        if launch is None:
            assert otherwise is not None
            return otherwise(*arrays)
        y = xp.empty(launch.shape, np.uint16 if launch.dtype == BFLOAT16 else launch.dtype)
        if launch.kernel is not None:
            launch.kernel(launch.grid, (THREADS,), (*plain, y, *launch.numbers))
        return BFloat16Array(y) if launch.dtype == BFLOAT16 else y

    return run


def step(op: str, inputs: tuple[str, ...], output: str = OUTPUT, attributes: Mapping[str, Attribute] | None = None) -> Step:
    """A step of a chain that a kernel writes for itself."""
    return Step(op, FIRST_VERSIONS.get(op, 1), inputs, output, attributes or {})
