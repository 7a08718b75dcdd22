"""Conversion between element types: Cast, CastLike."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from miniort.kernels import KernelTable, NodeContext, Run
from miniort.pool import SMALLEST
from miniort.types import STRING, Array, DType, dtype_from_onnx
from miniort_cpu.buffers import Allocate
from miniort_cpu.floating_point import FLOAT32, FLOAT64, NARROW_FLOATS

kernels = KernelTable("cpu")

INT8 = np.dtype(np.int8)
INT64 = np.dtype(np.int64)
SMALL_INTEGERS = frozenset(np.dtype(dtype) for dtype in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2))
FLOAT8_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
SATURATING = frozenset(dtype for dtype in NARROW_FLOATS if dtype.itemsize == 1)
"""The 8-bit floats whose values out of range become the largest one, unless `saturate` is 0."""


@kernels.register("Cast", versions=(6, None), view_of=0)
def cast(node: NodeContext) -> Run:
    """`x` in the element type `to`. x: [...] any type -> same shape; x itself where it has that type already."""
    dtype = dtype_from_onnx(node.attribute("to"))
    saturate, round_mode = bool(node.attribute("saturate", 1)), node.attribute("round_mode", "up")
    allocate = node.provider.allocate

    def run(x: Array) -> Array:
        return x if x.dtype == dtype else convert(x, dtype, saturate, round_mode, allocate)

    return run


@kernels.register("CastLike", versions=(15, None), view_of=0, metadata_inputs=(1,))
def cast_like(node: NodeContext) -> Run:
    """`x` in the element type of `like`. x: [...] any type; like: any shape -> x's shape."""
    saturate, round_mode = bool(node.attribute("saturate", 1)), node.attribute("round_mode", "up")
    allocate = node.provider.allocate

    def run(x: Array, like: Array) -> Array:
        return x if x.dtype == like.dtype else convert(x, like.dtype, saturate, round_mode, allocate)

    return run


def convert(x: Array, dtype: DType, saturate: bool, round_mode: str, allocate: Allocate) -> Array:
    """A new array with x's values in another type, by the rules of Cast's specification."""
    if dtype == STRING:
        return _to_text(x)
    if x.dtype == STRING:
        x = _from_text(x, dtype)
    if x.dtype.kind == "V" and dtype.kind == "V":  # ml_dtypes converts its types to NumPy's and back, and few to each other
        x = x.astype(INT8 if x.dtype in SMALL_INTEGERS else FLOAT32)
    if dtype == FLOAT8_E8M0:
        return _to_e8m0(x, saturate, round_mode)
    if saturate and dtype in SATURATING:
        largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
        wide = x if x.dtype in (FLOAT32, FLOAT64) else x.astype(FLOAT32)
        return np.minimum(np.maximum(wide, -largest, out=...), largest, out=...).astype(dtype)  # type: ignore[no-any-return]
    if x.nbytes < SMALLEST:
        return x.astype(dtype)
    out = allocate(x.shape, dtype)
    np.copyto(out, x, casting="unsafe")
    return out


def _to_text(x: Array) -> Array:
    """Numbers in their shortest form that reads back as the same value of their type."""
    if x.dtype.kind == "V":
        x = x.astype(FLOAT32)
    return x.astype(np.str_).astype(STRING)


def _from_text(x: Array, dtype: DType) -> Array:
    """Text as numbers: integers exactly where all of it is integers, else through float64 (which knows "INF", "-inf", "NaN")."""
    if dtype.kind in "iu":
        try:
            return x.astype(INT64 if dtype.kind == "i" else np.dtype(np.uint64))
        except (ValueError, OverflowError):
            pass  # not plain integers: "3.0", "1e3"
    return x.astype(FLOAT64)


def _to_e8m0(x: Array, saturate: bool, round_mode: str) -> Array:
    """Powers of two from 2^-127 to 2^127, as a biased exponent without a mantissa (OCP Microscaling Formats v1.0); 255 is NaN.

    round_mode: "up" to the next power, "down" to the one before, "nearest" to the nearer one, half-way up. Values too large become
    the largest power if `saturate`, else NaN.
    """
    bits = x.astype(FLOAT32).view(np.uint32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    not_a_number = (exponent == 0xFF) & (mantissa != 0)
    if round_mode == "up":
        exponent = exponent + (mantissa > 0)
    elif round_mode == "nearest":
        exponent = exponent + (mantissa >= 0x400000)
    exponent = np.minimum(exponent, 0xFE if saturate else 0xFF)
    return np.where(not_a_number, 0xFF, exponent).astype(np.uint8).view(FLOAT8_E8M0)
