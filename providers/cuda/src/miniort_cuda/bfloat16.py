"""bfloat16 on a device whose arrays have no such type: the upper halves of float32 numbers, kept as 16-bit integers.

Kernels never see them. One that moves elements is given the integers; any other is given float32, and what it returns is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from miniort.kernels import Kernel, NodeContext, Run
from miniort_cuda.element_types import BFLOAT16

MOVING = frozenset(
    {"Identity", "Reshape", "Flatten", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Concat", "Split", "Slice", "Gather", "GatherND"}
    | {"GatherElements", "Tile", "ScatterND", "ScatterElements", "DepthToSpace", "SpaceToDepth"}
)
"""Ops that only move elements, so the integers do as well."""

HIGH_HALF = 16
QUIET_NAN = 0x7FC0


class BFloat16Array:
    """An array of bfloat16 on the device: `bits` holds it, uint16 of the same shape."""

    __slots__ = ("bits",)

    dtype = BFLOAT16

    def __init__(self, bits: Any) -> None:
        self.bits = bits

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        shape: tuple[int, ...] = self.bits.shape
        return shape

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        nbytes: int = self.bits.nbytes
        return nbytes


def widened(x: BFloat16Array) -> Any:
    """The same numbers as float32, which has all of them."""
    return (x.bits.astype(np.uint32) << HIGH_HALF).view(np.float32)


def rounded(xp: Any, x: Any) -> BFloat16Array:
    """The nearest bfloat16 numbers, ties to the even one; NaN stays NaN. x: float32, any shape."""
    bits = xp.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    nearest = (bits + (((bits >> HIGH_HALF) & 1) + 0x7FFF)) >> HIGH_HALF
    return BFloat16Array(xp.where(xp.isnan(x), QUIET_NAN, nearest).astype(np.uint16))


def for_bfloat16(kernel: Kernel, compile_kernel: Callable[[NodeContext], Run], xp: Any) -> Callable[[NodeContext], Run]:
    """A kernel that takes bfloat16 as well. An output is rounded where the node says that it's of that type, or says nothing."""
    if kernel.domain == "miniort" and kernel.op in ("CacheAppend", "CacheStore"):
        return compile_kernel  # the cache takes them as they are
    moves = kernel.op in MOVING and kernel.domain == ""

    def compile_either(node: NodeContext) -> Run:
        run = compile_kernel(node)
        rounds = [output is None or output.dtype is None or output.dtype == BFLOAT16 for output in node.outputs]

        def run_either(*inputs: Any) -> Any:
            if not any(type(each) is BFloat16Array for each in inputs):
                return run(*inputs)
            if moves:
                result = run(*(each.bits if type(each) is BFloat16Array else each for each in inputs))
                return tuple(map(BFloat16Array, result)) if type(result) is tuple else BFloat16Array(result)
            result = run(*(widened(each) if type(each) is BFloat16Array else each for each in inputs))
            if type(result) is tuple:
                return tuple(narrow(each) if rounding else each for each, rounding in zip(result, rounds, strict=False))
            return narrow(result) if rounds[0] else result

        return run_either

    def narrow(x: Any) -> Any:
        return rounded(xp, x) if getattr(x, "dtype", None) == np.float32 else x

    return compile_either
