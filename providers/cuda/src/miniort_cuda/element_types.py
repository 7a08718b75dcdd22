"""The element types that this provider's arrays can have. A kernel names those that it takes, so that others go elsewhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from miniort.types import DType

FLOAT16: DType = np.dtype(np.float16)
BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
FLOAT32: DType = np.dtype(np.float32)
FLOATS: frozenset[DType] = frozenset({*(np.dtype(name) for name in ("float16", "float32", "float64")), BFLOAT16})
SIGNED_INTEGERS: frozenset[DType] = frozenset(np.dtype(name) for name in ("int8", "int16", "int32", "int64"))
UNSIGNED_INTEGERS: frozenset[DType] = frozenset(np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64"))
BYTES: frozenset[DType] = frozenset({np.dtype(np.int8), np.dtype(np.uint8)})
INTEGERS: frozenset[DType] = SIGNED_INTEGERS | UNSIGNED_INTEGERS
NUMBERS: frozenset[DType] = FLOATS | INTEGERS
BOOL: frozenset[DType] = frozenset({np.dtype(np.bool_)})
ALL: frozenset[DType] = NUMBERS | BOOL


def compute_dtype(dtype: DType) -> DType:
    """The type to sum in: float32, or float64 for that."""
    return np.promote_types(dtype, FLOAT32)
