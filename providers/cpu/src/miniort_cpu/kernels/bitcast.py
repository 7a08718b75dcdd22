"""The same bits as another element type: BitCast."""

from __future__ import annotations

import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array, DType, dtype_from_onnx
from miniort_cpu.kernels.quantization import integer_range

kernels = KernelTable("cpu")

NARROW = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
"""Bits of the types that fill only a part of the byte that an array keeps for each element."""


@kernels.register("BitCast", versions=(26, None), view_of=0)
def bitcast(node: NodeContext) -> Run:
    """`x` with its bits read as the type `to`, which has as many. x: [...] any type but strings -> same shape, a view."""
    dtype = dtype_from_onnx(node.attribute("to"))

    def run(x: Array) -> Array:
        if _bits(x.dtype) != _bits(dtype):
            raise ValueError(f"BitCast wants a type of {_bits(x.dtype)} bits, as {x.dtype} has, found {dtype}")
        return x.view(dtype) if x.dtype.name not in NARROW else _narrow(x, dtype)

    return run


def _bits(dtype: DType) -> int:
    return NARROW.get(dtype.name, dtype.itemsize * 8)


def _narrow(x: Array, dtype: DType) -> Array:
    """Types of fewer than 8 bits: a signed integer's sign is kept in the whole byte, so it's rebuilt from the low bits."""
    bits = np.bitwise_and(x.view(np.uint8), (1 << _bits(dtype)) - 1, out=...)
    limits = integer_range(dtype)
    if limits is not None and limits[0] < 0:
        sign = 1 << (_bits(dtype) - 1)
        return ((bits ^ sign).astype(np.int8) - np.int8(sign)).astype(dtype)
    return bits.view(dtype)
