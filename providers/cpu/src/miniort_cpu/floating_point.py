"""What ONNX's floating-point arithmetic needs beyond NumPy's: float32 inside ops on narrower floats."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from miniort.types import Array, DType

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

NARROW_FLOATS = frozenset(
    np.dtype(dtype)
    for dtype in (
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
    )
)
"""Floats of 16 bits and fewer. An op that rounds more than once computes in float32 and rounds its result once."""


def compute_dtype(dtype: DType) -> DType:
    """The type to compute in: float32 for narrow floats, else the type itself."""
    return FLOAT32 if dtype in NARROW_FLOATS else dtype


def widen(x: Array) -> Array:
    """`x` in the type to compute in: a float32 copy of narrow floats, else x itself."""
    return x.astype(FLOAT32) if x.dtype in NARROW_FLOATS else x


def as_dtype(x: Array, dtype: DType) -> Array:
    """`x` in a type: itself where it has that already."""
    return x if x.dtype == dtype else x.astype(dtype)
