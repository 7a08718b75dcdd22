"""Elements moved and converted: Transpose of the last two axes, Cast between the types that vDSP converts."""

from __future__ import annotations

from math import prod

import numpy as np

from miniort.kernels import KernelTable, NodeContext, NodeView, Run
from miniort.types import Array, DType, dtype_from_onnx, type_string
from miniort_accelerate.operands import FLOAT32, address, contiguous, library_of, require_types

kernels = KernelTable("accelerate")

F32, F64, I32, U8 = (np.dtype(name) for name in ("float32", "float64", "int32", "uint8"))
CONVERSIONS: dict[tuple[DType, DType], str] = {(F32, F64): "widen", (F64, F32): "narrow", (I32, F32): "from_int32", (U8, F32): "from_uint8"}
"""From one type to another, the function that does it."""


def refuse_transpose(node: NodeView) -> str | None:
    """VDSP transposes matrices."""
    perm = node.attribute("perm", None)
    info = node.inputs[0]
    rank = len(perm) if perm is not None else None if info is None or info.shape is None else len(info.shape)
    wanted = None if rank is None or rank < 2 else (*range(rank - 2), rank - 1, rank - 2)
    if wanted is not None and (tuple(perm) == wanted if perm is not None else rank == 2):
        return None
    return "its kernel swaps the last two axes, and leaves the others"


@kernels.register("Transpose", (1, None), types={"T": FLOAT32}, refuse=refuse_transpose)
def transpose(node: NodeContext) -> Run:
    """The last two axes swapped, in a new array. x: [..., M, N] -> [..., N, M]."""
    library, allocate = library_of(node), node.provider.allocate

    def run(x: Array) -> Array:
        require_types(node, FLOAT32, x)
        source = contiguous(x)
        rows, columns = x.shape[-2:]
        out: Array = allocate((*x.shape[:-2], columns, rows), x.dtype)
        start, target, size = address(source), address(out), rows * columns * 4
        for number in range(prod(x.shape[:-2]) if x.size else 0):
            library.mtrans(start + number * size, 1, target + number * size, 1, columns, rows)
        return out

    return run


def refuse_cast(node: NodeView) -> str | None:
    """The types must be known, and be a pair that vDSP converts."""
    source, target = node.dtype(0), dtype_from_onnx(node.attribute("to"))
    if source is not None and (source, target) in CONVERSIONS:
        return None
    return f"Accelerate has no conversion of {type_string(source)} to {type_string(target)}"


@kernels.register("Cast", (6, None), refuse=refuse_cast)
def cast(node: NodeContext) -> Run:
    """The same numbers in element type `to`. x: any shape -> same shape."""
    source, target = node.dtype(0), dtype_from_onnx(node.attribute("to"))
    assert source is not None
    convert, allocate = getattr(library_of(node), CONVERSIONS[source, target]), node.provider.allocate

    def run(x: Array) -> Array:
        require_types(node, frozenset({source}), x)
        out: Array = allocate(x.shape, target)
        if x.size:
            plain = contiguous(x)
            convert(address(plain), 1, address(out), 1, x.size)
        return out

    return run
