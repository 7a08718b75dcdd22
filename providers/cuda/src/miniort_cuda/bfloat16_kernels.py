"""Kernels for bfloat16, which hardly any of ours knows.

One that moves elements is given the integers that they're kept as; any other is given float32, and what it returns is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx

from miniort.graph.elementwise_body import Body
from miniort.kernels import Kernel, NodeContext, Run
from miniort_cuda.bfloat16 import BFloat16Array, rounded, widened
from miniort_cuda.chains import in_one_launch, step
from miniort_cuda.element_types import BFLOAT16

MOVING = frozenset(
    {"Identity", "Reshape", "Flatten", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Concat", "Split", "Slice", "Gather", "GatherND"}
    | {"GatherElements", "Tile", "ScatterND", "ScatterElements", "DepthToSpace", "SpaceToDepth"}
)
"""Ops that only move elements, so the integers do as well."""

TO_FLOAT32, TO_BFLOAT16 = (
    Body(("x",), (step("Cast", ("x",), attributes={"to": target}),)) for target in (onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16)
)
"""There and back, in a launch each."""


def for_bfloat16(kernel: Kernel, compile_kernel: Callable[[NodeContext], Run], xp: Any) -> Callable[[NodeContext], Run]:
    """A kernel that takes bfloat16 as well. An output is rounded where the node says that it's of that type, or says nothing."""
    if kernel.domain == "miniort" and kernel.op in ("CacheAppend", "CacheStore", "FusedElementwise"):
        return compile_kernel  # the cache takes them as they are, and kernels that are generated know how to read and write them
    moves = kernel.op in MOVING and kernel.domain == ""

    def compile_either(node: NodeContext) -> Run:
        run = compile_kernel(node)
        widen = in_one_launch(node, TO_FLOAT32, widened)
        narrow = in_one_launch(node, TO_BFLOAT16, partial(rounded, xp))
        rounds = [output is None or output.dtype is None or output.dtype == BFLOAT16 for output in node.outputs]

        def run_either(*inputs: Any) -> Any:
            if not any(type(each) is BFloat16Array for each in inputs):
                return run(*inputs)
            if moves:
                result = run(*(each.bits if type(each) is BFloat16Array else each for each in inputs))
                return tuple(map(BFloat16Array, result)) if type(result) is tuple else BFloat16Array(result)
            result = run(*(widen(each) if type(each) is BFloat16Array else each for each in inputs))
            if type(result) is tuple:
                return tuple(narrow(each) if rounding and is_float(each) else each for each, rounding in zip(result, rounds, strict=False))
            return narrow(result) if rounds[0] and is_float(result) else result

        return run_either

    return compile_either


def is_float(x: Any) -> bool:
    """Whether something is an array of float32: of what a kernel returns, only that is rounded."""
    return getattr(x, "dtype", None) == np.float32
